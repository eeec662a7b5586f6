// The start: what this is, in a sentence, and five questions, whose answer is the fastest configuration.

import { choiceField, numberField } from "./controls.js";
import { button, byId, el } from "./dom.js";
import { clearFault, guarded } from "./faults.js";
import { readJson } from "./files.js";
import { bytes } from "./format.js";
import { askJson } from "./http.js";
import { address, go } from "./link.js";

const FRAMEWORKS = [["megatron", "Megatron-Core"], ["torchtitan", "torchtitan"],
  ["any", "any (our runtime)"]];
const SHARED = ["gpu", "num_gpus", "global_batch", "sequence", "framework", "precision"];
const DEGREES = ["tp", "pp", "chunks", "micro_batch", "cp", "ep", "etp", "zero"];
const SWITCHES = [["cuda_graphs", "CUDA graphs"], ["ep_overlap", "Overlapped experts"]];
const NUMBERS = ["num_gpus", "global_batch", "sequence", "oversubscription", "headroom"];
const GB = 1e9;
/** The kinds of GPU that may stand beside the first. */
const OTHERS = [2, 3];

/** The form of the start; `from` is a job whose question fills it. */
export class StartView {
  constructor(from) {
    this.from = from;
    this.config = null;
  }

  async open(host) {
    const { models, gpus, precisions } = await askJson("v1/presets");
    const optional = { required: false };
    const gpuChoices = gpus.map(({ name, memory_bytes }) => [name, `${name} · ${bytes(memory_bytes)}`]);
    const degree = (name, label, attributes = {}) =>
      numberField(`current_${name}`, label, "", { ...optional, placeholder: 1, ...attributes });
    const asked = (number, title, ...parts) => el("fieldset", {},
      el("legend", {}, el("span", { class: "number" }, `${number}`), title), ...parts);
    this.told = el("p", { class: "hint", id: "ask-config", hidden: true });
    this.form = el("form", { id: "ask", "aria-label": "Five questions",
      onsubmit: guarded((event) => { event.preventDefault(); return this.ask(); }, "form") },
    asked(1, "Which model?",
      choiceField("model", "By name", models.map(({ name }) => name), "llama3-70b"),
      el("label", { class: "wide" }, "or a Hugging Face config.json",
        el("input", { type: "file", id: "ask-file", accept: ".json,application/json",
          onchange: guarded((event) => this.take(event.target.files[0]), "form") })), this.told),
    asked(2, "Which GPUs, and how many?", el("div", { class: "fields" },
      choiceField("gpu", "GPU", gpuChoices, "h100"),
      numberField("num_gpus", "Number", 64, { max: 131072 })),
    el("details", { id: "kinds" }, el("summary", {}, "Several kinds of GPU in one pipeline"),
      el("div", { class: "fields" }, OTHERS.flatMap((place) => [
        choiceField(`gpu_${place}`, "and GPU", [["", "none"], ...gpuChoices], "",
          { onchange: () => this.count(place) }),
        numberField(`num_gpus_${place}`, "Number", "", { ...optional, disabled: true, max: 131072 })])),
      el("p", { class: "hint" }, "Ranks of a kind stand in a row, each stage is on one kind, and the "
        + "cut gives each what it has time and memory for."))),
    asked(3, "Which batch?", el("div", { class: "fields" },
      numberField("global_batch", "Sequences per step", 128, { max: 1048576 }),
      numberField("sequence", "Tokens of each", 8192))),
    asked(4, "Which framework?", el("div", { class: "fields" },
      choiceField("framework", "Framework", FRAMEWORKS, "megatron"),
      choiceField("precision", "Precision", precisions, "bf16"))),
    asked(5, "What do you run today?",
      el("div", { class: "fields four" }, degree("tp", "tp", { placeholder: "–" }),
        degree("pp", "pp", { placeholder: "–" }), degree("chunks", "Chunks (VPP)"),
        degree("micro_batch", "Micro-batch")),
      el("details", {}, el("summary", {}, "More degrees, or paste your configuration"),
        el("div", { class: "fields four" }, degree("cp", "cp"), degree("ep", "ep"),
          degree("etp", "etp"), degree("zero", "ZeRO", { min: 0, max: 3 })),
        el("label", { class: "wide" }, "Megatron arguments or YAML, or a torchtitan config",
          el("textarea", { name: "current_file", rows: 5, spellcheck: "false" }))),
      el("div", { class: "fields" }, numberField("measured_step_s", "Measured step, s", "",
        { ...optional, min: 0.001, step: "any", placeholder: "estimated",
          title: "It calibrates every time" })),
      el("p", { class: "hint" }, "All gains are over it. Left empty, none is known.")),
    el("details", { class: "more" }, el("summary", {}, "More: network, memory, switches, time"),
      el("div", { class: "fields four" },
        choiceField("network", "Between nodes", [["", "as the GPU's"], "infiniband", "ethernet:400",
          "ethernet:100", "tcp:100"], ""),
        numberField("oversubscription", "Oversubscription", 1, { step: "any", max: 64 }),
        numberField("memory_gb", "GB per GPU", "", { ...optional, step: "any", placeholder: "all" }),
        numberField("headroom", "Left free, share", 0.05, { min: 0, max: 0.99, step: "any" }),
        choiceField("dispatcher", "Expert dispatcher", ["alltoall", "deduplicated"], "alltoall"),
        choiceField("dispatch", "Dispatched as", ["bf16", "fp8"], "bf16"),
        numberField("ask_seconds", "Seconds to search", 60, { max: 3600 })),
      el("div", { class: "buttons" }, SWITCHES.map(([name, text]) =>
        el("label", { class: "switch" }, el("input", { type: "checkbox", name }), text)))),
    el("div", { class: "buttons" },
      el("button", { type: "submit", class: "main", id: "ask-button",
        disabled: document.body.dataset.role === "read" }, "Find the fastest configuration"),
      el("a", { href: address({ view: "schedule" }) }, "or schedule one configuration")));
    const kept = this.from && await askJson(`v1/jobs/${this.from}/question`);
    if (kept) this.fill(kept);
    host.replaceChildren(el("section", { id: "start" },
      el("h1", {}, "The fastest way to train your model on your GPUs with your framework, how much "
        + "faster than today, and what to paste."),
      el("p", { class: "hint" }, "Estimated from formulas that are compared with published runs, "
        + "searched together, and proven: within this model nothing is faster by more than is said."),
      this.form));
  }

  field(name) {
    return this.form.elements[name];
  }

  /** Ask for the number of another kind of GPU where one is chosen. */
  count(place) {
    const number = this.field(`num_gpus_${place}`);
    const isAsked = this.field(`gpu_${place}`).value !== "";
    Object.assign(number, { required: isAsked, disabled: !isAsked });
    if (!isAsked) number.value = "";
  }

  /** All GPUs, as [kind, number]. */
  get kinds() {
    return ["", ...OTHERS.map((place) => `_${place}`)]
      .map((end) => [this.field(`gpu${end}`).value, Number(this.field(`num_gpus${end}`).value)])
      .filter(([kind]) => kind);
  }

  /** Take a config.json in place of a model of the catalogue. */
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
    this.told.replaceChildren(`Model: ${name}. `, button("By name instead", () => this.use(null, ""),
      { class: "quiet" }));
    this.told.hidden = config === null;
    this.field("model").disabled = config !== null;
  }

  /** Fill the form from what was asked before. */
  fill(asked) {
    if (asked.config) this.use(asked.config, "of the question before");
    const texts = { ...asked, memory_gb: asked.memory_bytes ? asked.memory_bytes / GB : undefined };
    // Several kinds are one text: h100:32,a100:32.
    const kinds = asked.gpu.includes(":") ? asked.gpu.split(",").map((kind) => kind.split(":")) : [];
    kinds.forEach(([gpu, number], index) => {
      const end = index ? `_${index + 1}` : "";
      Object.assign(texts, { [`gpu${end}`]: gpu, [`num_gpus${end}`]: number });
    });
    this.form.querySelector("#kinds").open = kinds.length > 1;
    for (const name of DEGREES) texts[`current_${name}`] = asked.current?.[name];
    for (const [name, value] of Object.entries(texts)) {
      const field = this.field(name);
      if (!field || value === null || value === undefined || typeof value === "object") continue;
      if (field.type === "checkbox") field.checked = value;
      else {
        if (field.options && ![...field.options].some((option) => option.value === String(value))) {
          field.append(el("option", { value }, value));
        }
        field.value = value;
      }
    }
    OTHERS.forEach((place) => this.count(place));
    this.kept = { fixed: asked.fixed, recompute: asked.current?.recompute };
  }

  /** What the service is asked. */
  get question() {
    const said = (name) => this.field(name).value;
    const degrees = DEGREES.filter((name) => said(`current_${name}`) !== "");
    const asked = Object.fromEntries([...SHARED, "dispatcher", "dispatch", "oversubscription", "headroom"]
      .map((name) => [name, NUMBERS.includes(name) ? Number(said(name)) : said(name)]));
    if (this.kinds.length > 1) {
      asked.gpu = this.kinds.map((kind) => kind.join(":")).join();
      asked.num_gpus = this.kinds.reduce((sum, [, number]) => sum + number, 0);
    }
    for (const [name] of SWITCHES) asked[name] = this.field(name).checked;
    if (said("network")) asked.network = said("network");
    if (said("memory_gb")) asked.memory_bytes = Math.round(said("memory_gb") * GB);
    if (said("measured_step_s")) asked.measured_step_s = Number(said("measured_step_s"));
    if (said("current_file").trim()) asked.current_file = said("current_file");
    else if (degrees.length) {
      asked.current = Object.fromEntries(degrees.map((name) => [name, Number(said(`current_${name}`))]));
      if (this.kept?.recompute?.length) asked.current.recompute = this.kept.recompute;
    }
    if (this.kept?.fixed) asked.fixed = this.kept.fixed;
    return { ...asked, ...(this.config ? { config: this.config } : { model: said("model") }) };
  }

  async ask() {
    if (!this.form.reportValidity()) return;
    const options = { time_limit_s: Number(this.field("ask_seconds").value) };
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
