// The request for the fastest configuration: the form's degrees are those of the current run.

import { namesOf, pick, valuesOf } from "./controls.js";
import { byId } from "./dom.js";
import { clearFault, guarded } from "./faults.js";
import { askJson } from "./http.js";
import { go } from "./link.js";

/** Titles of the frameworks, where they differ from the names. */
export const FRAMEWORKS = { megatron: "Megatron-Core", huggingface: "Hugging Face" };
/** The fields: name, short label, and what differs on purpose from the request. */
export const TUNE = [
  ["num_gpus", "GPUs"], ["global_batch", "Batch", { start: "" }],
  ["framework", "Framework", { texts: FRAMEWORKS }],
  ["measured_step_s", "Step today, s", { placeholder: "estimated" }],
];
const NAMES = namesOf(TUNE);
const SHARED = ["model", "config", "gpu", "sequence", "precision"];
const DEGREES = ["tp", "cp", "ep", "pp", "chunks", "micro_batch", "zero"];

/** The part of the form with the fields of a tune; `compose` is the form. */
export class TuneForm {
  constructor(compose) {
    this.compose = compose;
    byId("tune").addEventListener("click", guarded(() => this.submit(), "form"));
  }

  /** The request; numbers that are left out are those of the current run. */
  get question() {
    const { preset: { body }, fields, choices } = this.compose;
    return { ...pick(body, SHARED), current: pick(body, DEGREES),
      num_gpus: body.tp * body.cp * body.pp * body.dp,
      global_batch: body.micro_batch * body.num_microbatches * body.dp,
      ...valuesOf(fields.tune, pick(choices, NAMES)) };
  }

  /** Fill the form from a request; `current` has the degrees of the current run. */
  async show(question, current) {
    const { preset, fields } = this.compose;
    const degrees = Object.fromEntries(DEGREES.map((name) => [name, current[name] ?? fields.current[name].default]));
    const dp = Math.max(1, Math.round(question.num_gpus / (degrees.tp * degrees.cp * degrees.pp)));
    const num_microbatches = Math.max(1, Math.round(question.global_batch / (dp * degrees.micro_batch)));
    const { model, gpu, sequence, precision } = question;
    preset.use(question.config ?? null, "the config.json of this question");
    preset.state = { ...(model ? { model } : {}), gpu, sequence, precision, ...degrees, dp, num_microbatches };
    this.compose.sliders.values = {};
    for (const name of NAMES) this.compose.option(name).value = question[name] ?? "";
    this.compose.source = "preset";
    await this.compose.refresh();
  }

  /** Show the current run and what is searched; hide all of it for a problem from a file. */
  describe() {
    const { compose } = this;
    byId("tune-part").hidden = compose.source !== "preset";
    if (!compose.preset.isValid) return;
    const { num_gpus: gpus, global_batch: batch, current } = this.question;
    compose.option("num_gpus").placeholder = gpus;
    compose.option("global_batch").placeholder = batch;
    const degrees = DEGREES.filter((name) => name !== "zero" && current[name] > 1)
      .map((name) => `${name.replace("_", "-")} ${current[name]}`);
    byId("tune-today").textContent = `Today: ${degrees.join(", ") || "no parallelism"}, as above. `
      + `Searched: every other way to train it on ${gpus} GPUs.`;
  }

  /** Submit the request and go to its job. */
  async submit() {
    const { compose } = this;
    if (!byId("compose").reportValidity()) return;
    const options = { time_limit_s: compose.options.time_limit_s };
    const job = await askJson("v1/tunes", { json: { ...this.question, options, tags: ["page"] } });
    clearFault("form");
    compose.leave();
    go({ ...compose.state, job: job.id });
  }
}
