// Chart of a metric over steps, drawn by uPlot from the table with the same values.
"use strict";

(() => {
  const read = (table) => {
    const columns = [[], [], [], []];
    const links = [];
    for (const row of table.tBodies[0].rows) {
      const values = [...row.querySelectorAll("data")].map((one) => Number(one.value));
      values.forEach((value, index) => columns[index].push(Number.isFinite(value) ? value : null));
      links.push(row.querySelector("a").href);
    }
    return { columns, links };
  };

  const short = (value) => (value === null || value === undefined ? "–" : Number(value.toPrecision(5)).toLocaleString("en"));

  const draw = (figure) => {
    const { columns, links } = read(document.getElementById(figure.dataset.chart));
    const isBinned = columns[2].some((value, index) => value !== columns[3][index]);
    let plot = null;
    const make = () => {
      const token = window.colourOf;
      const axis = { stroke: token("--muted"), grid: { stroke: token("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
      const line = { label: figure.dataset.label, stroke: token("--accent"), width: 1.75, points: { show: columns[0].length < 60, size: 5 }, value: (_, value) => short(value) };
      const edge = { stroke: "transparent", points: { show: false }, value: (_, value) => short(value) };
      const data = isBinned ? columns : columns.slice(0, 2);
      const series = [{ label: "step", value: (_, value) => (value === null ? "–" : value.toLocaleString("en")) }, line];
      if (isBinned) series.push({ ...edge, label: "least" }, { ...edge, label: "greatest" });
      plot?.destroy();
      figure.replaceChildren();
      plot = new uPlot(
        {
          width: figure.clientWidth,
          height: 240,
          scales: { x: { time: false } },
          axes: [{ ...axis, size: 34, values: (_, all) => all.map(short) }, { ...axis, size: 64, values: (_, all) => all.map(short) }],
          cursor: { y: false, points: { size: 8 } },
          bands: isBinned ? [{ series: [3, 2], fill: token("--accent-ground") }] : [],
          series,
          hooks: {
            ready: [
              (made) => {
                made.over.addEventListener("click", () => {
                  if (made.cursor.idx !== null && !made.select.width) location.href = links[made.cursor.idx];
                });
              },
            ],
          },
        },
        data,
        figure,
      );
    };
    make();
    const themed = () => (figure.isConnected ? make() : document.removeEventListener("themed", themed));
    document.addEventListener("themed", themed);
    new ResizeObserver(() => figure.clientWidth && plot.setSize({ width: figure.clientWidth, height: 240 })).observe(figure);
  };

  const seen = new WeakSet();
  const begin = () => {
    for (const figure of document.querySelectorAll("[data-chart]")) {
      if (seen.has(figure)) continue;
      seen.add(figure);
      draw(figure);
    }
  };
  begin();
  document.addEventListener("htmx:load", begin);
})();
