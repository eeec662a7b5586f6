// A problem as a table of its stages, or of many stages as bars.

import { button, el, fact, save, table } from "./dom.js";
import { billions, bytes, ms, plural, share } from "./format.js";
import { MOST_TOLD, barsOf } from "./tuned_plots.js";

const COLUMNS = ["Stage", "Device", "Layers", "F ms", "I ms", "W ms", "Activation", "Offloadable",
  "Modes", "Static", "Usable"].map((title) => ({ title, number: title !== "Device" }));

/** Return the summary of what `/v1/estimates` or `/v1/variants` answered. */
export function problemSummary(view) {
  const { problem } = view;
  const hasSizes = Boolean(view.sizes);
  const hasMenus = problem.stages.some((stage) => menuOf(stage).length > 1);
  const columns = COLUMNS.filter(({ title }) => (hasSizes || title !== "Layers")
    && (hasMenus || title !== "Modes"));
  const isTold = problem.stages.length <= MOST_TOLD;
  const rows = () => problem.stages.map((stage, index) => ({
    cells: rowOf(view, stage, index, { hasSizes, hasMenus }) }));
  return el("section", { id: "problem", "data-hash": view.problem_hash },
    el("div", { class: "head" }, el("h2", {}, "Problem"),
      button("Save as JSON", () => saveProblem(problem), { class: "quiet", id: "save-problem" })),
    el("dl", { class: "facts" }, factsOf(view)),
    isTold ? table("Stages of the problem", columns, rows()) : stageBars(view),
    problem.stages.some(({ costs }) => costs?.length > 1)
      ? el("p", { class: "hint" }, "Micro-batches differ in cost: the first is shown.") : null,
    (view.notes ?? []).map((note) => el("p", { class: "hint" }, note)));
}

function rowOf(view, stage, index, { hasSizes, hasMenus }) {
  const [cost, menu] = [costOf(stage), menuOf(stage)];
  const offloaded = cost.offload_bytes ?? Math.max(0, ...menu.map((mode) => mode.offload_bytes ?? 0));
  return [String(index), view.problem.devices[stage.device].name,
    ...(hasSizes ? [String(view.sizes[index])] : []), ms(cost.forward_ms),
    ms(cost.backward_input_ms), ms(cost.backward_weight_ms), bytes(cost.activation_bytes),
    bytes(offloaded), ...(hasMenus ? [String(menu.length)] : []), bytes(stage.static_bytes),
    bytes(view.usable_bytes[stage.device])];
}

/** What a stage takes: of v1 it says so itself, of v2 the first of its costs does. */
const costOf = (stage) => stage.costs?.[0] ?? stage;

const menuOf = (stage) => costOf(stage).modes ?? [];

/** Times and bytes of many stages as bars; the caption names the stage and its device under the pointer. */
function stageBars({ problem }) {
  const columns = (kinds, unit) => problem.stages.map((stage, index) => {
    const parts = Object.entries(kinds).map(([name, of]) => [name, of(costOf(stage), stage)]);
    const said = parts.map(([name, value]) => `${name} ${unit(value)}`).join(", ");
    return { title: `Stage ${index} on ${problem.devices[stage.device].name}: ${said}`, parts };
  });
  const top = (shown) => Math.max(...shown.map(({ parts }) => parts.reduce((sum, [, value]) => sum + value, 0)));
  const picture = (title, shown) => [el("h3", {}, title), barsOf(title, shown, { top: top(shown),
    caption: `${plural(problem.stages.length, "stage")}; point at one for its numbers` })];
  return el("div", { id: "stage-bars" },
    picture("Time of each stage and micro-batch", columns({ F: (cost) => cost.forward_ms,
      I: (cost) => cost.backward_input_ms, W: (cost) => cost.backward_weight_ms }, (value) => `${ms(value)} ms`)),
    picture("Memory of each stage", columns({ static: (_, stage) => stage.static_bytes ?? 0,
      activation: (cost) => cost.activation_bytes ?? 0 }, bytes)));
}

function factsOf(view) {
  const { problem } = view;
  const found = [
    fact("Name", problem.name || "–"),
    fact("Size", [plural(problem.devices.length, "device"), plural(problem.stages.length, "stage"),
      plural(problem.num_microbatches, "micro-batch", "es")].join(", "), { id: "problem-size" }),
    fact("Memory", bytes(Math.max(...problem.devices.map((device) => device.memory_bytes))),
      { id: "problem-memory" }),
  ];
  if (view.parameters) found.push(fact("Parameters", billions(view.parameters)));
  if (view.mfu) found.push(fact("Compute", `${share(view.mfu)} of peak`));
  if (view.step_ms) found.push(fact("Step, 1F1B", stepOf(view), { id: "problem-step" }));
  return found;
}

/** The estimated step, with its interval if such estimates were compared with published runs. */
function stepOf({ step_ms: step, interval_ms: interval }) {
  const [low, high] = interval?.map(ms) ?? [];
  return interval ? `${ms(step)} ms, 80% between ${low} and ${high}` : `${ms(step)} ms`;
}

function saveProblem(problem) {
  const text = `${JSON.stringify(problem, null, 1)}\n`;
  save(new Blob([text], { type: "application/json" }), `${problem.name || "problem"}.json`);
}
