// Metrics of several runs in one chart, drawn by uPlot from the table with the same values. A letter marks the end of
// each line, as in the static picture.
"use strict";

(() => {
  const HEIGHT = 320;
  const DASHES = [[], [8, 3], [2, 2], [8, 3, 2, 3], [4, 4], [], [12, 4], [2, 4], [8, 3, 2, 3, 2, 3], [5, 2]];
  const COLUMN = { step: 0, elapsed: 1, date: 2 };

  const read = (table, by, isLog) => {
    const runs = new Map();
    for (const row of table.tBodies[0].rows) {
      const values = [...row.querySelectorAll("data")].map((one) => Number(one.value));
      if (isLog && values[3] <= 0) continue;
      const place = Number(row.dataset.run);
      if (!runs.has(place)) runs.set(place, new Map());
      runs.get(place).set(values[COLUMN[by]], { value: values[3], link: row.querySelector("a").href });
    }
    return runs;
  };

  const short = (value) => (value === null || value === undefined ? "–" : Number(value.toPrecision(5)).toLocaleString("en", { maximumSignificantDigits: 5 }));
  const span = (seconds) => {
    if (seconds === null || seconds === undefined) return "–";
    for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) if (seconds >= size) return `${Number((seconds / size).toPrecision(3))} ${unit}`;
    return `${Math.round(seconds)} s`;
  };

  const draw = (figure) => {
    const { by, scale, names } = figure.dataset;
    const isLog = scale === "log";
    const runs = read(document.getElementById(figure.dataset.overlay), by, isLog);
    const places = [...runs.keys()].sort((a, b) => a - b);
    if (!places.length) return;
    const tables = places.map((place) => {
      const points = [...runs.get(place)].sort((a, b) => a[0] - b[0]);
      return [points.map(([x]) => x), points.map(([, one]) => one.value)];
    });
    const data = uPlot.join(tables);
    const shown = { step: (value) => (value === null ? "–" : value.toLocaleString("en")), elapsed: span, date: (value) => (value === null ? "–" : new Date(value * 1000).toISOString().slice(0, 16).replace("T", " ")) }[by];
    let plot = null;

    const letters = (made) => {
      const { ctx } = made;
      const ends = places.map((place, index) => {
        const [xs, ys] = tables[index];
        return { place, x: made.valToPos(xs[xs.length - 1], "x", true), y: made.valToPos(ys[ys.length - 1], "y", true) };
      });
      ends.sort((a, b) => a.y - b.y);
      ctx.save();
      ctx.font = `650 ${12 * devicePixelRatio}px system-ui`;
      ctx.textBaseline = "middle";
      ctx.textAlign = "left";
      const room = 13 * devicePixelRatio;
      const drawn = [];
      for (const end of ends) {
        if (end.x < made.bbox.left || end.x > made.bbox.left + made.bbox.width + 1) continue;
        const near = drawn.filter((other) => Math.abs(other.x - end.x) < room);
        const y = Math.max(end.y, ...near.map((other) => other.y + room));
        drawn.push({ x: end.x, y });
        ctx.fillStyle = window.colourOf(`--r${end.place}`);
        ctx.fillText(names[end.place], end.x + 5 * devicePixelRatio, y);
      }
      ctx.restore();
    };

    const make = () => {
      const token = window.colourOf;
      const axis = { stroke: token("--muted"), grid: { stroke: token("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
      const series = [{ label: by, value: (_, value) => shown(value) }];
      for (const place of places) {
        series.push({
          label: names[place],
          stroke: token(`--r${place}`),
          width: 2,
          dash: DASHES[place],
          spanGaps: true,
          points: { show: runs.get(place).size < 2, size: 6 },
          value: (_, value) => short(value),
        });
      }
      plot?.destroy();
      figure.replaceChildren();
      plot = new uPlot(
        {
          width: figure.clientWidth,
          height: HEIGHT,
          padding: [8, 22, 0, 0],
          scales: { x: { time: false }, y: isLog ? { distr: 3 } : {} },
          axes: [{ ...axis, size: 34, values: (_, all) => all.map(by === "step" ? short : shown), space: by === "date" ? 120 : 60 }, { ...axis, size: 64, values: (_, all) => all.map((one) => (one === null ? "" : short(one))) }],
          cursor: { y: false, points: { size: 8 } },
          series,
          hooks: {
            draw: [letters],
            ready: [
              (made) => {
                made.over.addEventListener("click", () => {
                  const { idx } = made.cursor;
                  if (idx === null || made.select.width) return;
                  const near = places.filter((_, at) => data[at + 1][idx] !== null && data[at + 1][idx] !== undefined);
                  const distance = (place) => Math.abs(made.valToPos(data[places.indexOf(place) + 1][idx], "y") - made.cursor.top);
                  near.sort((a, b) => distance(a) - distance(b));
                  if (near.length) location.href = runs.get(near[0]).get(data[0][idx]).link;
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
    document.addEventListener("themed", make);
    new ResizeObserver(() => plot.setSize({ width: figure.clientWidth, height: HEIGHT })).observe(figure);
  };

  for (const figure of document.querySelectorAll("[data-overlay]")) draw(figure);
})();
