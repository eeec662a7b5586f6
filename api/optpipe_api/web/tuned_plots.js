// Pictures of what a tune has found: memory of each rank as bars, step time against memory as dots.

import { el } from "./dom.js";
import { bytes, ms, plural } from "./format.js";

const GIB = 2 ** 30;
const HOVER = "Point at a dot for its configuration; press it to see its schedule.";
const PARTS = ["weights", "gradients", "optimizer", "activations", "buffers", "reserved"];
/** The most stages that are told as text or as rows of a table. */
export const MOST_TOLD = 24;
const [WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT] = [520, 240, 64, 34, 14, 16];

/** The largest of what the ranks of a row hold. */
export const peak = (row) => Math.max(...row.peak_bytes);

/**
 * Return bars of parts, one per column of {title, parts: [name, value]}, under a caption that names the
 * column under the pointer; `top` is the value at the upper edge, `limit` that of a dashed line.
 */
export function barsOf(label, columns, { top, limit = null, caption = label }) {
  const height = (value) => `${(100 * value / top).toFixed(2)}%`;
  const said = el("figcaption", {}, caption);
  const bars = columns.map(({ title, parts }) => el("span", { class: "rank", title },
    parts.map(([name, value]) => {
      const part = el("span", { class: `part ${name}` });
      part.style.height = height(value);
      return part;
    }).reverse()));
  const line = el("span", { class: "limit", hidden: limit === null });
  line.style.bottom = height(limit ?? 0);
  return el("figure", { class: "ranks" },
    el("div", { class: "bars", role: "img", "aria-label": label,
      onpointerover: ({ target }) => { said.textContent = target.closest(".rank")?.title ?? caption; },
      onpointerleave: () => { said.textContent = caption; } }, bars, line), said);
}

/** Bars of a row's ranks by what the memory is for, and a line at the memory of the device. */
export function rankBars(row, title, memoryBytes) {
  const columns = row.memory.map((rank, index) => {
    const parts = PARTS.map((name) => [name, rank[`${name}_bytes`]]);
    const said = parts.map(([name, value]) => `${name} ${bytes(value)}`).join(", ");
    return { parts, title: `Rank ${index}: ${bytes(row.peak_bytes[index])}: ${said}` };
  });
  const isOver = peak(row) > memoryBytes ? `, ${bytes(peak(row) - memoryBytes)} more than there is` : "";
  const said = `${title}: ${bytes(Math.min(...row.peak_bytes))} to ${bytes(peak(row))} of `
    + `${bytes(memoryBytes)}${isOver}`;
  return barsOf(`Memory of ${row.pp} ranks, ${said}`, columns,
    { top: Math.max(memoryBytes, peak(row)), limit: memoryBytes, caption: said });
}

/** The layers of a row's stages: as text, of many stages as bars. */
export function layersOf({ layers }) {
  const said = `${plural(layers.length, "stage")} of ${Math.min(...layers)} to ${Math.max(...layers)} layers`;
  if (layers.length <= MOST_TOLD) {
    return el("p", { class: "hint", id: "layers" },
      `${plural(layers.length, "stage")} of ${layers.join(", ")} layers`);
  }
  return el("div", { id: "layers" }, barsOf(said, layers.map((count, stage) => ({
    title: `Stage ${stage}: ${plural(count, "layer")}`, parts: [["layers", count]] })), { top: Math.max(...layers) }));
}

/** What the colours of the bars mean. */
export const partsKey = () => el("p", { class: "key parts" }, PARTS.map((name) =>
  el("span", { class: name }, name)));

/** Dots of rows, step time over GiB, with their names; the front as a line; a dot chooses its row. */
export function paretoPlot(rows, front, current, chosen, onRow) {
  const all = current === null ? rows : [...rows, current];
  const scale = (values, from, to) => {
    const [least, most] = [Math.min(...values), Math.max(...values)];
    const margin = 0.08 * (most - least) || 0.05 * most;
    return [(value) => from + (to - from) * (value - least + margin) / (most - least + 2 * margin),
      [least, most]];
  };
  const [x, ends] = scale(all.map((row) => peak(row) / GIB), LEFT, WIDTH - RIGHT);
  const [y, times] = scale(all.map((row) => row.step_ms), HEIGHT - BOTTOM, TOP);
  const place = (row) => [x(peak(row) / GIB), y(row.step_ms)];
  const line = [...front].reverse().map(place).map(([px, py], index, points) =>
    (index === 0 ? `M${px},${py}` : `H${px}V${py}`)).join("");
  const texts = [
    ...new Set(ends)].map((value) => label(value.toFixed(1), x(value), HEIGHT - BOTTOM + 14, "middle"));
  const sides = [...new Set(times)].map((value) => label(ms(value), LEFT - 6, y(value) + 4, "end"));
  const dots = all.map((row) => {
    const [cx, cy] = place(row);
    const kind = row === current ? "today" : row === rows[0] ? "best" : "";
    const dot = svg("circle", { cx, cy, r: row.id === chosen ? 7 : 5, class: `dot ${kind}`,
      "data-row": row.id });
    const name = `${row === current ? "today: " : ""}${row.label || row.id}`;
    dot.append(svg("title", {}));
    dot.firstChild.textContent = `${name}: ${ms(row.step_ms)} ms, ${(peak(row) / GIB).toFixed(1)} GiB`;
    dot.addEventListener("click", () => onRow(row));
    dot.addEventListener("pointerenter", () => { named.textContent = dot.firstChild.textContent; });
    dot.addEventListener("pointerleave", () => { named.textContent = HOVER; });
    return dot;
  });
  const named = el("p", { class: "hint named" }, HOVER);
  const said = `Step time against memory of ${all.length} configurations; the table has the same`;
  const plot = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": said });
  plot.append(svg("path", { class: "axis",
    d: `M${LEFT},${TOP}V${HEIGHT - BOTTOM}H${WIDTH - RIGHT}` }),
  svg("path", { class: "front", d: line }), ...texts, ...sides,
  label("GiB of the fullest rank (step time in ms)", (LEFT + WIDTH) / 2, HEIGHT - 4, "middle"), ...dots);
  return el("figure", { class: "pareto" }, plot,
    el("figcaption", { class: "key" }, el("span", { class: "best" }, "fastest"),
      current === null ? null : el("span", { class: "today" }, "today"),
      el("span", { class: "front" }, "nothing is both faster and smaller")), named);
}

/** Step time over the number of GPUs, both on logarithmic axes, of the numbers that fit. */
export function scalingPlot(rows) {
  const fits = rows.filter((row) => row.step_ms !== null);
  const scale = (values, from, to) => {
    const [least, most] = [Math.log(Math.min(...values)), Math.log(Math.max(...values))];
    return (value) => from + (to - from) * (most > least ? (Math.log(value) - least) / (most - least) : 0.5);
  };
  const x = scale(fits.map((row) => row.num_gpus), LEFT + 12, WIDTH - RIGHT - 12);
  const y = scale(fits.map((row) => row.step_ms), HEIGHT - BOTTOM - 12, TOP + 12);
  const places = fits.map((row) => [x(row.num_gpus), y(row.step_ms)]);
  const ends = fits.length > 1 ? [fits[0], fits.at(-1)] : fits;
  const dots = fits.map((row, index) => {
    const dot = svg("circle", { cx: places[index][0], cy: places[index][1], r: 5, class: `dot ${index ? "" : "best"}` });
    dot.append(svg("title", {}));
    dot.firstChild.textContent = `${row.num_gpus} GPUs: ${ms(row.step_ms)} ms`;
    return dot;
  });
  const plot = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img",
    "aria-label": `Step time on ${fits.length} numbers of GPUs; the table has the same` });
  plot.append(svg("path", { class: "axis", d: `M${LEFT},${TOP}V${HEIGHT - BOTTOM}H${WIDTH - RIGHT}` }),
    svg("path", { class: "front", d: `M${places.map((place) => place.join(",")).join("L")}` }),
    ...ends.map((row) => label(row.num_gpus, x(row.num_gpus), HEIGHT - BOTTOM + 14, "middle")),
    ...ends.map((row) => label(ms(row.step_ms), LEFT - 6, y(row.step_ms) + 4, "end")),
    label("GPUs (step time in ms, logarithmic)", (LEFT + WIDTH) / 2, HEIGHT - 4, "middle"), ...dots);
  return el("figure", { class: "pareto", id: "scaling-plot" }, plot);
}

function svg(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function label(text, x, y, anchor) {
  const made = svg("text", { x, y, "text-anchor": anchor });
  made.textContent = text;
  return made;
}

/** How far a search is: what became of the configurations, as a bar and in words. */
export function countsBar(counts) {
  const names = [["do_not_fit", "do not fit"], ["excluded", "excluded by bounds"], ["solved", "solved"],
    ["open", "open"]];
  const bar = el("div", { class: "counts", role: "img",
    "aria-label": names.map(([name, text]) => `${counts[name]} ${text}`).join(", ") });
  for (const [name] of names) {
    const part = el("span", { class: name });
    part.style.flexGrow = counts[name];
    bar.append(part);
  }
  const words = names.map(([name, text]) =>
    el("span", { class: name }, `${counts[name].toLocaleString("en-US")} ${text}`));
  return el("div", { id: "counts" }, bar, el("p", { class: "key" }, words));
}
