// The form at the left: a problem from a preset or a file, varied by sliders, to be solved.

import { byId, later } from "./dom.js";
import { choiceField, numberField } from "./controls.js";
import { clearFault, guarded } from "./faults.js";
import { askJson } from "./http.js";
import { amend, go } from "./link.js";
import { Preset } from "./preset.js";
import { Sliders } from "./sliders.js";

const PAUSE_MS = 150;
const SWEPT = [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2];
const OPTIONS = ["time_limit_s", "method", "objective"];

/** The form; tells `onProblem` whenever there is another problem, as the service describes it. */
export class Compose {
  constructor(onProblem) {
    this.onProblem = onProblem;
    this.view = null;
    this.file = null;
    this.asked = 0;
    const changed = later(guarded(() => this.refresh(), "form"), PAUSE_MS);
    this.changed = () => { this.markStale(); changed(); };
    this.preset = new Preset(this.changed);
    this.sliders = new Sliders(this.changed);
    this.listen();
  }

  /** Ask the service what there is to choose, and show the form. */
  async load() {
    const { methods } = await askJson("v1/methods");
    byId("options").append(
      numberField("time_limit_s", "Seconds", 30, { min: 1, max: 3600, step: 1 }),
      choiceField("method", "Method", methods.map(({ name }) => name), "auto"),
      choiceField("objective", "Objective", ["makespan", "span"], "makespan",
        { onchange: this.changed }));
    await this.preset.load();
    this.isLoaded = true;
    for (const id of ["solve", "sweep"]) byId(id).disabled = false;
  }

  listen() {
    const form = byId("compose");
    form.addEventListener("submit", guarded(async (event) => {
      event.preventDefault();
      await this.solve();
    }, "form"));
    for (const input of form.querySelectorAll("[name=source]")) {
      input.addEventListener("change", () => { this.showSource(); this.changed(); });
    }
    byId("neutral").addEventListener("click", () => { this.sliders.values = {}; this.changed(); });
    byId("sweep").addEventListener("click", guarded(() => this.sweep(), "form"));
  }

  get source() {
    return document.querySelector("[name=source]:checked").value;
  }

  set source(name) {
    document.querySelector(`[name=source][value=${name}]`).checked = true;
    this.showSource();
  }

  showSource() {
    byId("preset").hidden = this.source !== "preset";
    byId("file").hidden = this.source !== "file";
  }

  /** Take a problem from a file, a job or a paste; `name` says to people which. */
  async use(problem, name) {
    this.file = { problem, name };
    if (problem.objective) this.option("objective").value = problem.objective;
    byId("file-name").textContent = name;
    this.source = "file";
    await this.refresh();
  }

  /** Take everything from an address, and make its problem. */
  async restore(told) {
    const pick = (names) => Object.fromEntries(
      names.filter((name) => name in told).map((name) => [name, told[name]]));
    this.preset.state = pick(Preset.names);
    this.sliders.values = pick(Sliders.names);
    for (const name of OPTIONS) if (name in told) this.option(name).value = told[name];
    this.source = "preset";
    await this.refresh();
  }

  option(name) {
    return byId("options").querySelector(`[name=${name}]`);
  }

  /** What an address says of the form. */
  get state() {
    const options = Object.fromEntries(OPTIONS.map((name) => [name, this.option(name).value]));
    // A file cannot stand in an address; its problem is found again by the job that solved it.
    if (this.source === "file" || this.preset.config) return options;
    return { ...this.preset.state, ...this.sliders.values, ...options };
  }

  /** The problem that is known is not the one that the form describes. */
  markStale() {
    byId("compose").dataset.stale = "yes";
  }

  /** Return the problem that the form describes, also where the last change is not through yet. */
  async problem() {
    if (byId("compose").dataset.stale) await this.refresh();
    if (byId("compose").dataset.stale) {
      throw Object.assign(new Error("There is no problem yet; choose a model or a problem file."),
        { code: "form.empty" });
    }
    return this.view.problem;
  }

  /** Have the service make the problem that the form describes. */
  async refresh() {
    const turn = ++this.asked;
    this.markStale();
    const view = await this.ask();
    if (turn !== this.asked || view === null) return;
    clearFault("form");
    this.view = view;
    delete byId("compose").dataset.stale;
    this.onProblem(view, this.state);
  }

  async ask() {
    const values = this.sliders.values;
    if (this.source === "file") {
      if (!this.file) return null;
      const problem = { ...this.file.problem, objective: this.option("objective").value };
      const view = await askJson("v1/variants", { json: { problem, values } });
      this.sliders.show(this.unvaried(view.problem, values, problem), view.axes, false);
      return view;
    }
    if (!this.preset.isValid) {
      byId("compose").reportValidity();
      return null;
    }
    const objective = this.option("objective").value;
    const asked = objective === "makespan" ? values : { ...values, objective };
    const view = await askJson("v1/estimates", { json: { ...this.preset.body, values: asked } });
    this.sliders.show(this.unvaried(view.problem, values, view.problem), view.axes, true);
    return view;
  }

  /** The problem with the factors of the sliders taken out again: what they are factors of. */
  unvaried(problem, values, { num_microbatches }) {
    const { memory_scale = 1, pcie_scale = 1, link_scale = 1 } = values;
    const over = (value, factor) => (value === null ? null : value / factor);
    return {
      num_microbatches,
      devices: problem.devices.map((device) => ({
        memory_bytes: device.memory_bytes / memory_scale,
        d2h_gb_per_s: over(device.d2h_gb_per_s, pcie_scale),
      })),
      links: problem.links.map((link) => ({
        latency_ms: link.latency_ms,
        bandwidth_gb_per_s: over(link.bandwidth_gb_per_s, link_scale),
      })),
    };
  }

  get options() {
    return {
      time_limit_s: Number(this.option("time_limit_s").value),
      method: this.option("method").value,
    };
  }

  /** Submit the problem and go to its job. */
  async solve() {
    const problem = await this.problem();
    const job = await askJson("v1/jobs", { json: { problem, options: this.options, tags: ["page"] } });
    clearFault("form");
    go({ ...this.state, job: job.id });
  }

  /** Submit the problem under many memory limits and go to the batch. */
  async sweep() {
    const problem = await this.problem();
    const batch = await askJson("v1/batches", { json: {
      problem, axes: { memory_scale: SWEPT }, options: this.options, tags: ["page"] } });
    clearFault("form");
    go({ ...this.state, batch: batch.id });
  }

  /** Say in the address what the form says. */
  tellAddress() {
    const gone = [...Preset.names, ...Sliders.names, ...OPTIONS].map((name) => [name, null]);
    amend({ ...Object.fromEntries(gone), ...this.state });
  }

  /** Whether an address says something else than the form. */
  differs(told) {
    const { state } = this;
    return Object.entries(told).some(([name, value]) => name in state && String(state[name]) !== value);
  }
}

