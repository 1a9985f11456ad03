// Heat map of a tensor slice with finer cells than the page: drawn from the JSON of the page, with a readout for each
// cell, and zoom by dragging.
"use strict";

(() => {
  const LEVELS = 10;
  const FINE = 128;
  const MARK = 7;
  const short = (value) => (value === null || value === undefined ? "not finite" : Number(value.toPrecision(5)).toString());

  const palette = () => {
    const read = window.colourOf;
    return { levels: Array.from({ length: LEVELS + 1 }, (_, at) => read(`--heat-${at}`)), none: read("--heat-none"), wrong: read("--heat-wrong") };
  };

  const paint = (canvas, grid, values, scale, colours) => {
    const side = Math.max(1, Math.floor(512 / Math.max(grid.rows, grid.columns)));
    canvas.width = grid.columns * side;
    canvas.height = grid.rows * side;
    const context = canvas.getContext("2d");
    values.forEach((value, at) => {
      const x = (at % grid.columns) * side;
      const y = Math.floor(at / grid.columns) * side;
      const level = value === null ? null : scale ? Math.round((LEVELS / 2) * (1 + value / scale)) : LEVELS / 2;
      context.fillStyle = level === null ? colours.none : colours.levels[level];
      context.fillRect(x, y, side, side);
    });
    context.fillStyle = colours.wrong;
    const mark = Math.max(MARK, Math.ceil(side / 2)); // makes a single element among millions visible
    grid.nonfinite.forEach((count, at) => {
      if (!count) return;
      const x = ((at % grid.columns) + 0.5) * side - mark / 2;
      const y = (Math.floor(at / grid.columns) + 0.5) * side - mark / 2;
      context.fillRect(Math.round(x), Math.round(y), mark, mark);
    });
  };

  const draw = async (figure) => {
    const answer = await fetch(`${figure.dataset.heat}&rows=${FINE}&columns=${FINE}`, { headers: { Accept: "application/json" } });
    if (!answer.ok || !figure.isConnected) return;
    const grid = await answer.json();
    const values = grid[figure.dataset.value];
    const scale = values.reduce((most, one) => (one === null ? most : Math.max(most, Math.abs(one))), 0);
    const plot = figure.querySelector(".plot");
    const canvas = document.createElement("canvas");
    canvas.setAttribute("aria-hidden", "true");
    const repaint = () => paint(canvas, grid, values, scale, palette());
    figure.classList.toggle("thin", grid.rows === 1);
    repaint();
    plot.append(canvas);
    document.addEventListener("themed", repaint);
    const ends = { low: figure.querySelector("[data-low]"), high: figure.querySelector("[data-high]") };
    ends.high.textContent = short(scale);
    ends.low.textContent = values.some((one) => one < 0) ? `-${short(scale)}` : "0";
    follow(figure, plot, canvas, grid, values);
  };

  // First element of a cell along one dimension, as the service divides the elements.
  const edge = (cell, cells, size) => Math.floor((cell * size) / cells);

  const follow = (figure, plot, canvas, grid, values) => {
    const readout = figure.querySelector("[data-readout]");
    const said = readout.textContent;
    const begins = (figure.dataset.begins || "0,0").split(",").map(Number);
    const begin = { row: begins.length > 1 ? begins[0] : 0, column: begins[begins.length - 1] };
    const [height, width] = grid.shape;
    const at = (event) => {
      const box = canvas.getBoundingClientRect();
      const place = (offset, size, cells) => Math.min(cells - 1, Math.max(0, Math.floor((offset / size) * cells)));
      return { row: place(event.clientY - box.top, box.height, grid.rows), column: place(event.clientX - box.left, box.width, grid.columns) };
    };
    const span = (first, last, cells, size, from) => [from + edge(first, cells, size), from + edge(last + 1, cells, size)];
    const words = ([from, to]) => (to - from > 1 ? `${from} – ${to - 1}` : `${from}`);

    let start = null;
    let frame = null;
    canvas.addEventListener("pointerdown", (event) => {
      if (!figure.dataset.zoom || event.button !== 0 || event.pointerType === "touch") return;
      start = at(event);
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const here = at(event);
      const cell = here.row * grid.columns + here.column;
      const rows = words(span(here.row, here.row, grid.rows, height, begin.row));
      const columns = words(span(here.column, here.column, grid.columns, width, begin.column));
      const wrong = grid.nonfinite[cell];
      readout.textContent = `${grid.rows > 1 ? `${rows}, ` : ""}${columns}: ${short(values[cell])}${wrong ? ` (${wrong} NaN or infinite)` : ""}`;
      if (start) frame = framed(plot, frame, start, here, grid);
    });
    canvas.addEventListener("pointerleave", () => {
      if (!start) readout.textContent = said;
    });
    canvas.addEventListener("pointerup", (event) => {
      const from = start;
      const to = at(event);
      start = null;
      frame?.remove();
      frame = null;
      if (!from || (from.row === to.row && from.column === to.column)) return;
      closer(figure, {
        rows: span(Math.min(from.row, to.row), Math.max(from.row, to.row), grid.rows, height, begin.row),
        columns: span(Math.min(from.column, to.column), Math.max(from.column, to.column), grid.columns, width, begin.column),
      });
    });
  };

  const framed = (plot, present, from, to, grid) => {
    const frame = present || plot.appendChild(document.createElement("div"));
    frame.className = "frame";
    const place = (first, second, cells) => [(100 * Math.min(first, second)) / cells, (100 * (Math.abs(first - second) + 1)) / cells];
    const [top, height] = place(from.row, to.row, grid.rows);
    const [left, width] = place(from.column, to.column, grid.columns);
    Object.assign(frame.style, { top: `${top}%`, height: `${height}%`, left: `${left}%`, width: `${width}%` });
    return frame;
  };

  const closer = (figure, box) => {
    const url = new URL(figure.dataset.zoom, location.href);
    const dimensions = figure.dataset.dimensions.split(",");
    const sides = dimensions.length > 1 ? [box.rows, box.columns] : [box.columns];
    dimensions.forEach((dimension, place) => url.searchParams.set(`d${dimension}`, sides[place].join(":")));
    location.href = url;
  };

  const seen = new WeakSet();
  const begin = () => {
    for (const figure of document.querySelectorAll("[data-heat]")) {
      if (seen.has(figure)) continue;
      seen.add(figure);
      draw(figure);
    }
  };
  begin();
  document.addEventListener("htmx:load", begin);
})();
