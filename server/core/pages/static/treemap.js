// Treemap of the names below a name, laid out by d3-hierarchy from the table with the same values; tensors are coloured
// by dtype.
"use strict";

(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const HEIGHT = 220;

  const read = (table) =>
    [...table.tBodies[0].rows].map((row) => {
      const size = row.querySelector("data[data-bytes]");
      const link = row.querySelector("th a");
      return {
        name: row.querySelector("th bdi").textContent,
        bytes: Number(size.value),
        label: size.textContent,
        href: link ? link.href : null,
        dtype: row.dataset.dtype || "",
        colour: row.dataset.colour || "",
      };
    });

  const add = (parent, name, attributes, text) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  };

  const cell = (svg, leaf, colours) => {
    const { name, label, href, dtype, colour } = leaf.data;
    const width = leaf.x1 - leaf.x0;
    const height = leaf.y1 - leaf.y0;
    const place = href ? add(svg, "a", { href, tabindex: -1 }) : add(svg, "g", {});
    const kind = colour || (dtype ? `c${colours.indexOf(dtype) % 6}` : "inner");
    add(place, "rect", { x: leaf.x0, y: leaf.y0, width, height, rx: 2, class: kind });
    add(place, "title", {}, `${name}\n${label}${dtype ? `\n${dtype}` : ""}`);
    if (width < 44 || height < 18) return;
    const most = Math.floor((width - 10) / 7);
    const shown = name.length > most ? `${name.slice(0, Math.max(1, most - 1))}…` : name;
    add(place, "text", { x: leaf.x0 + 6, y: leaf.y0 + 14 }, shown);
    if (height >= 34 && width >= 70) add(place, "text", { x: leaf.x0 + 6, y: leaf.y0 + 29, class: "size" }, label);
  };

  const draw = (figure) => {
    const children = read(document.getElementById(figure.dataset.treemap)).filter((one) => one.bytes > 0);
    figure.hidden = children.length < 2;
    if (figure.hidden) return;
    const width = figure.clientWidth;
    const tree = d3.hierarchy({ children }).sum((one) => one.bytes || 0);
    d3.treemap().size([width, HEIGHT]).paddingInner(2).round(true)(tree.sort((a, b) => b.value - a.value));
    const colours = [...new Set(children.map((one) => one.dtype))].filter(Boolean).sort();
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    for (const leaf of tree.leaves()) cell(svg, leaf, colours);
    figure.replaceChildren(svg);
  };

  const seen = new WeakSet();
  const begin = () => {
    for (const figure of document.querySelectorAll("[data-treemap]")) {
      if (seen.has(figure)) continue;
      seen.add(figure);
      draw(figure);
      new ResizeObserver(() => figure.clientWidth && draw(figure)).observe(figure);
    }
  };
  begin();
  document.addEventListener("htmx:load", begin);
})();
