// Tables of what a tune has found: each number of GPUs, and each switch that is off.

import { button, el, table } from "./dom.js";
import { guarded } from "./faults.js";
import { ms, share } from "./format.js";
import { scalingPlot } from "./tuned_plots.js";

const GIB = 2 ** 30;
const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** The fastest configuration on each number of GPUs, as a curve and a table. */
export function scalingPart(scaling, askAgain) {
  if (!scaling?.length) return [];
  const titles = ["GPUs", "Step, ms", "Tokens/s/GPU", "M tokens/GPU-hour", "Cost/M tokens"];
  const columns = [...titles.map((title) => ({ title, number: true })), { title: "Fastest configuration" }];
  const shown = (value, text) => (value === null ? "" : text(value));
  const rows = scaling.map((row) => ({ attributes: { "data-gpus": row.num_gpus }, cells: [
    button(row.num_gpus, guarded(() => askAgain({ gpu_counts: undefined, num_gpus: row.num_gpus })),
      { class: "quiet row", "data-needs": "submit", "data-key": `gpus-${row.num_gpus}`, title: "Tune for this number" }),
    shown(row.step_ms, ms), shown(row.tokens_per_s_per_gpu, whole.format),
    shown(row.tokens_per_gpu_hour, (tokens) => (tokens / 1e6).toPrecision(3)),
    shown(row.cost_per_million_tokens, (cost) => cost.toPrecision(4)),
    row.step_ms === null ? row.reason : row.label] }));
  return [el("h2", {}, "Step time on each number of GPUs (estimated)"), scalingPlot(scaling),
    el("div", { id: "scaling" }, table("Numbers of GPUs", columns, rows))];
}

/** The gain of each switch that is off, with a button that searches with it. */
export function switchesPart(switches, question, askAgain) {
  if (!switches?.length) return [];
  const columns = ["Configuration", "Switch", "Step, ms", "Instead of", "Saved time"].map((title, index) => (
    { title, number: index > 1 }));
  const changes = ({ field, value }) => (field === "pairs" ? { fixed: { ...question.fixed, pairs: 1 } } : { [field]: value });
  const rows = switches.map((one) => ({ attributes: { "data-switch": one.field }, cells: [
    one.row === "best" ? "fastest" : "today",
    button(`${one.field.replace("_", " ")}: ${one.value === true ? "on" : one.value}`, guarded(() => askAgain(changes(one))),
      { class: "quiet row", "data-needs": "submit", "data-key": `switch-${one.row}-${one.field}`,
        title: `Search with it ${one.flag}` }),
    ms(one.step_ms), ms(one.base_ms),
    share(one.gain) + (one.missing_bytes ? `, needs ${(one.missing_bytes / GIB).toFixed(1)} GiB more` : "")] }));
  return [el("h2", {}, "Switches that are off, each alone (simulated)"), el("div", { id: "switches" }, table("Switches", columns, rows))];
}
