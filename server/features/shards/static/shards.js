// The map of shards: ranks from top to bottom, bytes of their files from left to right. The coarse map of the whole
// checkpoint stays below the fine map of the visible part, so that every move is drawn at once.
"use strict";

(() => {
  const section = document.querySelector("[data-map]");
  if (!section) return;
  const canvas = section.querySelector("canvas");
  const context = canvas.getContext("2d");
  const mark = section.querySelector(".cursor");
  const state = section.querySelector(".state");
  const legend = section.querySelector(".legend");
  const readout = document.getElementById("cell");
  const MARGIN = { left: 52, right: 84, top: 2, bottom: 24 };
  const LEAST_BYTES = 64;
  const PART = ["first_rank", "last_rank", "begin", "end"];

  // -- texts ---------------------------------------------------------------------------------------------------

  const count = (value) => value.toLocaleString("en");
  const bytes = (size) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let unit = 0;
    for (; size >= 1000 && unit < units.length - 1; unit++) size /= 1024;
    return `${unit === 0 ? count(size) : size >= 99.95 ? size.toFixed(0) : size >= 9.995 ? size.toFixed(1) : size.toFixed(2)} ${units[unit]}`;
  };

  // -- requests ------------------------------------------------------------------------------------------------

  const given = () => new URLSearchParams(location.search);
  const glob = given().get("glob");
  let colour = given().get("colour") || "layer";

  const address = (path, values) => {
    const query = new URLSearchParams(values);
    if (glob) query.set("glob", `*${glob}*`);
    return `${section.dataset.map}/${path}?${query}`;
  };

  const ask = async (path, values, signal) => {
    const answer = await fetch(address(path, values), { headers: { accept: "application/json" }, signal });
    if (answer.status === 401) location.reload();
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.detail || `The service responded with status ${answer.status}`);
    return found;
  };

  // Add to each row the band of its ranks: files of one rank share a band; files without a rank follow.
  const layered = (found) => {
    const bands = [];
    let behind = Math.max(0, ...found.rows.map((row) => (row.last_rank === null ? 0 : row.last_rank + 1)));
    found.rows.forEach((row, at) => {
      if (row.first_rank === null) {
        bands.push([behind, ++behind]);
        return;
      }
      const before = bands[at - 1];
      const shared = before && found.rows[at - 1].last_rank === row.first_rank;
      bands.push([shared ? before[1] : row.first_rank, row.last_rank + 1]);
      if (!shared) return;
      let first = at - 1;
      while (first > 0 && found.rows[first].first_rank === row.first_rank && found.rows[first - 1].last_rank === row.first_rank) first--;
      const top = found.rows[first].first_rank === row.first_rank ? bands[first][0] : row.first_rank;
      const rows = at - first + 1;
      for (let one = first; one <= at; one++) bands[one] = [top + ((one - first) * (bands[at][1] - top)) / rows, top + ((one - first + 1) * (bands[at][1] - top)) / rows];
    });
    const places = new Int32Array(found.rows.length * found.bins).fill(-1);
    found.cell_rows.forEach((row, at) => (places[row * found.bins + found.cell_bins[at]] = at));
    const firsts = new Int32Array(found.rows.length + 1); // first cell of each row; cells are sorted by row and bin
    found.cell_rows.forEach((row) => firsts[row + 1]++);
    for (let row = 0; row < found.rows.length; row++) firsts[row + 1] += firsts[row];
    return { ...found, bands, places, firsts, top: bands.length ? bands[0][0] : 0, bottom: bands.length ? bands[bands.length - 1][1] : 1 };
  };

  let whole = null; // coarse map of the whole checkpoint
  let fine = null; // fine map of the visible part
  let view = null; // top and bottom in ranks, left and right in bytes

  const plot = () => ({ x: MARGIN.left, y: MARGIN.top, width: canvas.clientWidth - MARGIN.left - MARGIN.right, height: canvas.clientHeight - MARGIN.top - MARGIN.bottom });
  const size = () => {
    const { width, height } = plot();
    const rows = Math.max(8, Math.min(128, Math.floor(height / 3)));
    return { rows, bins: Math.max(16, Math.min(256, Math.floor(width / 4), Math.floor(32768 / rows))) };
  };
  const isWhole = () => view.top <= whole.top && view.bottom >= whole.bottom && view.left <= whole.begin && view.right >= whole.end;
  const hasRanks = () => whole.rank_count > 0;

  const partOf = (one) => {
    const part = {};
    if (hasRanks() && (one.top > whole.top || one.bottom < whole.bottom)) {
      part.first_rank = Math.max(0, Math.floor(one.top));
      part.last_rank = Math.max(part.first_rank, Math.ceil(one.bottom) - 1);
    }
    if (one.left > whole.begin) part.begin = Math.floor(one.left);
    if (one.right < whole.end) part.end = Math.ceil(one.right);
    return part;
  };

  const viewOf = (query) => {
    const number = (name, otherwise) => (query.get(name) ? Number(query.get(name)) : otherwise);
    return { top: number("first_rank", whole.top), bottom: number("last_rank", whole.bottom - 1) + 1, left: number("begin", whole.begin), right: number("end", whole.end) };
  };

  // -- colours -------------------------------------------------------------------------------------------------

  const token = window.colourOf;
  let inks = {};
  let scale = null;
  const readInks = () => {
    for (const one of [whole, fine]) if (one) one.painted = null;
    inks = { ink: token("--ink"), muted: token("--muted"), line: token("--line"), surface: token("--surface"), sunken: token("--sunken"), over: token("--warn-mark"), accent: token("--accent") };
    inks.map = [0, 1, 2, 3, 4, 5, 6, 7].map((at) => token(`--map-${at}`));
    const stops = [0, 1, 2, 3, 4].map((at) => token(`--ramp-${at}`).match(/[\d.]+/g).slice(0, 3).map(Number));
    inks.ramp = Array.from({ length: 64 }, (_, at) => {
      const place = (at / 63) * 4;
      const low = Math.min(3, Math.floor(place));
      return `rgb(${stops[low].map((part, channel) => Math.round(part + (stops[low + 1][channel] - part) * (place - low))).join(" ")})`;
    });
    const hatch = document.createElement("canvas");
    hatch.width = hatch.height = 6;
    const pen = hatch.getContext("2d");
    pen.strokeStyle = inks.surface;
    pen.lineWidth = 1.5;
    pen.stroke(new Path2D("M-1 7L7 -1M-1 1L1 -1M5 7L7 5"));
    inks.hatch = context.createPattern(hatch, "repeat");
  };

  const scaled = () => {
    const maps = [whole, fine].filter(Boolean);
    if (colour === "dtype") return { dtypes: [...new Set(maps.flatMap((one) => one.dtypes))].sort() };
    if (colour === "layer") {
      const layers = maps.flatMap((one) => one.name_layers).filter((one) => one !== null);
      return { low: layers.reduce((a, b) => Math.min(a, b), Infinity), high: layers.reduce((a, b) => Math.max(a, b), 0) };
    }
    const sizes = maps.flatMap((one) => one.name_bytes);
    return { low: sizes.reduce((a, b) => Math.min(a, b), Infinity), high: sizes.reduce((a, b) => Math.max(a, b), 1) };
  };

  const ramp = (share) => inks.ramp[Math.max(0, Math.min(63, Math.round(share * 63)))];
  const inkOf = (one, cell) => {
    if (colour === "dtype") return inks.map[scale.dtypes.indexOf(one.dtypes[one.cell_dtypes[cell]]) % inks.map.length];
    if (colour === "bytes") return ramp(scale.high > scale.low ? Math.log(one.name_bytes[one.cell_names[cell]] / scale.low) / Math.log(scale.high / scale.low) : 1);
    const layer = one.name_layers[one.cell_names[cell]];
    return layer === null ? inks.map[7] : ramp(scale.high > scale.low ? (layer - scale.low) / (scale.high - scale.low) : 1);
  };

  const paint = () => {
    scale = scaled();
    const key = `${colour} ${JSON.stringify(scale)}`;
    for (const one of [whole, fine]) {
      if (!one || one.painted === key) continue;
      one.inks = one.cell_bytes.map((_, cell) => inkOf(one, cell));
      one.painted = key;
    }
    showLegend();
  };

  const showLegend = () => {
    const item = (text, background, isRamp) => {
      const line = document.createElement("li");
      const swatch = document.createElement("i");
      swatch.style.background = background;
      swatch.classList.toggle("ramp", Boolean(isRamp));
      line.append(swatch, text);
      return line;
    };
    const gradient = `linear-gradient(to right, ${[0, 16, 32, 47, 63].map((at) => inks.ramp[at]).join(", ")})`;
    const items = [];
    if (colour === "dtype") scale.dtypes.forEach((name, at) => items.push(item(name, inks.map[at % inks.map.length])));
    else if (colour === "bytes") items.push(item(`tensors of ${bytes(scale.low)} to ${bytes(scale.high)}`, gradient, true));
    else {
      if (scale.low !== Infinity) items.push(item(`layer ${scale.low} to ${scale.high}`, gradient, true));
      items.push(item("no layer", inks.map[7]));
    }
    if ([whole, fine].some((one) => one && one.is_replicated.includes(true))) items.push(item("replicated", `repeating-linear-gradient(135deg, ${inks.surface} 0 2px, ${inks.muted} 2px 5px)`));
    items.push(item("at the right: bytes of the ranks, the line is their mean", inks.accent));
    legend.replaceChildren(...items);
  };

  // -- drawing -------------------------------------------------------------------------------------------------

  let isDrawn = true;
  const draw = () => {
    if (isDrawn) requestAnimationFrame(drawNow);
    isDrawn = false;
  };

  const across = (area, offset) => area.x + ((offset - view.left) / (view.right - view.left)) * area.width;
  const down = (area, rank) => area.y + ((rank - view.top) / (view.bottom - view.top)) * area.height;

  const drawCells = (one, area) => {
    one.bands.forEach(([low, high], row) => {
      if (high <= view.top || low >= view.bottom) return;
      const y = Math.round(down(area, low));
      drawRow(one, row, area, y, Math.max(1, Math.round(down(area, high)) - y - (down(area, high) - y >= 5 ? 1 : 0)));
    });
  };

  // Draw adjacent cells of one colour as one rectangle.
  const drawRow = (one, row, area, y, height) => {
    const hasSeams = (one.bin_bytes / (view.right - view.left)) * area.width >= 5;
    const isAlike = (cell, next) =>
      next < one.firsts[row + 1] &&
      one.cell_bins[next] === one.cell_bins[cell] + 1 &&
      one.inks[next] === one.inks[cell] &&
      (one.cell_names[next] === one.cell_names[cell] || (!hasSeams && one.is_replicated[one.cell_names[next]] === one.is_replicated[one.cell_names[cell]]));
    for (let cell = one.firsts[row]; cell < one.firsts[row + 1]; cell++) {
      const first = cell;
      while (isAlike(cell, cell + 1)) cell++;
      const begin = one.begin + one.cell_bins[first] * one.bin_bytes;
      const end = Math.min(one.end, one.begin + (one.cell_bins[cell] + 1) * one.bin_bytes);
      if (begin >= view.right) return;
      if (end <= view.left) continue;
      const x = Math.round(across(area, begin));
      const width = Math.max(1, Math.round(across(area, end)) - x);
      const seam = hasSeams && width > 2 ? 1 : 0;
      context.fillStyle = one.inks[cell];
      context.fillRect(x + seam, y, width - seam, height);
      if (!one.is_replicated[one.cell_names[cell]]) continue;
      context.fillStyle = inks.hatch;
      context.fillRect(x, y, width, height);
    }
  };

  const drawRanks = (area) => {
    const shown = fine || whole;
    const most = Math.max(1, ...whole.rows.map((row) => row.largest_rank_bytes || row.tensor_bytes));
    const left = area.x + area.width + 10;
    const room = MARGIN.right - 14;
    shown.rows.forEach((row, at) => {
      const y = Math.round(down(area, shown.bands[at][0]));
      const height = Math.max(1, Math.round(down(area, shown.bands[at][1])) - y);
      const held = row.largest_rank_bytes || row.tensor_bytes;
      context.fillStyle = hasRanks() && held > 1.05 * whole.mean_rank_bytes ? inks.over : inks.accent;
      context.fillRect(left, y, (held / most) * room, height - (height >= 5 ? 1 : 0));
    });
    if (!hasRanks()) return;
    context.fillStyle = inks.ink;
    context.fillRect(Math.round(left + (whole.mean_rank_bytes / most) * room), area.y, 1.5, area.height);
  };

  const step = (span, least, base) => {
    let found = 1;
    while (span / found > least) found *= base;
    return found;
  };

  const drawAxes = (area) => {
    context.fillStyle = inks.muted;
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "right";
    if (hasRanks()) {
      const every = step(view.bottom - view.top, Math.max(2, area.height / 26), 2);
      const last = Math.min(view.bottom, Math.max(...whole.rows.map((row) => (row.last_rank ?? -1) + 1)));
      for (let rank = Math.floor(view.top / every) * every; rank < last; rank += every) {
        const top = Math.max(area.y, down(area, rank));
        const middle = every === 1 ? (top + Math.min(area.y + area.height, down(area, rank + 1))) / 2 : down(area, rank) + 6;
        if (middle > area.y + 4 && middle < area.y + area.height - 3) context.fillText(count(rank), area.x - 8, middle);
      }
    }
    context.textBaseline = "alphabetic";
    context.textAlign = "center";
    const every = step(view.right - view.left, Math.max(2, area.width / 110), 2);
    for (let offset = Math.ceil(view.left / every) * every; offset <= view.right; offset += every) {
      const x = across(area, offset);
      context.fillRect(Math.round(x), area.y + area.height, 1, 4);
      if (x > area.x - 2 && x < area.x + area.width - 20) context.fillText(bytes(offset), Math.max(x, area.x + 10), area.y + area.height + 18);
    }
    context.textAlign = "left";
    context.fillText("bytes", area.x + area.width + 10, area.y + area.height + 18);
  };

  const drawNow = () => {
    isDrawn = true;
    if (!whole) return;
    const area = plot();
    const ratio = devicePixelRatio || 1;
    const [width, height] = [Math.round(canvas.clientWidth * ratio), Math.round(canvas.clientHeight * ratio)];
    if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, canvas.clientWidth, canvas.clientHeight);
    context.fillStyle = inks.sunken;
    context.fillRect(area.x, area.y, area.width, area.height);
    context.save();
    context.beginPath();
    context.rect(area.x, area.y, area.width, area.height);
    context.clip();
    const covers = fine && fine.top <= view.top && fine.bottom >= view.bottom && fine.begin <= view.left && fine.end >= view.right;
    if (!covers) drawCells(whole, area);
    if (fine) {
      context.fillStyle = inks.sunken;
      context.fillRect(across(area, fine.begin), down(area, fine.top), across(area, fine.end) - across(area, fine.begin), down(area, fine.bottom) - down(area, fine.top));
      drawCells(fine, area);
    }
    context.restore();
    context.save();
    context.beginPath();
    context.rect(area.x + area.width, area.y, MARGIN.right, area.height);
    context.clip();
    drawRanks(area);
    context.restore();
    drawAxes(area);
    place();
  };

  // -- a cell --------------------------------------------------------------------------------------------------

  let chosen = null; // {one, row, bin}

  const cellAt = (x, y) => {
    const area = plot();
    if (x < area.x || y < area.y || x >= area.x + area.width || y >= area.y + area.height) return null;
    const offset = view.left + ((x - area.x) / area.width) * (view.right - view.left);
    const rank = view.top + ((y - area.y) / area.height) * (view.bottom - view.top);
    for (const one of [fine, whole]) {
      if (!one || offset < one.begin || offset >= one.end) continue;
      const row = one.bands.findIndex(([low, high]) => rank >= low && rank < high);
      if (row >= 0) return { one, row, bin: Math.min(one.bins - 1, Math.floor((offset - one.begin) / one.bin_bytes)) };
    }
    return null;
  };

  const place = () => {
    mark.hidden = !chosen;
    if (!chosen) return;
    const area = plot();
    const { one, row, bin } = chosen;
    const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
    const x0 = clamp(across(area, one.begin + bin * one.bin_bytes), area.x, area.x + area.width);
    const x1 = clamp(across(area, Math.min(one.end, one.begin + (bin + 1) * one.bin_bytes)), area.x, area.x + area.width);
    const y0 = clamp(down(area, one.bands[row][0]), area.y, area.y + area.height);
    const y1 = clamp(down(area, one.bands[row][1]), area.y, area.y + area.height);
    mark.hidden = x1 <= x0 || y1 <= y0;
    mark.style.transform = `translate(${Math.round(x0) - 2}px, ${Math.round(y0) - 2}px)`;
    mark.style.width = `${Math.max(3, Math.round(x1 - x0) + 3)}px`;
    mark.style.height = `${Math.max(3, Math.round(y1 - y0) + 3)}px`;
  };

  const tensor = (label, fqn) => {
    const made = fact(label, fqn, true);
    const link = document.createElement("a");
    link.href = `${location.pathname.replace(/shards$/, "tensors")}?fqn=${encodeURIComponent(fqn)}`;
    link.append(made.lastChild.firstChild);
    made.lastChild.append(link);
    return made;
  };

  const fact = (label, value, isLong) => {
    const box = document.createElement("div");
    if (isLong) box.className = "long";
    const term = document.createElement("dt");
    const said = document.createElement("dd");
    const text = document.createElement("bdi");
    term.textContent = label;
    text.textContent = visible(value.length > 300 ? `${value.slice(0, 300)}…` : value);
    said.append(text);
    box.append(term, said);
    return box;
  };

  const ranksOf = (row) => (row.first_rank === null ? "unknown" : row.first_rank === row.last_rank ? count(row.first_rank) : `${count(row.first_rank)} – ${count(row.last_rank)}`);
  const span = (begin, end) => `${count(begin)} – ${count(end)}`;

  const show = (facts) => {
    const list = document.createElement("dl");
    list.className = "facts";
    list.append(...facts);
    readout.replaceChildren(list);
  };

  const choose = (found) => {
    const isSame = found && chosen && found.one === chosen.one && found.row === chosen.row && found.bin === chosen.bin;
    if (isSame || (!found && !chosen)) return;
    chosen = found;
    place();
    clearTimeout(looking);
    if (!found) return;
    const { one, row, bin } = found;
    const cell = one.places[row * one.bins + bin];
    const begin = one.begin + bin * one.bin_bytes;
    const end = Math.min(one.end, begin + one.bin_bytes);
    const of = one.rows[row];
    const facts = [fact("Rank", ranksOf(of)), fact(of.files === 1 ? "File" : "Files", of.files === 1 ? of.file : count(of.files)), fact("Bytes of each file", span(begin, end))];
    if (cell < 0) {
      show([fact("Tensor", "nothing of tensors lies here", true), ...facts]);
      return;
    }
    const chunks = one.cell_chunks[cell];
    const name = one.names[one.cell_names[cell]];
    facts.unshift(tensor(chunks === 1 ? "Tensor" : "Tensor with the most bytes", name));
    facts.push(fact("dtype", one.dtypes[one.cell_dtypes[cell]]), fact("Held here", bytes(one.cell_bytes[cell])), fact("Chunks", count(chunks)));
    if (one.is_replicated[one.cell_names[cell]]) facts.push(fact("Replicas", "more of it is stored than there is"));
    show(facts);
    if (chunks === 1 && of.first_rank !== null) looking = setTimeout(() => look(found, begin, end, of), 150);
  };

  // For a cell with a single chunk, load its box and exact position, which the map lacks.
  let looking = 0;
  const look = async (found, begin, end, of) => {
    try {
      const { items } = await ask("chunks", { first_rank: of.first_rank, last_rank: of.last_rank, begin, end, limit: 1 });
      const [one] = items;
      if (chosen !== found || !one) return;
      const box = one.offsets.map((offset, at) => `${offset}:${offset + one.sizes[at]}`).join(", ");
      show([
        tensor("Tensor", one.fqn),
        fact("Box", box || "scalar"),
        fact("dtype", one.dtype),
        fact("Rank", one.rank === null ? "unknown" : count(one.rank)),
        fact("File", one.file),
        fact("Bytes", `${span(one.file_offset, one.file_offset + one.bytes)} (${bytes(one.bytes)})`),
        fact("Copies", one.copies === null ? "not counted" : count(one.copies)),
      ]);
    } catch {
      // the facts from the map are already shown
    }
  };

  // -- moving --------------------------------------------------------------------------------------------------

  let settling = 0;
  let settled = -Infinity; // time of the last end of a wheel, drag or pinch gesture
  let isGesture = false;
  let asking = null;

  const fit = (low, high, least, begin, end) => {
    const wide = Math.min(end - begin, Math.max(least, high - low));
    const middle = (low + high) / 2;
    const first = Math.max(begin, Math.min(end - wide, middle - wide / 2));
    return [first, first + wide];
  };

  const move = (changed) => {
    const wanted = { ...view, ...changed };
    [wanted.left, wanted.right] = fit(wanted.left, wanted.right, LEAST_BYTES, whole.begin, whole.end);
    [wanted.top, wanted.bottom] = hasRanks() ? fit(wanted.top, wanted.bottom, 1, whole.top, whole.bottom) : [whole.top, whole.bottom];
    view = wanted;
    draw();
    clearTimeout(settling);
    settling = setTimeout(() => settle(true), 160);
  };

  const zoom = (factor, x, y, axes = "xy") => {
    const area = plot();
    const across = x === undefined ? 0.5 : Math.max(0, Math.min(1, (x - area.x) / area.width));
    const down = y === undefined ? 0.5 : Math.max(0, Math.min(1, (y - area.y) / area.height));
    const changed = {};
    if (axes.includes("x")) {
      const wide = Math.max(LEAST_BYTES, (view.right - view.left) * factor);
      changed.left = view.left + (view.right - view.left - wide) * across;
      changed.right = changed.left + wide;
    }
    if (axes.includes("y")) {
      const high = Math.max(1, (view.bottom - view.top) * factor);
      changed.top = view.top + (view.bottom - view.top - high) * down;
      changed.bottom = changed.top + high;
    }
    move(changed);
  };

  const pan = (x, y) => move({ left: view.left + x * (view.right - view.left), right: view.right + x * (view.right - view.left), top: view.top + y * (view.bottom - view.top), bottom: view.bottom + y * (view.bottom - view.top) });
  const all = () => move({ top: whole.top, bottom: whole.bottom, left: whole.begin, right: whole.end });

  const settle = async (isMove) => {
    const part = partOf(view);
    if (isMove) {
      const query = given();
      for (const name of PART) query.delete(name);
      for (const [name, value] of Object.entries(part)) query.set(name, value);
      const url = `${location.pathname}${query.size ? `?${query}` : ""}`;
      if (url === `${location.pathname}${location.search}`) return;
      // one history entry for one gesture
      const isNew = !isGesture || performance.now() - settled > 1500;
      settled = isGesture ? performance.now() : -Infinity;
      isGesture = false;
      history[isNew ? "pushState" : "replaceState"]({ map: true }, "", url);
      refresh(url);
    }
    asking?.abort();
    asking = new AbortController();
    try {
      const wasAt = chosen && middle();
      fine = isWhole() ? null : layered(await ask("map", { ...part, ...size() }, asking.signal));
      state.textContent = "";
      paint();
      choose(wasAt ? cellAt(...wasAt) : null);
      draw();
    } catch (error) {
      if (error.name !== "AbortError") state.textContent = error.message;
    }
  };

  // Update the sentences and the table below, and the fields of the visible part.
  let refreshing = null;
  let resting = 0;
  const refresh = (url) => {
    const query = given();
    for (const name of PART) {
      const field = document.querySelector(`.part [name="${name}"]`);
      if (field) field.value = query.get(name) || "";
    }
    for (const link of section.querySelectorAll("[data-colour]")) {
      const own = given();
      if (link.dataset.colour === "layer") own.delete("colour");
      else own.set("colour", link.dataset.colour);
      link.href = `${location.pathname}${own.size ? `?${own}` : ""}`;
    }
    // only after the gesture has ended
    clearTimeout(resting);
    resting = setTimeout(() => refreshBelow(url), 300);
  };

  const refreshBelow = async (url) => {
    // without htmx, which reports each replaced request as an error
    refreshing?.abort();
    refreshing = new AbortController();
    try {
      const answer = await fetch(url, { headers: { accept: "text/html", "HX-Request": "true" }, signal: refreshing.signal });
      const found = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("late");
      if (found) document.getElementById("late").replaceChildren(...found.childNodes);
    } catch {
      // a later request follows, or the map shows the error
    }
  };

  // -- gestures ---------------------------------------------------------------------------------------------

  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };

  canvas.addEventListener(
    "wheel",
    (event) => {
      const isMeant = event.ctrlKey || event.metaKey || document.activeElement === canvas;
      if (!whole || !isMeant) return; // scrolls the page instead
      event.preventDefault();
      isGesture = true;
      const turned = event.deltaY || event.deltaX;
      zoom(Math.exp(Math.max(-60, Math.min(60, turned)) * (event.ctrlKey && Math.abs(turned) < 40 ? 0.012 : 0.005)), ...at(event), event.shiftKey ? "x" : event.altKey ? "y" : "xy");
    },
    { passive: false },
  );

  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (!whole || event.button || event.pointerType === "touch") return;
    drag = { x: event.clientX, y: event.clientY };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!whole) return;
    if (drag && event.buttons) {
      const area = plot();
      isGesture = true;
      pan((drag.x - event.clientX) / area.width, (drag.y - event.clientY) / area.height);
      drag = { x: event.clientX, y: event.clientY };
    } else if (event.pointerType !== "touch") choose(cellAt(...at(event)));
  });
  canvas.addEventListener("pointerup", () => (drag = null));
  canvas.addEventListener("pointercancel", () => (drag = null));
  canvas.addEventListener("click", (event) => whole && choose(cellAt(...at(event))));
  canvas.addEventListener("dblclick", (event) => whole && zoom(0.4, ...at(event)));

  let pinch = null;
  const fingers = ({ touches: [one, two] }) => ({ x: (one.clientX + two.clientX) / 2, y: (one.clientY + two.clientY) / 2, apart: Math.max(20, Math.hypot(one.clientX - two.clientX, one.clientY - two.clientY)) });
  canvas.addEventListener(
    "touchmove",
    (event) => {
      if (!whole || event.touches.length !== 2) return;
      event.preventDefault();
      isGesture = true;
      const now = fingers(event);
      if (pinch) {
        const area = plot();
        const box = canvas.getBoundingClientRect();
        pan((pinch.x - now.x) / area.width, (pinch.y - now.y) / area.height);
        zoom(pinch.apart / now.apart, now.x - box.left, now.y - box.top);
      }
      pinch = now;
    },
    { passive: false },
  );
  canvas.addEventListener("touchend", () => (pinch = null));

  const stepTo = (rows, bins) => {
    const one = chosen ? chosen.one : fine || whole;
    const clamp = (value, most) => Math.max(0, Math.min(most - 1, value));
    if (!one.rows.length) return;
    choose(chosen ? { one, row: clamp(chosen.row + rows, one.rows.length), bin: clamp(chosen.bin + bins, one.bins) } : { one, row: 0, bin: 0 });
  };
  const middle = () => {
    if (!chosen) return [undefined, undefined];
    const area = plot();
    const { one, row, bin } = chosen;
    return [across(area, one.begin + (bin + 0.5) * one.bin_bytes), down(area, (one.bands[row][0] + one.bands[row][1]) / 2)];
  };
  const KEYS = {
    ArrowUp: (far) => (far ? pan(0, -0.25) : stepTo(-1, 0)),
    ArrowDown: (far) => (far ? pan(0, 0.25) : stepTo(1, 0)),
    ArrowLeft: (far) => (far ? pan(-0.25, 0) : stepTo(0, -1)),
    ArrowRight: (far) => (far ? pan(0.25, 0) : stepTo(0, 1)),
    "+": () => zoom(0.5, ...middle()),
    "=": () => zoom(0.5, ...middle()),
    Enter: () => zoom(0.25, ...middle()),
    "-": () => zoom(2, ...middle()),
    0: all,
  };
  canvas.addEventListener("keydown", (event) => {
    const act = KEYS[event.key];
    if (!act || !whole || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act(event.shiftKey);
  });

  section.addEventListener("click", (event) => {
    const button = event.target.closest("[data-zoom]");
    if (button && whole) ({ in: () => zoom(0.5), out: () => zoom(2), all })[button.dataset.zoom]();
    const link = event.target.closest("[data-colour]");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    colour = link.dataset.colour;
    for (const one of section.querySelectorAll("[data-colour]")) one === link ? one.setAttribute("aria-current", "true") : one.removeAttribute("aria-current");
    history.replaceState({ map: true }, "", link.href);
    if (whole) {
      paint();
      draw();
    }
  });

  window.addEventListener("popstate", () => {
    if (!whole) return;
    view = viewOf(given());
    refresh(location.href);
    draw();
    settle(false);
  });

  // -- start ---------------------------------------------------------------------------------------------------

  const themed = () => {
    readInks();
    if (whole) {
      paint();
      draw();
    }
  };
  document.addEventListener("themed", themed);

  const begin = async () => {
    readInks();
    new ResizeObserver(draw).observe(canvas);
    try {
      whole = layered(await ask("map", size()));
    } catch (error) {
      state.textContent = error.message;
      return;
    }
    view = viewOf(given());
    state.textContent = whole.cell_rows.length ? "" : "No tensor data";
    paint();
    draw();
    if (!isWhole()) settle(false);
  };
  document.addEventListener("DOMContentLoaded", begin); // the canvas needs its layout size
})();
