// A problem from a model's name and an accelerator's: the form; the service estimates.

import { byId, el } from "./dom.js";
import { bytes } from "./format.js";
import { askJson } from "./http.js";
import { choiceField, numberField } from "./controls.js";

const NUMBERS = ["pp", "tp", "sequence", "micro_batch", "num_microbatches", "chunks", "cp", "ep",
  "dp", "zero", "modes", "slices"];
const FIRST = { model: "llama3-8b", gpu: "h100", pp: 4, tp: 1, sequence: 4096, micro_batch: 1,
  num_microbatches: 16, chunks: 1, placement: "", precision: "bf16", cp: 1, ep: 1, dp: 1, zero: 1,
  modes: 0, slices: 1, pairs: "" };

/** The form; `body` is what `/v1/estimates` takes. */
export class Preset {
  constructor(onChange) {
    this.place = byId("preset");
    this.config = null;
    this.name = "";
    this.place.addEventListener("input", (event) => {
      if (event.target.name === "num_microbatches") byId("microbatches").value = event.target.value;
      onChange();
    });
  }

  /** Ask the service what there is, and show the form. */
  async load() {
    const { models, gpus, placements, precisions } = await askJson("v1/presets");
    const gpuChoices = gpus.map((gpu) => [gpu.name, `${gpu.name} · ${bytes(gpu.memory_bytes)}`]);
    const placementChoices = [["", "usual"], ...placements.map((name) => [name, name])];
    this.place.replaceChildren(
      el("div", { class: "fields" },
        choiceField("model", "Model", models.map(({ name }) => name), FIRST.model),
        choiceField("gpu", "GPU", gpuChoices, FIRST.gpu)),
      el("p", { class: "hint", id: "config-name", hidden: true }),
      this.microbatches(),
      el("div", { class: "fields three" },
        numberField("pp", "Devices (pp)", FIRST.pp, { max: 1024 }),
        numberField("tp", "Tensor (tp)", FIRST.tp),
        numberField("chunks", "Chunks", FIRST.chunks, { max: 8, title: "Stages per device" }),
        choiceField("placement", "Placement", placementChoices, FIRST.placement),
        numberField("sequence", "Sequence", FIRST.sequence, { title: "Tokens" }),
        numberField("micro_batch", "Micro-batch", FIRST.micro_batch, { title: "Sequences" })),
      el("details", {},
        el("summary", {}, "More"),
        el("div", { class: "fields three" },
          numberField("cp", "Context (cp)", FIRST.cp),
          numberField("ep", "Expert (ep)", FIRST.ep),
          numberField("dp", "Data (dp)", FIRST.dp),
          choiceField("precision", "Precision", precisions, FIRST.precision),
          choiceField("zero", "ZeRO", [0, 1, 2, 3], FIRST.zero),
          numberField("modes", "Modes", FIRST.modes, { min: 0, max: 64,
            title: "Most modes per stage: what of it is kept, offloaded, recomputed; 0: the whole" }),
          numberField("slices", "Slices", FIRST.slices, { max: 256,
            title: "Slices of each sequence, each a micro-batch" }),
          choiceField("pairs", "Pairs", [["", "none"], ["any", "F with B"]], FIRST.pairs,
            { title: "Forwards and backwards may run together: experts' exchange is hidden" }))));
  }

  /** Micro-batches as a slider, and as a number beyond where it ends. */
  microbatches() {
    const value = FIRST.num_microbatches;
    return el("div", { class: "slider" },
      el("label", { for: "microbatches-number" }, "Micro-batches"),
      el("input", { type: "number", name: "num_microbatches", id: "microbatches-number", min: 1,
        step: 1, required: true, value }),
      el("input", { type: "range", id: "microbatches", min: 1, max: 128, value,
        "aria-label": "Micro-batches",
        oninput: (event) => this.setNumber("num_microbatches", event.target.value) }));
  }

  field(name) {
    return this.place.querySelector(`[name="${name}"]`);
  }

  setNumber(name, value) {
    this.field(name).value = value;
  }

  /** Whether every field holds something that may be sent. */
  get isValid() {
    return [...this.place.querySelectorAll("input, select")].every((field) => field.checkValidity());
  }

  get body() {
    const { model, placement, pairs, ...rest } = this.state;
    const asked = { ...rest, pairs: Boolean(pairs) };
    for (const name of NUMBERS) asked[name] = Number(rest[name]);
    if (placement) asked.placement = placement;
    return this.config ? { ...asked, config: this.config } : { ...asked, model };
  }

  /** The fields as texts, as they stand in an address. */
  get state() {
    return Object.fromEntries(Object.keys(FIRST).map((name) => [name, this.field(name).value]));
  }

  set state(told) {
    for (const [name, value] of Object.entries({ ...FIRST, ...told })) {
      const field = this.field(name);
      if (field) field.value = value;
    }
    byId("microbatches").value = this.field("num_microbatches").value;
  }

  /** The names under which `state` stands in an address. */
  static get names() {
    return Object.keys(FIRST);
  }

  /** Take the shape of a Hugging Face config.json instead of a model of the catalogue. */
  use(config, name) {
    this.config = config;
    this.name = name;
    const told = byId("config-name");
    told.textContent = config ? `Model: ${name}` : "";
    told.hidden = !config;
    this.field("model").disabled = Boolean(config);
  }
}
