"use strict";

// The page has every element and name already. This sets numbers, states and positions for a
// prompt length, all from straight lines and ranges in the data.

const data = JSON.parse(document.getElementById("data").textContent);
const SIDES = ["written", "read"];
const LETTER_WIDTH = 0.5 * parseFloat(getComputedStyle(document.documentElement).fontSize);
const LEAST_LINK_GAP = 4;
const element = (id) => document.getElementById(id);
const slots = Object.fromEntries(SIDES.map((side) => [side, [...element(side).children]]));
const rows = [...element("rows").children];
const names = rows.map((row) => row.querySelector("bdi").textContent);
const labels = Object.fromEntries(
  SIDES.map((side) => [side, slots[side].map((slot) => (slot.querySelector("text:not(.mark)") || { textContent: "" }).textContent)]),
);
const totals = document.querySelectorAll(".total span");
const links = [...element("links").querySelectorAll("line:not(.chosen)")];
const chosenLinks = [...element("links").querySelectorAll(".chosen")];
const linkedRows = data.rows.flatMap(([written, read], row) => (written >= 0 && read >= 0 ? [row] : []));
const picture = element("tracks");

let tokens = data.tokens;
let places = {};
let scale = 1;
let chosen = null;

const format = (number) => number.toLocaleString("en-US");
const percent = (part) => `${((100 * part) / scale).toFixed(4)}%`;
const find = (parts) => parts.findLast(([first]) => first <= tokens);

function computeBytes(size) {
  const [first, nbytes, growth] = find(data.sizes[size]);
  return nbytes + growth * (tokens - first);
}

// Slots of shared memory are one after the other; arrays of their own are drawn by position.
function placeSlots() {
  const sizes = Object.fromEntries(SIDES.map((side) => [side, data[side].map(([size]) => computeBytes(size))]));
  const count = Math.max(sizes.written.length, sizes.read.length);
  const columns = Array.from({ length: count }, (_, at) => Math.max(sizes.written[at] || 0, sizes.read[at] || 0));
  const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
  scale = data.shared ? Math.max(1, sum(sizes.written), sum(sizes.read)) : Math.max(1, sum(columns));
  for (const side of SIDES) {
    let left = 0;
    let position = 0;
    places[side] = sizes[side].map((nbytes, at) => {
      const place = { offset: data.shared ? left : position, nbytes, left };
      left += data.shared ? nbytes : columns[at];
      position += data[side][at][2];
      return place;
    });
  }
  SIDES.forEach((side, at) => {
    totals[at].textContent = format(sum(sizes[side]));
  });
}

function setClass(item, kind) {
  for (const [other] of data.kinds) {
    item.classList.toggle(other, other === kind);
  }
}

function drawSlots() {
  const width = picture.getBoundingClientRect().width;
  for (const side of SIDES) {
    slots[side].forEach((slot, at) => {
      const { left, nbytes } = places[side][at];
      const row = data[side][at][1];
      slot.setAttribute("x", percent(left));
      slot.setAttribute("width", percent(nbytes));
      const room = (nbytes / scale) * width;
      slot.classList.toggle("narrow", room < labels[side][at].length * LETTER_WIDTH);
      slot.classList.toggle("tiny", room < 2 * LETTER_WIDTH);
      if (row >= 0) {
        const [kind, mark, text] = data.kinds[find(data.rows[row][2])[1]];
        setClass(slot, kind);
        slot.querySelector(".mark").textContent = mark;
        slot.setAttribute("aria-label", `${names[row]}: ${text}`);
      }
    });
  }
  element("links").classList.toggle("dense", links.length * LEAST_LINK_GAP > width);
  links.forEach((line, at) => {
    const [written, read, states] = data.rows[linkedRows[at]];
    line.setAttribute("x1", percent(places.written[written].left));
    line.setAttribute("x2", percent(places.read[read].left));
    setClass(line, data.kinds[find(states)[1]][0]);
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
  rows.forEach((row, at) => {
    const [written, read, states] = data.rows[at];
    const places_ = [places.written[written], places.read[read]];
    const [, kind, cause] = find(states);
    const [name, mark, text] = data.kinds[kind];
    const cells = row.querySelectorAll("td");
    const texts = [formatBytes(...places_), ...places_.map(formatPlace), `${mark} ${text}`];
    if (data.causes.some(Boolean)) {
      texts.push(data.causes[cause]);
    }
    texts.forEach((value, column) => {
      if (cells[column].textContent !== value) {
        cells[column].textContent = value;
      }
    });
    setClass(row, name);
  });
}

function formatRange({ offset, nbytes }) {
  return nbytes ? `bytes ${format(offset)} to ${format(offset + nbytes - 1)}` : "no bytes";
}

// What prefill wrote to the bytes at which decode looks for a buffer.
function listOverlaps(read) {
  const end = read.offset + read.nbytes;
  let covered = 0;
  const parts = [];
  places.written.forEach((place, at) => {
    const common = Math.min(end, place.offset + place.nbytes) - Math.max(read.offset, place.offset);
    if (common > 0) {
      const row = data.written[at][1];
      parts.push(`${format(common)} bytes of ${row < 0 ? "nothing" : names[row]}`);
      covered += common;
    }
  });
  if (covered < read.nbytes) {
    parts.push(`${format(read.nbytes - covered)} bytes beyond the memory`);
  }
  return parts;
}

function describe(row) {
  const [written, read, states] = data.rows[row];
  const [from, to] = [places.written[written], places.read[read]];
  const [, kind, cause] = find(states);
  const sentences = [];
  if (!data.shared) {
    sentences.push(`Prefill: ${from ? `${formatPlace(from)}, ${format(from.nbytes)} bytes` : "nothing"}.`);
    sentences.push(`Decode: ${to ? `${formatPlace(to)}, ${format(to.nbytes)} bytes` : "nothing"}.`);
  } else {
    sentences.push(from ? `Prefill's place: ${formatRange(from)}.` : "Prefill does not write it.");
    if (to) {
      const parts = listOverlaps(to);
      const more = parts.length > 4 ? ` and ${parts.length - 4} more` : "";
      sentences.push(`Decode's place: ${formatRange(to)}, where prefill has ${parts.slice(0, 4).join(", ")}${more}.`);
    } else {
      sentences.push("Decode does not read it.");
    }
  }
  const state = `${data.kinds[kind][1]} ${data.kinds[kind][2]}`;
  return `${names[row]}. ${sentences.join(" ")} ${state}${data.causes[cause] ? `: ${data.causes[cause]}` : ""}.`;
}

function drawChosen() {
  const [written, read] = chosen === null ? [-1, -1] : data.rows[chosen];
  for (const side of SIDES) {
    slots[side].forEach((slot, at) => {
      const is = chosen !== null && data[side][at][1] === chosen;
      slot.classList.toggle("chosen", is);
      slot.setAttribute("aria-selected", String(is));
    });
  }
  rows.forEach((row, at) => row.classList.toggle("chosen", at === chosen));
  const [from, to] = [places.written[written], places.read[read]];
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
  const [, kind, text] = find(data.outcomes);
  const prompt = length === 1 ? "1 token" : `${length} tokens`;
  element("length").textContent = prompt;
  element("caption-length").textContent = prompt;
  if (element("outcome").textContent !== text) {
    element("outcome").textContent = text;
  }
  element("outcome").className = kind;
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
  return Math.min(Math.max(Math.round(length) || 1, 1), data.last);
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
  if (row !== null && row >= 0 && row !== chosen) {
    chosen = row;
    drawChosen();
  }
}

function findSlot(target) {
  const slot = target.closest(".slot");
  for (const side of SIDES) {
    const at = slots[side].indexOf(slot);
    if (at >= 0) {
      return [side, at];
    }
  }
  return [null, -1];
}

function chooseSlot(event) {
  const [side, at] = findSlot(event.target);
  if (side) {
    choose(data[side][at][1]);
  }
}

function focusSlot(side, at) {
  const slot = slots[side][Math.min(Math.max(at, 0), slots[side].length - 1)];
  if (slot) {
    for (const other of [...slots.written, ...slots.read]) {
      other.setAttribute("tabindex", other === slot ? "0" : "-1");
    }
    slot.focus();
    slot.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
}

function moveByKey(event) {
  const [side, at] = findSlot(event.target);
  if (!side) {
    return;
  }
  const twin = side === "written" ? "read" : "written";
  const row = data[side][at][1];
  const other = row < 0 ? at : data.rows[row][twin === "written" ? 0 : 1];
  const moves = {
    ArrowLeft: [side, at - 1],
    ArrowRight: [side, at + 1],
    Home: [side, 0],
    End: [side, slots[side].length - 1],
    ArrowUp: side === "read" && other >= 0 ? [twin, other] : [side, at],
    ArrowDown: side === "written" && other >= 0 ? [twin, other] : [side, at],
  };
  if (moves[event.key]) {
    event.preventDefault();
    focusSlot(...moves[event.key]);
  }
}

function setZoom() {
  picture.style.width = `${100 * Number(element("zoom").value)}%`;
  drawSlots();
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
element("zoom").addEventListener("change", setZoom);
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
(slots.written[0] || slots.read[0]).setAttribute("tabindex", "0");
for (const slot of [...slots.written, ...slots.read].slice(1)) {
  slot.setAttribute("tabindex", "-1");
}
show(readAddress() ?? tokens);
