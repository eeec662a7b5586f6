// The form of an estimate: a problem from a model and an accelerator, which the service estimates.

import { catalogue } from "./catalogue.js";
import { control, controls, namesOf, valuesOf } from "./controls.js";
import { byId, el } from "./dom.js";

/** The fields of each part: name, short label, and what differs on purpose from the request. */
export const ESTIMATE = {
  hardware: [["model", "Model", { start: "llama3-8b" }], ["gpu", "GPU", { start: "h100" }]],
  microbatches: [["num_microbatches", "Micro-batches", { id: "microbatches-number" }]],
  degrees: [
    ["pp", "Devices (pp)"], ["tp", "Tensor (tp)"], ["chunks", "Chunks"],
    ["placement", "Placement", { texts: { "": "usual" } }],
    ["sequence", "Sequence"], ["micro_batch", "Micro-batch"],
  ],
  more: [
    ["cp", "Context (cp)"], ["ep", "Expert (ep)"], ["dp", "Data (dp)", { start: 1 }],
    ["precision", "Precision"], ["zero", "ZeRO"], ["modes", "Modes"], ["slices", "Slices"],
    ["pairs", "Pairs", { texts: { false: "none", true: "F with B" } }],
  ],
};
const NAMES = namesOf(...Object.values(ESTIMATE));

/** The form; `body` is a request to `/v1/estimates`. */
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

  /** Make the form. */
  async load() {
    const { fields, choices } = await catalogue();
    this.fields = fields.estimate;
    const part = (name) => controls(this.fields, ESTIMATE[name], choices);
    this.place.replaceChildren(
      el("div", { class: "fields" }, part("hardware")),
      el("p", { class: "hint", id: "config-name", hidden: true }),
      this.microbatches(),
      el("div", { class: "fields three" }, part("degrees")),
      el("details", {}, el("summary", {}, "More"), el("div", { class: "fields three" }, part("more"))));
    this.start = this.state;
  }

  /** Return the number of micro-batches as a number, and as a slider over the first of them. */
  microbatches() {
    const [[name, label, own]] = ESTIMATE.microbatches;
    const number = control(this.fields[name], name, own);
    return el("div", { class: "slider" }, el("label", { for: number.id }, label), number,
      el("input", { type: "range", id: "microbatches", min: 1, max: 128, value: number.value,
        "aria-label": label, oninput: (event) => { number.value = event.target.value; } }));
  }

  field(name) {
    return this.place.querySelector(`[name="${name}"]`);
  }

  /** Whether every input has a value that may be sent. */
  get isValid() {
    return [...this.place.querySelectorAll("input, select")].every((input) => input.checkValidity());
  }

  get body() {
    const { model, ...values } = valuesOf(this.fields, this.state);
    return this.config ? { ...values, config: this.config } : { ...values, model };
  }

  /** The texts of the controls, as the address has them. */
  get state() {
    return Object.fromEntries(NAMES.map((name) => [name, this.field(name).value]));
  }

  set state(texts) {
    // Links of earlier versions have `any`.
    const pairs = texts.pairs === "any" ? { pairs: "true" } : {};
    for (const [name, text] of Object.entries({ ...this.start, ...texts, ...pairs })) {
      const input = this.field(name);
      if (input) input.value = text;
    }
    byId("microbatches").value = this.field("num_microbatches").value;
  }

  /** The names of `state` in an address. */
  static get names() {
    return NAMES;
  }

  /** Take the shape of a Hugging Face config.json instead of a model of the catalogue. */
  use(config, name) {
    this.config = config;
    this.name = name;
    const hint = byId("config-name");
    hint.textContent = config ? `Model: ${name}` : "";
    hint.hidden = !config;
    this.field("model").disabled = Boolean(config);
  }
}
