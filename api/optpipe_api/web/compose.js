// The form at the left: a problem from a preset or a file, varied by sliders, to be solved.

import { catalogue, methods } from "./catalogue.js";
import { controls, namesOf, pick, valuesOf } from "./controls.js";
import { byId, later } from "./dom.js";
import { clearFault, guarded, lastFault } from "./faults.js";
import { askJson } from "./http.js";
import { amend, go, inAddress, packed, unpacked } from "./link.js";
import { Preset } from "./preset.js";
import { Sliders, unvaried } from "./sliders.js";

const PAUSE_MS = 150;
const SWEPT = [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2];
/** The options of a job: name, short label, and what differs on purpose from the request. */
export const SOLVE = [
  ["time_limit_s", "Seconds", { start: 30, max: 3600 }], ["method", "Method"],
  ["objective", "Objective", { start: "makespan" }],
];
const OPTIONS = namesOf(SOLVE);
/** The names under which the form is in an address. */
export const FORM_NAMES = [...Preset.names, ...Sliders.axes, ...OPTIONS];

/** The form; calls `onProblem` with each new problem, as the service describes it. */
export class Compose {
  constructor(onProblem) {
    this.onProblem = onProblem;
    this.view = null;
    this.file = null;
    this.turn = 0;
    this.addressTurn = 0;
    this.soon = later(guarded(() => this.refresh(), "form"), PAUSE_MS);
    this.changed = () => { byId("compose").dataset.stale = "yes"; this.soon(); };
    this.preset = new Preset(this.changed);
    this.sliders = new Sliders(this.changed);
    this.listen();
  }

  /** Make the form, once, from the fields, models, GPUs and methods that the service has. */
  load() { return (this.loading ??= this.make()); }

  async make() {
    const [{ fields }, known] = await Promise.all([catalogue(), methods(), this.preset.load()]);
    this.fields = fields;
    byId("options").append(...controls(fields.solve, SOLVE, {
      method: { choices: known.map(({ name, title }) => [name, title]) },
      objective: { onchange: this.changed } }));
    const canSubmit = document.body.dataset.role !== "read";
    for (const id of ["solve", "sweep", "compare"]) byId(id).disabled = !canSubmit;
    byId("role-hint").hidden = canSubmit;
  }

  listen() {
    const form = byId("compose");
    form.addEventListener("submit", guarded((event) => {
      event.preventDefault();
      return this.solve();
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
  }

  /** Take a problem from a file or a paste; `name` is shown. */
  async use(problem, name) {
    this.take(problem, name);
    await this.refresh();
  }

  /** Take a problem; `jobId`: the job that has it. */
  take(problem, name, jobId = null) {
    this.file = { problem, name, jobId };
    if (problem.objective) this.option("objective").value = problem.objective;
    byId("file-name").textContent = name;
    this.source = "file";
  }

  /** Show the form that an address describes; one that describes none leaves the form as it is. */
  async open(query) {
    await this.load();
    if (!this.view || this.differs(query)) await this.restore(query);
    else await this.writeAddress();
  }

  /** Fill the form from an address; from a damaged one as at a first visit, and show the error. */
  async restore(query) {
    try {
      await this.fill(query);
    } catch (error) {
      if (error.code !== "link.broken") throw error;
      history.replaceState(null, "", location.search || "?view=schedule");
      await this.fill(query);
      throw error;
    }
  }

  async fill(query) {
    const fragment = inAddress(), jobId = query.problem ?? null;
    const { problem, config, name } = fragment ? await unpacked(fragment)
      : jobId ? { problem: await askJson(`v1/jobs/${jobId}/problem`), name: "The problem of the answer." } : {};
    this.fragment = fragment;
    if (problem) {
      this.take(problem, name ?? "The problem of this link.", jobId);
      this.sliders.values = pick(query, Sliders.axes);
    } else {
      this.preset.use(config ?? null, name ?? "config.json");
      this.preset.state = pick(query, Preset.names);
      this.sliders.values = pick(query, Sliders.names);
      this.source = "preset";
    }
    for (const [name, text] of Object.entries(pick(query, OPTIONS))) this.option(name).value = text;
    await this.refresh();
  }

  option(name) { return byId("compose").querySelector(`[name=${name}]`); }
  /** The texts of the form in an address; a problem or config without a name is not among them. */
  get state() {
    if (this.unnamed) return this.choices;
    return { ...this.preset.state, ...this.sliders.values, ...this.choices };
  }

  get choices() { return Object.fromEntries(OPTIONS.map((name) => [name, this.option(name).value])); }

  /** The problem or config that has no name: the fragment of the address holds it. */
  get unnamed() {
    if (this.source === "file") {
      return this.file && { problem: this.file.problem, name: this.file.name };
    }
    const { config, name } = this.preset;
    return config && { config, name };
  }

  /** The job whose problem the form has. */
  get jobId() { return this.source === "file" ? this.file?.jobId ?? null : null; }

  /** Return the problem that the form describes; makes it first if the form has changed. */
  async problem() {
    if (byId("compose").dataset.stale) await this.refresh();
    if (byId("compose").dataset.stale) {
      throw Object.assign(new Error("There is no problem yet; choose a model or a problem file."),
        { code: "form.empty" });
    }
    return this.view.problem;
  }

  /** Request the problem that the form describes; only the answer to the last request counts. */
  async refresh() {
    this.soon.cancel();
    const [turn, known] = [++this.turn, lastFault()];
    const isLast = () => turn === this.turn;
    byId("compose").dataset.stale = "yes";
    const answer = await this.request().catch((error) => { if (isLast()) throw error; });
    if (!answer || !isLast()) return;
    const { view, sliders } = answer;
    clearFault("form", known);
    this.sliders.show(...sliders);
    this.view = view;
    delete byId("compose").dataset.stale;
    this.onProblem(view, this.state);
  }

  /** Return the problem as the service describes it, and the arguments of `sliders.show`. */
  async request() {
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
    const axes = objective === "makespan" ? values : { ...values, objective };
    const view = await askJson("v1/estimates", { json: { ...this.preset.body, values: axes } });
    return { view, sliders: [unvaried(view.problem, values, view.problem), view.axes, true] };
  }

  get options() {
    const { time_limit_s, method } = this.choices;
    return valuesOf(this.fields.solve, { time_limit_s, method });
  }

  /** Submit the problem alone, under many memory limits, or to every method; go to the result. */
  solve() { return this.submit("v1/jobs", { options: this.options }, "job"); }

  sweep() {
    return this.submit("v1/batches", { axes: { memory_scale: SWEPT }, options: this.options }, "batch");
  }

  compare() {
    const { time_limit_s } = this.options;
    return this.submit("v1/compare", { options: { time_limit_s } }, "job");
  }

  async submit(path, body, kind) {
    const problem = await this.problem();
    const { id } = await askJson(path, { json: { problem, ...body, tags: ["page"] } });
    clearFault("form");
    // The address of the answer has no fragment: the job or the batch has the problem.
    this.addressTurn += 1;
    byId("link-hint").hidden = true;
    go({ ...this.state, [kind]: id });
  }

  /** Write the form into the address. */
  async writeAddress() {
    const turn = ++this.addressTurn;
    const { unnamed } = this;
    const fragment = unnamed && !this.jobId ? await packed(unnamed) : "";
    if (turn !== this.addressTurn || document.body.dataset.view !== "form") return;
    byId("link-hint").hidden = fragment !== null;
    this.fragment = fragment ?? "";
    const cleared = FORM_NAMES.map((name) => [name, null]);
    // The texts of an unnamed problem or config are of use only with its fragment or its job.
    const preset = this.source === "file" ? {} : this.preset.state;
    const texts = this.fragment || this.jobId
      ? { ...preset, model: null, ...this.sliders.values, ...this.choices } : this.state;
    amend({ ...Object.fromEntries(cleared), view: "schedule", ...texts, problem: this.jobId }, this.fragment);
  }

  /** Whether an address describes another form than this one. */
  differs(query) {
    if (inAddress()) return inAddress() !== this.fragment;
    if (query.problem) return query.problem !== this.jobId;
    if (!query.model || this.unnamed) return Boolean(query.model);
    const { state } = this;
    return Object.entries(query).some(([name, text]) => name in state && String(state[name]) !== text);
  }
}
