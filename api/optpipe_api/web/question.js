// The question that an answer is for: model, GPUs, batch, framework, today; and a way to change it.

import { catalogue } from "./catalogue.js";
import { FORM_NAMES } from "./compose.js";
import { pick } from "./controls.js";
import { button, el, fact, save, table } from "./dom.js";
import { guarded } from "./faults.js";
import { billions, bytes, ms, plural, share } from "./format.js";
import { askJson } from "./http.js";
import { address, read } from "./link.js";
import { barsOf, MOST_TOLD } from "./tuned_plots.js";

/** Titles of the frameworks, where they differ from the names. */
export const FRAMEWORKS = { megatron: "Megatron-Core", huggingface: "Hugging Face", any: "any (our runtime)" };
const DEGREES = { tp: "TP", cp: "CP", ep: "EP", etp: "ETP", pp: "PP", chunks: "VPP", micro_batch: "MBS", zero: "ZeRO" };
/** Fields that are shown only if they differ from the default. */
const RARE = ["network", "oversubscription", "headroom", "dispatcher", "dispatch", "cuda_graphs", "ep_overlap"];
const count = new Intl.NumberFormat("en-US");

/** Return the question of a tune as facts; `today` is the row of the current run if it is known. */
function tuneQuestion(asked, today, fields) {
  const degrees = Object.entries(DEGREES)
    .filter(([name]) => asked.current?.[name]).map(([name, title]) => `${title} ${asked.current[name]}`);
  const rare = RARE.filter((name) => name in asked && asked[name] !== null && asked[name] !== fields[name]?.default)
    .map((name) => `${name.replaceAll("_", " ")} ${asked[name] === true ? "on" : asked[name]}`);
  return [
    ["Model", asked.model ?? "config.json"],
    ["GPUs", gpus(asked)],
    ["Batch", `${count.format(asked.global_batch)} sequences of ${count.format(asked.sequence)} tokens`],
    ["Framework", `${FRAMEWORKS[asked.framework] ?? asked.framework}, ${asked.precision}`],
    ["Today", [today?.label ?? (degrees.join(" ") || (asked.current_file ? "your file" : "not given")),
      asked.measured_step_s ? `measured ${asked.measured_step_s} s per step` : ""].filter(Boolean).join(", ")],
    ...(asked.memory_bytes ? [["Memory per GPU", bytes(asked.memory_bytes)]] : []),
    ...(rare.length ? [["Also", rare.join(", ")]] : [])];
}

function gpus({ gpu, num_gpus, gpu_counts: counts }) {
  if (gpu.includes(":")) return gpu.split(",").map((kind) => kind.split(":").reverse().join(" × ")).join(" + ");
  if (counts) return `${counts === "auto" ? "other numbers of" : `${counts.join(", ")} ×`} ${gpu}`;
  return `${num_gpus} × ${gpu}`;
}

/** Return the question of another job as facts; `method` is a title. */
function problemQuestion(problem, { objective, options }, method) {
  const memory = Math.max(...problem.devices.map((device) => device.memory_bytes));
  return [
    ["Problem", problem.name || "without a name"],
    ["Size", [plural(problem.devices.length, "device"), plural(problem.stages.length, "stage"),
      plural(problem.num_microbatches, "micro-batch", "es")].join(", ")],
    ["Memory per device", bytes(memory)],
    ["Objective", objective],
    ["Search", `${method}, ${options.time_limit_s} s`]];
}

/** The part of an answer's page that shows its question, with a link to change it. */
export class Question {
  constructor(view) {
    this.view = view;
    this.facts = el("dl", { class: "facts" });
    this.change = el("a", { class: "button", id: "change" }, "Change");
    this.stages = this.stagesPart();
    this.element = el("section", { id: "question", "aria-label": "Question", hidden: true },
      this.facts, this.change, this.stages);
  }

  /** Show the question of a tune; `today` is the row of the current run if it is known. */
  async showTune(asked, today) {
    const { fields } = await catalogue();
    this.show(tuneQuestion(asked, today, fields.tune), { ask: this.view.id });
    this.stages.hidden = !this.view.job.has_schedule;
  }

  /** Show the question of another job; without a problem there is none. */
  async showProblem() {
    const { view } = this;
    const problem = await askJson(`${view.path}/problem`, { signal: view.stop.signal }).catch(() => null);
    if (!problem) return;
    const form = pick(read(), FORM_NAMES);
    const method = view.isComparison ? "all methods" : view.titleOf(view.job.options.method);
    this.show(problemQuestion(problem, view.job, method),
      { view: "schedule", ...form, problem: form.model ? "" : view.id });
  }

  show(facts, change) {
    this.facts.replaceChildren(...facts.map(([name, value]) => fact(name, value)));
    this.change.href = address(change);
    this.element.hidden = false;
  }

  /** The stages of the job's problem, which are loaded when they are opened. */
  stagesPart() {
    const place = el("div", {});
    const load = guarded(async ({ target: { open } }) => {
      if (!open) return;
      const problem = await askJson(`${this.view.path}/problem`);
      place.replaceChildren(problemSummary(await askJson("v1/variants", { json: { problem, values: {} } })));
    });
    return el("details", { id: "stages", ontoggle: load }, el("summary", {}, "Stages of the problem"), place);
  }
}

// --- A problem as a table of its stages, or of many stages as bars.

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
