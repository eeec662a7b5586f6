// The parts of a tune's page: tables, what can be done next, and what to paste into the framework.

import { choiceField } from "./controls.js";
import { button, el, save, table } from "./dom.js";
import { guarded } from "./faults.js";
import { bytes, ms, share } from "./format.js";
import { ask, askJson } from "./http.js";
import { go } from "./link.js";
import { peak, scalingPlot } from "./tuned_plots.js";

// --- Tables of what a tune has found: each number of GPUs, and each switch that is off.

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

// --- What can be done after an answer: ask with one change, move a layer, solve a schedule further.

const LARGE_BYTES = 141e9; // an H200

/** Return buttons that ask the question of an answer with one change each. */
export function whatIfs({ memory_bytes: memory }, question, askAgain) {
  const again = (text, changes) => button(text, guarded(() => askAgain(changes)),
    { "data-needs": "submit", "data-key": `again-${text}` });
  const more = Math.max(LARGE_BYTES, 2 * memory);
  return el("div", { class: "buttons" },
    again(`${bytes(more)} instead of ${bytes(memory)} per GPU`, { memory_bytes: more }),
    again("Twice the batch", { global_batch: 2 * question.global_batch }),
    ...(question.gpu.includes(",") ? [] : [again("Other numbers of GPUs", {
      gpu_counts: "auto", gpu: question.gpu.split(":")[0], num_gpus: undefined, current: undefined,
      current_file: undefined, current_format: undefined, measured_step_s: undefined })]),
    again("100 Gbit/s Ethernet", { network: "ethernet:100" }),
    ...(question.framework === "any" ? [] : [again("Any schedule (our runtime)", { framework: "any" })]));
}

/** Return a form that moves one layer of a row to another stage, and says how long the step is then. */
export function layerMover(row, path, memory) {
  const stages = row.layers.map((layers, stage) => [stage, `${stage} (${layers})`]);
  const last = row.layers.length - 1;
  const from = choiceField("from_stage", "One layer from stage", stages, last);
  const to = choiceField("to_stage", "to stage", stages, last - 1);
  const said = el("output", { id: "moved" });
  const chosen = (field) => Number(field.querySelector("select").value);
  const move = async () => {
    const layers = [...row.layers];
    layers[chosen(from)] -= 1;
    layers[chosen(to)] += 1;
    said.textContent = "";
    const moved = await askJson(`${path}/recut?layers=${layers}`);
    const change = moved.step_ms / row.step_ms - 1;
    said.textContent = `${ms(moved.step_ms)} ms per step by ${moved.method} `
      + `(${change < 0 ? "" : "+"}${share(change)}), fullest rank ${bytes(peak(moved))} of ${bytes(memory)}.`;
  };
  return el("div", { class: "buttons" }, from, to,
    button("Move it", guarded(move), { id: "move-layer", "data-key": "move" }), said);
}

/** Solve the problem of a row alone, as a job of its own. */
export async function solveRow(path) {
  const problem = await askJson(`${path}/problem`);
  go({ job: (await askJson("v1/jobs", { json: { problem, options: { time_limit_s: 30 }, tags: ["page"] } })).id });
}

// --- What to paste into the training framework: a preview of each file, to copy or to save.

/** The files of each framework: format of the service, title, file name. */
const PASTES = {
  megatron: [["arguments", "Megatron-LM arguments", "arguments.sh"], ["yaml", "Megatron-Core YAML", "megatron.yaml"]],
  torchtitan: [["python", "torchtitan config", "optpipe_config.py"], ["csv", "Schedule, CSV", "schedule.csv"]],
  huggingface: [],
  any: [],
};

/** The preview of the files of one row, and the command that trains with them. */
export class Paste {
  constructor() {
    this.element = el("section", { id: "paste-part", hidden: true });
  }

  /** Show the files of a row whose address is `path`; nothing is loaded twice. */
  show(row, path, framework) {
    if (this.path === path) return;
    this.path = path;
    const files = PASTES[framework];
    this.element.hidden = !files.length && !row.command;
    const place = el("div", {});
    const tabs = files.map(([form, title, name], index) => el("label", {},
      el("input", { type: "radio", name: "paste-form", value: form, checked: index === 0,
        onchange: guarded(() => this.load(place, path, form, name)) }), el("span", {}, title)));
    this.element.replaceChildren(el("h2", {}, `What to paste: ${row.label || row.id}`),
      ...(tabs.length > 1 ? [el("div", { class: "tabs", role: "radiogroup", "aria-label": "File" }, tabs)] : []),
      place, ...(row.command ? [el("h3", {}, "Command, on every host"), preview(row.command, "train-command")] : []));
    if (files.length) guarded(() => this.load(place, path, files[0][0], files[0][2]))();
  }

  async load(place, path, form, name) {
    const text = await (await ask(`${path}/paste?format=${form}`)).text();
    const chosen = this.element.querySelector("[name=paste-form]:checked")?.value ?? form;
    if (this.path !== path || chosen !== form) return;
    place.replaceChildren(preview(text, "pasted",
      button(`Save ${name}`, () => save(new Blob([text], { type: "text/plain" }), name), { "data-paste": form })));
  }
}

/** Return a text with a button that copies it, and more buttons. */
function preview(text, id, ...more) {
  const shown = el("pre", { id, tabindex: 0 }, text);
  const copy = button("Copy", async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // Without https there is no clipboard: the text is selected, and the old command copies it.
      getSelection().selectAllChildren(shown);
      document.execCommand("copy");
    }
    copy.textContent = "Copied";
    setTimeout(() => { copy.textContent = "Copy"; }, 2000);
  }, { "data-copy": id });
  return el("div", { class: "preview" }, shown, el("div", { class: "buttons" }, copy, ...more));
}
