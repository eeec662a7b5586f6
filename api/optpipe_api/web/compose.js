// The form at the left: a problem from a preset or a file, varied by sliders, to be solved.

import { choiceField, numberField } from "./controls.js";
import { byId, later } from "./dom.js";
import { clearFault, guarded, lastFault } from "./faults.js";
import { inAddress, packed, unpacked } from "./fragment.js";
import { askJson } from "./http.js";
import { amend, go } from "./link.js";
import { methods } from "./methods.js";
import { Preset } from "./preset.js";
import { Sliders } from "./sliders.js";
import { TUNED, TuneForm } from "./tune.js";
import { unvaried } from "./unvaried.js";

const PAUSE_MS = 150;
const SWEPT = [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2];
const OPTIONS = ["time_limit_s", "method", "objective", ...TUNED];

/** The form; tells `onProblem` whenever there is another problem, as the service describes it. */
export class Compose {
  constructor(onProblem) {
    this.onProblem = onProblem;
    this.view = null;
    this.file = null;
    this.asked = 0;
    this.soon = later(guarded(() => this.refresh(), "form"), PAUSE_MS);
    this.changed = () => { this.markStale(); this.soon(); };
    this.preset = new Preset(this.changed);
    this.sliders = new Sliders(this.changed);
    this.tune = new TuneForm(this);
    this.listen();
  }

  /** Ask the service what there is to choose, and show the form. */
  async load() {
    const known = await methods();
    byId("options").append(
      numberField("time_limit_s", "Seconds", 30, { min: 1, max: 3600, step: 1 }),
      choiceField("method", "Method", known.map(({ name, title }) => [name, title]), "auto"),
      choiceField("objective", "Objective", ["makespan", "span"], "makespan",
        { onchange: this.changed }));
    await this.preset.load();
    this.isLoaded = true;
    const canSubmit = document.body.dataset.role !== "read";
    for (const id of ["solve", "sweep", "compare", "tune"]) byId(id).disabled = !canSubmit;
    byId("role-hint").hidden = canSubmit;
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
    byId("compare").addEventListener("click", guarded(() => this.compare(), "form"));
    byId("sweep").addEventListener("click", guarded(() => this.sweep(), "form"));
  }

  get source() { return document.querySelector("[name=source]:checked").value; }

  set source(name) {
    document.querySelector(`[name=source][value=${name}]`).checked = true;
    this.showSource();
  }

  showSource() {
    byId("preset").hidden = this.source !== "preset";
    byId("file").hidden = this.source !== "file";
    this.tune.tell();
  }

  /**
   * Take a problem from a file, a job or a paste; `name` says to people which, `isOfJob` whether the
   * job in the address leads to it.
   */
  async use(problem, name, { isOfJob = false } = {}) {
    this.take(problem, name, isOfJob);
    await this.refresh();
  }

  take(problem, name, isOfJob = false) {
    this.file = { problem, name, isOfJob };
    if (problem.objective) this.option("objective").value = problem.objective;
    byId("file-name").textContent = name;
    this.source = "file";
  }

  /** Take everything from an address, and make its problem. */
  async restore(told) {
    const pick = (names) => Object.fromEntries(
      names.filter((name) => name in told).map((name) => [name, told[name]]));
    const fragment = inAddress();
    const { problem, config, name } = fragment ? await unpacked(fragment) : {};
    this.fragment = fragment;
    if (problem) {
      this.take(problem, name ?? "The problem of this link.");
      this.sliders.values = pick(Sliders.axes);
    } else {
      this.preset.use(config ?? null, name ?? "config.json");
      this.preset.state = pick(Preset.names);
      this.sliders.values = pick(Sliders.names);
      this.source = "preset";
    }
    for (const option of OPTIONS) if (option in told) this.option(option).value = told[option];
    await this.refresh();
  }

  option(name) {
    return byId("compose").querySelector(`[name=${name}]`);
  }

  /** What an address says of the form where a job, a batch or nothing leads to what has no name. */
  get state() {
    if (this.unnamed) return this.choices;
    return { ...this.preset.state, ...this.sliders.values, ...this.choices };
  }

  get choices() {
    return Object.fromEntries(OPTIONS.map((name) => [name, this.option(name).value]));
  }

  /** What the problem is made of that has no name: it stands in the fragment of the address. */
  get unnamed() {
    if (this.source === "file") {
      return this.file && { problem: this.file.problem, name: this.file.name };
    }
    const { config, name } = this.preset;
    return config && { config, name };
  }

  get besideUnnamed() {
    const { model, ...preset } = this.source === "file" ? {} : this.preset.state;
    return { ...preset, ...this.sliders.values, ...this.choices };
  }

  /** Whether the job in the address leads to the problem of the form. */
  get isOfJob() {
    return this.source === "file" && (!this.file
      || (this.file.isOfJob && Object.keys(this.sliders.values).length === 0));
  }

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

  /** Have the service make the problem that the form describes; the last to ask is answered. */
  async refresh() {
    this.soon.cancel();
    const [turn, known] = [++this.asked, lastFault()];
    const isLast = () => turn === this.asked;
    this.markStale();
    const answer = await this.ask().catch((error) => { if (isLast()) throw error; });
    if (!answer || !isLast()) return;
    const { view, sliders } = answer;
    clearFault("form", known);
    this.sliders.show(...sliders);
    this.view = view;
    this.tune.tell();
    delete byId("compose").dataset.stale;
    this.onProblem(view, this.state);
  }

  /** Return the problem as the service describes it, and what the sliders show of it. */
  async ask() {
    const values = this.sliders.values;
    if (this.source === "file") {
      if (!this.file) return null;
      const problem = { ...this.file.problem, objective: this.option("objective").value };
      const view = await askJson("v1/variants", { json: { problem, values } });
      return { view, sliders: [unvaried(view.problem, values, problem), view.axes, false] };
    }
    if (!this.preset.isValid) {
      byId("compose").reportValidity();
      return null;
    }
    const objective = this.option("objective").value;
    const asked = objective === "makespan" ? values : { ...values, objective };
    const view = await askJson("v1/estimates", { json: { ...this.preset.body, values: asked } });
    return { view, sliders: [unvaried(view.problem, values, view.problem), view.axes, true] };
  }

  get options() {
    const { time_limit_s: seconds, method } = this.choices;
    return { time_limit_s: Number(seconds), method };
  }

  /** Submit the problem alone, under many memory limits, or to every method; go to what is made. */
  solve() {
    return this.submit("v1/jobs", { options: this.options }, "job");
  }

  sweep() {
    return this.submit("v1/batches", { axes: { memory_scale: SWEPT }, options: this.options }, "batch");
  }

  compare() {
    const { time_limit_s } = this.options;
    return this.submit("v1/compare", { options: { time_limit_s } }, "job");
  }

  async submit(path, asked, kind) {
    const problem = await this.problem();
    const { id } = await askJson(path, { json: { problem, ...asked, tags: ["page"] } });
    clearFault("form");
    this.leave();
    go({ ...this.state, [kind]: id });
  }

  /** From now on a job or a batch leads to the problem. */
  leave() {
    this.telling = (this.telling ?? 0) + 1;
    this.fragment = "";
    byId("link-hint").hidden = true;
  }

  /** Say in the address what the form says. */
  async tellAddress() {
    const turn = this.telling = (this.telling ?? 0) + 1;
    const { unnamed } = this;
    const fragment = unnamed && !this.isOfJob ? await packed(unnamed) : "";
    if (turn !== this.telling) return;
    byId("link-hint").hidden = fragment !== null;
    this.fragment = fragment ?? "";
    const gone = [...Preset.names, ...Sliders.axes, ...OPTIONS].map((name) => [name, null]);
    const said = this.fragment ? this.besideUnnamed : this.state;
    amend({ ...Object.fromEntries(gone), ...said }, this.fragment);
  }

  /** Whether an address that describes a form describes another one. */
  differs(told) {
    if (inAddress()) return inAddress() !== this.fragment;
    if (!told.model || this.unnamed) return Boolean(told.model);
    const { state } = this;
    return Object.entries(told).some(([name, it]) => name in state && String(state[name]) !== it);
  }
}
