// The question of which configuration is fastest: what the form says is what is run today.

import { choiceField, numberField } from "./controls.js";
import { byId } from "./dom.js";
import { clearFault, guarded } from "./faults.js";
import { askJson } from "./http.js";
import { go } from "./link.js";

const FRAMEWORKS = [["any", "any"], ["megatron", "Megatron-Core"], ["torchtitan", "torchtitan"]];
const SHARED = ["model", "config", "gpu", "sequence", "precision"];
const DEGREES = ["tp", "cp", "ep", "pp", "chunks", "micro_batch", "zero"];

/** The names of its fields, as they stand in an address. */
export const TUNED = ["num_gpus", "global_batch", "framework", "measured_step_s"];

/** The part of the form that asks; `compose` is the form. */
export class TuneForm {
  constructor(compose) {
    this.compose = compose;
    byId("tune").addEventListener("click", guarded(() => this.ask(), "form"));
    const optional = { required: false };
    byId("tune-fields").append(
      numberField("num_gpus", "GPUs", "", { ...optional, max: 131072 }),
      numberField("global_batch", "Batch", "", { ...optional, max: 1048576, title: "Sequences of a step" }),
      choiceField("framework", "Framework", FRAMEWORKS, "any"),
      numberField("measured_step_s", "Step today, s", "", { ...optional, min: 0.001, step: "any",
        placeholder: "estimated", title: "What you measured: it calibrates every time" }));
  }

  /** What is asked: the numbers that are left out are those of what is run today. */
  get question() {
    const { body } = this.compose.preset;
    const of = (names) => Object.fromEntries(names.map((name) => [name, body[name]]));
    const said = (name) => Number(this.compose.option(name).value);
    // What is undefined is not sent: model or config, and a step that nobody measured.
    return { ...of(SHARED), current: of(DEGREES),
      num_gpus: said("num_gpus") || body.tp * body.cp * body.pp * body.dp,
      global_batch: said("global_batch") || body.micro_batch * body.num_microbatches * body.dp,
      framework: this.compose.option("framework").value,
      measured_step_s: said("measured_step_s") || undefined };
  }

  /** Show a question that was asked; `current` has the degrees of what is run today. */
  async show(asked, current) {
    const { preset } = this.compose;
    const given = Object.fromEntries(DEGREES.map((name) => [name, current[name] ?? 1]));
    const dp = Math.max(1, Math.round(asked.num_gpus / (given.tp * given.cp * given.pp)));
    const num_microbatches = Math.max(1, Math.round(asked.global_batch / (dp * given.micro_batch)));
    const { model, gpu, sequence, precision } = asked;
    preset.use(asked.config ?? null, "the config.json of this question");
    preset.state = { ...(model ? { model } : {}), gpu, sequence, precision, ...given, dp, num_microbatches };
    this.compose.sliders.values = {};
    for (const name of TUNED) this.compose.option(name).value = asked[name] ?? "";
    this.compose.source = "preset";
    await this.compose.refresh();
  }

  /** Say what is asked; a problem of a file is of one configuration alone. */
  tell() {
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

  /** Submit the question and go to its job. */
  async ask() {
    const { compose } = this;
    if (!byId("compose").reportValidity()) return;
    const options = { time_limit_s: compose.options.time_limit_s };
    const job = await askJson("v1/tunes", { json: { ...this.question, options, tags: ["page"] } });
    clearFault("form");
    compose.leave();
    go({ ...compose.state, job: job.id });
  }
}
