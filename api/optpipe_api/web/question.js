// The question that an answer is for: model, GPUs, batch, framework, today; and a way to change it.

import { catalogue } from "./catalogue.js";
import { FORM_NAMES } from "./compose.js";
import { pick } from "./controls.js";
import { el, fact } from "./dom.js";
import { guarded } from "./faults.js";
import { bytes, plural } from "./format.js";
import { askJson } from "./http.js";
import { address, read } from "./link.js";
import { problemSummary } from "./problem.js";

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
