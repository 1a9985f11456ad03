// Text about the cell of a heat map under the pointer, from the table with the same values.
"use strict";

(() => {
  const SVG = "http://www.w3.org/2000/svg";

  const follow = (heat) => {
    const svg = heat.querySelector("svg");
    const table = document.getElementById(heat.dataset.heat);
    const readout = heat.querySelector("[data-readout]");
    const steps = [...table.tHead.rows[0].cells].slice(1).map((cell) => cell.textContent);
    const rows = new Map([...table.tBodies[0].rows].map((row) => [Number(row.dataset.y), row]));
    const { width, height } = svg.viewBox.baseVal;
    const mark = document.createElementNS(SVG, "rect");
    for (const [name, value] of Object.entries({ class: "mark", width: 1, height: 1 })) mark.setAttribute(name, value);

    const show = (event) => {
      const box = svg.getBoundingClientRect();
      const x = Math.min(width - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * width)));
      const y = Math.min(height - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * height)));
      const row = rows.get(y);
      if (!row) return hide();
      mark.setAttribute("x", x);
      mark.setAttribute("y", y);
      svg.append(mark);
      readout.textContent = `${row.cells[0].textContent.trim()} at step ${steps[x]}: ${row.cells[x + 1].textContent}`;
    };
    const hide = () => {
      mark.remove();
      readout.textContent = "";
    };
    svg.addEventListener("pointermove", show);
    svg.addEventListener("pointerdown", show);
    svg.addEventListener("pointerleave", hide);
  };

  const seen = new WeakSet();
  const begin = () => {
    for (const heat of document.querySelectorAll("[data-heat]")) {
      if (seen.has(heat)) continue;
      seen.add(heat);
      follow(heat);
    }
  };
  begin();
  document.addEventListener("htmx:load", begin);
})();
