// The start: five questions about a training, which a tune answers with the fastest configuration.

import { catalogue } from "./catalogue.js";
import { control, controls, namesOf, valuesOf } from "./controls.js";
import { button, byId, el } from "./dom.js";
import { clearFault, guarded } from "./faults.js";
import { readJson } from "./files.js";
import { askJson } from "./http.js";
import { address, go } from "./link.js";
import { FRAMEWORKS } from "./question.js";

const GIB = 2 ** 30;
/** The fields of each part: name, short label, and what differs on purpose from the request. */
export const QUESTIONS = {
  model: [["model", "By name", { start: "llama3-70b" }]],
  gpus: [["gpu", "GPU", { start: "h100" }], ["num_gpus", "Number", { start: 64 }]],
  batch: [["global_batch", "Sequences per step"], ["sequence", "Tokens of each", { start: 8192 }]],
  framework: [
    ["framework", "Framework", { start: "megatron", texts: FRAMEWORKS }],
    ["precision", "Precision"],
  ],
  file: [["vocab_size", "Vocabulary, if only the tokenizer of this file has it"]],
  step: [["measured_step_s", "Measured step, s", { placeholder: "estimated" }]],
  more: [
    ["network", "Between nodes", { texts: { "": "as the GPU's" },
      choices: ["infiniband", "ethernet:400", "ethernet:100", "tcp:100"] }],
    ["oversubscription", "Oversubscription"],
    ["memory_bytes", "GiB per GPU", { scale: GIB, placeholder: "all" }],
    ["headroom", "Left free, share"],
    ["dispatcher", "Expert dispatcher"], ["dispatch", "Dispatched as"],
    ["cuda_graphs", "CUDA graphs"], ["ep_overlap", "Overlapped experts"],
  ],
};
/** The degrees of the current run, all empty at first. */
const EMPTY = { start: "", prefix: "current_" };
export const CURRENT = {
  first: [
    ["tp", "TP", { ...EMPTY, placeholder: "–" }], ["pp", "PP", { ...EMPTY, placeholder: "–" }],
    ["chunks", "Chunks (VPP)", EMPTY], ["micro_batch", "Micro-batch", EMPTY],
  ],
  more: [["cp", "CP", EMPTY], ["ep", "EP", EMPTY], ["etp", "ETP", EMPTY], ["zero", "ZeRO", EMPTY]],
};
export const SEARCH = [["time_limit_s", "Seconds to search", { start: 60, max: 3600 }]];
const NAMES = namesOf(...Object.values(QUESTIONS));
const DEGREES = namesOf(...Object.values(CURRENT));
/** The kinds of GPU next to the first. */
const OTHERS = [2, 3];

/** The form of the start; `from` is a job whose request fills it. */
export class StartView {
  constructor(from) {
    this.from = from;
    this.config = null;
  }

  async open(host) {
    const { fields, choices: known } = await catalogue();
    const models = { choices: ["", ...known.model.choices], texts: { "": "the model of the configuration pasted below" } };
    const choices = { ...known, model: models };
    this.fields = fields;
    const part = (name) => controls(fields.tune, QUESTIONS[name], choices);
    const question = (number, title, ...parts) => el("fieldset", {},
      el("legend", {}, el("span", { class: "number" }, `${number}`), title), ...parts);
    this.hint = el("p", { class: "hint", id: "ask-config", hidden: true });
    this.form = el("form", { id: "ask", "aria-label": "Five questions",
      onsubmit: guarded((event) => { event.preventDefault(); return this.submit(); }, "form") },
    question(1, "Which model?", part("model"),
      el("label", { class: "wide" }, "or a Hugging Face config.json",
        el("input", { type: "file", id: "ask-file", accept: ".json,application/json",
          onchange: guarded((event) => this.take(event.target.files[0]), "form") })), this.hint),
    question(2, "Which GPUs, and how many?", el("div", { class: "fields" }, part("gpus")),
      el("details", { id: "kinds" }, el("summary", {}, "Several kinds of GPU in one pipeline"),
        el("div", { class: "fields" }, OTHERS.flatMap((place) => this.kindControls(place, choices))),
        el("p", { class: "hint" }, "Ranks of a kind are in a row, each stage is on one kind, and the "
          + "cut gives each kind the layers that it has time and memory for."))),
    question(3, "Which batch?", el("div", { class: "fields" }, part("batch"))),
    question(4, "Which framework?", el("div", { class: "fields" }, part("framework"))),
    question(5, "What do you run today?",
      el("div", { class: "fields four" }, controls(fields.current, CURRENT.first)),
      el("details", {}, el("summary", {}, "More degrees, or paste your configuration"),
        el("div", { class: "fields four" }, controls(fields.current, CURRENT.more)),
        el("label", { class: "wide" }, "Megatron arguments or YAML, or a torchtitan config",
          el("textarea", { name: "current_file", rows: 5, spellcheck: "false" })), part("file")),
      el("div", { class: "fields" }, part("step")),
      el("p", { class: "hint" }, "The gain is over this configuration. Without it, the answer has no gain.")),
    el("details", { class: "more" }, el("summary", {}, "More: network, memory, switches, time"),
      el("div", { class: "fields four" }, part("more"), controls(fields.solve, SEARCH))),
    el("div", { class: "buttons" },
      el("button", { type: "submit", class: "main", id: "ask-button",
        disabled: document.body.dataset.role === "read" }, "Find the fastest configuration"),
      el("a", { href: address({ view: "schedule" }) }, "or schedule one configuration")));
    const before = this.from && await askJson(`v1/jobs/${this.from}/question`);
    if (before) this.fill(before);
    host.replaceChildren(el("section", { id: "start" },
      el("h1", {}, "The fastest way to train your model on your GPUs with your framework, how much "
        + "faster than today, and what to paste."),
      el("p", { class: "hint" }, "Estimated from formulas that are compared with published runs, "
        + "searched together, and proven: within this model nothing is faster by more than the "
        + "certificate allows."),
      this.form));
  }

  /** Return the controls of another kind of GPU. */
  kindControls(place, { gpu: { choices } }) {
    const { gpu, num_gpus } = this.fields.tune;
    return [el("label", {}, "and GPU", control(gpu, `gpu_${place}`, { choices, texts: { "": "none" },
      onchange: () => this.enableNumber(place) })),
      el("label", {}, "Number", control(num_gpus, `num_gpus_${place}`, { disabled: true }))];
  }

  field(name) {
    return this.form.elements[name];
  }

  /** Require the number of another kind of GPU if that kind is chosen. */
  enableNumber(place) {
    const number = this.field(`num_gpus_${place}`);
    const isChosen = this.field(`gpu_${place}`).value !== "";
    Object.assign(number, { required: isChosen, disabled: !isChosen });
    if (!isChosen) number.value = "";
  }

  /** All GPUs, as [kind, number]. */
  get kinds() {
    return ["", ...OTHERS.map((place) => `_${place}`)]
      .map((end) => [this.field(`gpu${end}`).value, Number(this.field(`num_gpus${end}`).value)])
      .filter(([kind]) => kind);
  }

  /** Take a config.json instead of a model of the catalogue. */
  async take(file) {
    if (!file) return;
    try {
      this.use(readJson(await file.text()), file.name);
    } catch (error) {
      throw Object.assign(new Error(`${file.name} is not JSON: ${error.message}; choose a Hugging Face `
        + "config.json"), { code: "file.invalid" });
    }
  }

  use(config, name) {
    this.config = config;
    this.hint.replaceChildren(`Model: ${name}. `, button("By name instead", () => this.use(null, ""),
      { class: "quiet" }));
    this.hint.hidden = config === null;
    this.field("model").disabled = config !== null;
  }

  /** Fill the form from an earlier request. */
  fill(before) {
    if (before.config) this.use(before.config, "of the question before");
    const texts = { ...before, memory_bytes: before.memory_bytes && before.memory_bytes / GIB };
    // Several kinds are one text: h100:32,a100:32.
    const kinds = before.gpu.includes(":") ? before.gpu.split(",").map((kind) => kind.split(":")) : [];
    kinds.forEach(([gpu, number], index) => {
      const end = index ? `_${index + 1}` : "";
      Object.assign(texts, { [`gpu${end}`]: gpu, [`num_gpus${end}`]: number });
    });
    this.form.querySelector("#kinds").open = kinds.length > 1;
    for (const name of DEGREES) texts[`current_${name}`] = before.current?.[name];
    for (const [name, text] of Object.entries(texts)) {
      const input = this.field(name);
      if (!input || text === null || text === undefined || typeof text === "object") continue;
      if (input.options && ![...input.options].some((option) => option.value === String(text))) {
        input.append(el("option", { value: text }, text));
      }
      input.value = text;
    }
    OTHERS.forEach((place) => this.enableNumber(place));
    this.before = { fixed: before.fixed, recompute: before.current?.recompute };
  }

  /** The request. */
  get question() {
    const textsOf = (names, prefix = "") =>
      Object.fromEntries(names.map((name) => [name, this.field(prefix + name).value]));
    const { model, memory_bytes, ...values } = valuesOf(this.fields.tune, textsOf(NAMES));
    if (memory_bytes) values.memory_bytes = Math.round(memory_bytes * GIB);
    if (this.kinds.length > 1) {
      values.gpu = this.kinds.map((kind) => kind.join(":")).join();
      values.num_gpus = this.kinds.reduce((sum, [, number]) => sum + number, 0);
    }
    const file = this.field("current_file").value;
    const degrees = valuesOf(this.fields.current, textsOf(DEGREES, "current_"));
    if (file.trim()) values.current_file = file;
    else if (Object.keys(degrees).length) {
      values.current = degrees;
      if (this.before?.recompute?.length) values.current.recompute = this.before.recompute;
    }
    if (this.before?.fixed) values.fixed = this.before.fixed;
    return { ...values, ...(this.config ? { config: this.config } : { model }) };
  }

  async submit() {
    if (!this.form.reportValidity()) return;
    const options = valuesOf(this.fields.solve, { time_limit_s: this.field("time_limit_s").value });
    byId("ask-button").disabled = true;
    try {
      const job = await askJson("v1/tunes", { json: { ...this.question, options, tags: ["page"] } });
      clearFault("form");
      go({ job: job.id });
    } finally {
      if (byId("ask-button")) byId("ask-button").disabled = false;
    }
  }

  close() {}
}
