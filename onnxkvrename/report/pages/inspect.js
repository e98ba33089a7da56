"use strict";

// Each map is one stop of the keyboard: the arrow keys move the focus from cell to cell.
for (const map of document.querySelectorAll(".map")) {
  const rows = [];
  for (const table of map.querySelectorAll("table")) {
    [...table.tBodies[0].rows].forEach((row, y) => {
      rows[y] = [...(rows[y] || []), ...row.querySelectorAll("td")];
    });
  }
  const places = new Map(rows.flatMap((row, y) => row.map((cell, x) => [cell, [x, y]])));
  let current = rows[0][0];
  for (const cell of places.keys()) {
    cell.tabIndex = cell === current ? 0 : -1;
  }
  const open = (event) => event.target.closest("td")?.classList.remove("closed");
  map.addEventListener("mouseover", open);
  map.addEventListener("focusin", (event) => {
    current.tabIndex = -1;
    current = event.target.closest("td");
    current.tabIndex = 0;
    open(event);
  });
  map.addEventListener("keydown", (event) => {
    const [x, y] = places.get(current);
    const end = rows[y].length - 1;
    const move = {
      ArrowLeft: [x - 1, y], ArrowRight: [x + 1, y], ArrowUp: [x, y - 1], ArrowDown: [x, y + 1],
      Home: [0, y], End: [end, y],
    }[event.key];
    if (event.key === "Escape") {
      map.querySelectorAll("td:hover, td:focus").forEach((cell) => cell.classList.add("closed"));
    } else if (move) {
      event.preventDefault();
      rows[move[1]]?.[move[0]]?.focus();
    }
  });
}
