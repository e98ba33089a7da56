"use strict";

// The page has every element and name already. This sets numbers, states and positions for a
// prompt length. Between two lengths of the data sizes are on a straight line, and states are
// those of the shorter one.

const data = JSON.parse(document.getElementById("data").textContent);
const SIDES = ["written", "read"];
const LETTER = 0.5 * parseFloat(getComputedStyle(document.documentElement).fontSize);
const LEAST_LINK_GAP = 4;
const LAST = data.lengths.at(-1);
const element = (id) => document.getElementById(id);
const picture = element("tracks");
const slots = SIDES.map((id) => [...element(id).children]);
const rulers = [...picture.querySelectorAll(".ruler")].map((ruler) => [...ruler.children]);
const layerCount = new Set(data.tracks.flat().map(([, layer]) => layer)).size;
const rows = [...element("rows").children];
const names = rows.map((row) => row.querySelector("bdi").textContent);
const totals = document.querySelectorAll(".total span");
const links = [...element("links").querySelectorAll("line:not(.chosen)")];
const chosenLinks = [...element("links").querySelectorAll(".chosen")];
const linkedRows = data.rows.filter(([places]) => Math.min(...places) >= 0);

let tokens = data.lengths[data.shown];
let at = data.shown; // the longest of the lengths that is not longer than the prompt
let places = [];
let scale = 1;
let chosen = null;

const format = (number) => number.toLocaleString("en-US");
const percent = (part) => `${((100 * part) / scale).toFixed(4)}%`;
const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
const getPlace = (row, side) => (row === null ? undefined : places[side][data.rows[row][0][side]]);
const getState = (row) => data.rows[row][1][at];

function computeBytes(sizes) {
  const [start, end] = [data.lengths[at], data.lengths[at + 1]];
  const growth = tokens > start ? (sizes[at + 1] - sizes[at]) / (end - start) : 0;
  return sizes[at] + growth * (tokens - start);
}

// Slots of shared memory are one after the other; arrays of their own are drawn by position.
function placeSlots() {
  const sizes = data.tracks.map((track) => track.map(([, , each]) => computeBytes(each)));
  const columns = Array.from({ length: Math.max(...sizes.map((each) => each.length)) },
    (_, slot) => Math.max(...sizes.map((each) => each[slot] || 0)));
  scale = Math.max(1, ...(data.shared ? sizes : [columns]).map(sum));
  places = sizes.map((own, side) => {
    let left = 0;
    totals[side].textContent = format(sum(own));
    return own.map((nbytes, slot) => {
      const place = { offset: data.shared ? left : slot, nbytes, left };
      left += data.shared ? nbytes : columns[slot];
      return place;
    });
  });
}

function setState(item, state) {
  for (const each of Object.keys(data.states)) {
    item.classList.toggle(each, each === state);
  }
}

function drawSlots() {
  const width = picture.getBoundingClientRect().width;
  const step = [1, 2, 5, 10, 20, 50].find((each) => (each * width) / layerCount >= 5 * LETTER) || 100;
  SIDES.forEach((_, side) => {
    let end = 0;
    let layer = null;
    slots[side].forEach((slot, index) => {
      const { left, nbytes } = places[side][index];
      const [row, ownLayer] = data.tracks[side][index];
      const room = (nbytes / scale) * width;
      const start = (left / scale) * width;
      slot.setAttribute("x", percent(left));
      slot.setAttribute("width", percent(nbytes));
      slot.classList.toggle("tiny", room < 2 * LETTER);
      const number = rulers[side][index];
      const isLabeled = ownLayer !== layer && ownLayer !== null && ownLayer % step === 0 && start >= end;
      const label = isLabeled ? `${end ? "" : "layer "}${ownLayer}` : "";
      number.setAttribute("x", percent(left));
      number.textContent = label;
      layer = ownLayer;
      end = isLabeled ? start + (label.length + 1) * LETTER : end;
      if (row >= 0) {
        const [mark, text] = data.states[getState(row)];
        const part = data.rows[row][2];
        setState(slot, getState(row));
        slot.querySelector("text").textContent = room > (part.length + 1.5) * LETTER ? part : "";
        slot.querySelector(".mark").textContent = room > 2.5 * LETTER ? mark : "";
        slot.setAttribute("aria-label", `${names[row]}: ${text}`);
      }
    });
  });
  element("links").classList.toggle("dense", links.length * LEAST_LINK_GAP > width);
  links.forEach((line, index) => {
    const [[written, read], states] = linkedRows[index];
    line.setAttribute("x1", percent(places[0][written].left));
    line.setAttribute("x2", percent(places[1][read].left));
    setState(line, states[at]);
  });
}

function formatPlace(place) {
  return place ? `${data.shared ? "byte" : "array"} ${format(place.offset)}` : "—";
}

function formatBytes(written, read) {
  if (written && read && written.nbytes !== read.nbytes) {
    return `${format(written.nbytes)} written, ${format(read.nbytes)} read`;
  }
  const place = written || read;
  return place ? format(place.nbytes) : "—";
}

function fillTable() {
  rows.forEach((row, index) => {
    const [written, read] = [getPlace(index, 0), getPlace(index, 1)];
    const state = data.states[getState(index)].join(" ");
    const texts = [formatBytes(written, read), formatPlace(written), formatPlace(read), state];
    const cells = row.querySelectorAll("td");
    texts.forEach((text, column) => {
      cells[column].textContent = text;
    });
    setState(row, getState(index));
  });
}

function formatRange({ offset, nbytes }) {
  return nbytes ? `bytes ${format(offset)} to ${format(offset + nbytes - 1)}` : "no bytes";
}

// What prefill wrote to the bytes at which decode looks for a buffer.
function listOverlaps(read) {
  const end = read.offset + read.nbytes;
  let rest = read.nbytes;
  const parts = [];
  places[0].forEach((place, slot) => {
    const common = Math.min(end, place.offset + place.nbytes) - Math.max(read.offset, place.offset);
    if (common > 0) {
      const row = data.tracks[0][slot][0];
      parts.push(`${format(common)} bytes of ${row < 0 ? "nothing" : names[row]}`);
      rest -= common;
    }
  });
  if (rest > 0) {
    parts.push(`${format(rest)} bytes beyond the memory`);
  }
  return parts.length > 4 ? [...parts.slice(0, 4), `${parts.length - 4} more`] : parts;
}

function describe(row) {
  const [from, to] = [getPlace(row, 0), getPlace(row, 1)];
  const say = (place) => (place ? `${formatPlace(place)}, ${format(place.nbytes)} bytes` : "nothing");
  let text = `Prefill: ${say(from)}. Decode: ${say(to)}.`;
  if (data.shared) {
    text = from ? `Prefill's place: ${formatRange(from)}.` : "Prefill does not write it.";
    text += to ? ` Decode's place: ${formatRange(to)}, where prefill has ${listOverlaps(to).join(", ")}.` : " Decode does not read it.";
  }
  return `${names[row]}. ${text} ${data.states[getState(row)].join(" ")}.`;
}

function drawChosen() {
  slots.forEach((track, side) => track.forEach((slot, index) => {
    const is = chosen !== null && data.tracks[side][index][0] === chosen;
    slot.classList.toggle("chosen", is);
    slot.setAttribute("aria-selected", String(is));
  }));
  rows.forEach((row, index) => row.classList.toggle("chosen", index === chosen));
  const [from, to] = [getPlace(chosen, 0), getPlace(chosen, 1)];
  chosenLinks.forEach((line, end) => {
    line.setAttribute("visibility", from && to ? "visible" : "hidden");
    if (from && to) {
      line.setAttribute("x1", percent(from.left + end * from.nbytes));
      line.setAttribute("x2", percent(to.left + end * to.nbytes));
    }
  });
  if (chosen !== null) {
    element("detail").textContent = describe(chosen);
  }
}

function show(length) {
  tokens = length;
  at = data.lengths.findLastIndex((each) => each <= tokens);
  const [state, text] = data.outcomes[at];
  const prompt = length === 1 ? "1 token" : `${format(length)} tokens`;
  element("length").textContent = prompt;
  element("caption-length").textContent = prompt;
  if (element("outcome").textContent !== text) {
    element("outcome").textContent = text;
  }
  element("outcome").className = state;
  element("slider").value = length;
  element("slider").setAttribute("aria-valuetext", `${prompt}: ${text}`);
  if (Number(element("number").value) !== length) {
    element("number").value = length;
  }
  placeSlots();
  drawSlots();
  fillTable();
  drawChosen();
}

function clamp(length) {
  return Math.min(Math.max(Math.round(length) || 1, 1), LAST);
}

// The address names the length, so that a page can be linked to. Some places of files refuse.
function remember() {
  try {
    history.replaceState(null, "", `#tokens=${tokens}`);
  } catch {
    return;
  }
}

function readAddress() {
  const match = /^#tokens=(\d{1,12})$/.exec(location.hash);
  return match ? clamp(Number(match[1])) : null;
}

function choose(row) {
  if (row !== undefined && row >= 0 && row !== chosen) {
    chosen = row;
    drawChosen();
  }
}

function findSlot(target) {
  const slot = target.closest(".slot");
  const side = slots.findIndex((track) => track.includes(slot));
  return [side, side < 0 ? -1 : slots[side].indexOf(slot)];
}

function chooseSlot(event) {
  const [side, index] = findSlot(event.target);
  choose(data.tracks[side]?.[index][0]);
}

function focusSlot(side, index) {
  const slot = slots[side][Math.min(Math.max(index, 0), slots[side].length - 1)];
  if (slot) {
    slots.flat().forEach((other) => other.setAttribute("tabindex", other === slot ? "0" : "-1"));
    slot.focus();
    slot.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
}

function moveByKey(event) {
  const [side, index] = findSlot(event.target);
  if (side < 0) {
    return;
  }
  const row = data.tracks[side][index][0];
  const twin = row < 0 ? -1 : data.rows[row][0][1 - side];
  const across = twin < 0 ? [side, index] : [1 - side, twin];
  const move = {
    ArrowLeft: [side, index - 1],
    ArrowRight: [side, index + 1],
    Home: [side, 0],
    End: [side, slots[side].length - 1],
    ArrowUp: side === 1 ? across : [side, index],
    ArrowDown: side === 0 ? across : [side, index],
  }[event.key];
  if (move) {
    event.preventDefault();
    focusSlot(...move);
  }
}

element("slider").addEventListener("input", (event) => {
  show(clamp(event.target.valueAsNumber));
  remember();
});
element("number").addEventListener("input", (event) => {
  if (event.target.value !== "" && event.target.checkValidity()) {
    show(event.target.valueAsNumber);
    remember();
  }
});
element("number").addEventListener("change", (event) => {
  const typed = event.target.valueAsNumber;
  show(Number.isNaN(typed) ? tokens : clamp(typed));
  remember();
});
element("zoom").addEventListener("change", (event) => {
  picture.style.width = `${100 * Number(event.target.value)}%`;
  drawSlots();
});
element("failing").addEventListener("change", (event) => {
  element("rows").classList.toggle("failing-only", event.target.checked);
});
addEventListener("hashchange", () => {
  const length = readAddress();
  if (length !== null) {
    show(length);
  }
});
addEventListener("resize", drawSlots);
picture.addEventListener("pointerover", chooseSlot);
picture.addEventListener("click", chooseSlot);
// A listener on the picture would make the picture itself a stop of the keyboard.
picture.parentElement.addEventListener("focusin", chooseSlot);
picture.addEventListener("keydown", moveByKey);
element("rows").addEventListener("pointerover", (event) => choose(rows.indexOf(event.target.closest("tr"))));

for (const part of document.querySelectorAll(".controls, #detail")) {
  part.hidden = false;
}
slots.flat().forEach((slot, index) => slot.setAttribute("tabindex", index ? "-1" : "0"));
show(readAddress() ?? tokens);
