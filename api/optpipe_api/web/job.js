// The page of an answer: its question, its numbers as they come, its schedule, what can be done next.

import { titles } from "./catalogue.js";
import { BUBBLE, Chart, onTheme } from "./chart.js";
import { announce, el, later } from "./dom.js";
import { showFault } from "./faults.js";
import { msUnit, share, stateWord } from "./format.js";
import { ask, askJson, events } from "./http.js";
import { besideField, comparisonTable, downloads, factsOf, OPTIMAL_GAP, setBeside, tellActions, why } from "./job_parts.js";
import { address, amend, amendZoom } from "./link.js";
import { Progress } from "./progress.js";
import { Question } from "./question.js";
import { Tuned } from "./tuned.js";
import { WhatIf } from "./what_if.js";

const FINAL = ["succeeded", "infeasible", "failed", "cancelled"];
const SAY_MS = 1000;
/** Shows one job until it is closed. */
export class JobView {
  constructor(id, told) {
    this.path = `v1/jobs/${encodeURIComponent(id)}`;
    this.id = id;
    // Files are not in the address: a reload shows the schedule alone.
    this.beside = told.beside === "files" ? "" : told.beside ?? "";
    this.isBesideChosen = told.beside !== undefined;
    this.row = told.row ?? "";
    this.stop = new AbortController();
    this.chart = new Chart("Schedule: lanes of every device, and memory, over time",
      { onZoom: later((zoom) => this.isOpen && amendZoom(zoom), 200),
        onDrawn: () => this.isOpen && this.tell() });
    const zoom = { start: Number(told.from), end: Number(told.to) };
    if (told.from !== undefined && zoom.end > zoom.start) this.chart.zoom = zoom;
    this.progress = new Progress();
    this.say = later(() => announce(this.sentence()), SAY_MS);
    this.place = el("div", { id: "job", "data-id": id });
    this.head = el("div", { class: "head" });
    this.facts = el("dl", { class: "facts strong" });
    this.acts = el("div", { class: "buttons" });
    this.rows = el("section", { id: "comparison", "aria-label": "Comparison" });
    this.why = el("section", { id: "why", hidden: true });
    this.question = new Question(this);
    this.tuned = new Tuned(this);
    this.whatIf = new WhatIf(this, told.what_if);
    // Of a job that there is not there is nothing to repaint.
    onTheme(() => this.isOpen && this.job && this.repaint());
  }

  get isOpen() { return !this.stop.signal.aborted; }

  get isFinal() { return FINAL.includes(this.job.state); }

  get isComparison() { return this.job.kind === "compare"; }

  get isTune() { return this.job.kind === "tune"; }

  get isProven() { return this.job.gap !== null && this.job.gap <= OPTIMAL_GAP; }

  /** Whether it has ended and will never have a schedule. */
  get isVain() { return this.isFinal && !this.job.has_schedule && !this.isComparison; }

  /** Whether the chart shows an older schedule than the job's. */
  get isBehind() {
    return this.chart.number > 0 && this.chart.number < this.job.num_schedules && !this.chart.isBroken;
  }

  /** Objective and gap of the schedule that is seen; of the job's where there is no picture. */
  get seen() {
    const { job, chart } = this;
    if (this.isComparison || this.isTune || chart.isBroken || chart.objective === undefined) return job;
    const objective_ms = chart.objective;
    const gap = job.bound_ms === null ? null
      : objective_ms > 0 ? Math.max(0, 1 - job.bound_ms / objective_ms) : 0;
    return { objective_ms, gap };
  }

  /** Show it and follow it; returns when it is shown. */
  async open(host) {
    [this.job, this.titleOf] = await Promise.all([askJson(this.path), titles()]);
    this.place.append(this.head, this.question.element, ...(this.isTune ? [this.tuned.gain] : []), this.facts);
    if (this.isTune) this.place.append(this.tuned.element);
    if (this.isComparison) this.place.append(this.rows);
    else {
      this.ofSchedule = [
        el("section", { id: "schedule" }, el("h2", {}, "Schedule"),
          el("div", { class: "bar" }, besideField(this, (beside) => this.compare(beside)),
            this.chart.buttons(), downloads(this)),
          this.chart.element, el("p", { class: "hint", id: "bubble" }, BUBBLE)),
        el("section", {}, el("h2", {}, "While solving"), this.progress.element)];
      // The questions of a what-if are about one problem, not about a whole step.
      this.place.append(...this.ofSchedule, this.why,
        ...(this.isTune ? [this.tuned.next] : [this.whatIf.element]));
    }
    host.replaceChildren(this.place);
    this.tell();
    this.refreshChart();
    this.follow().catch(showFault);
    if (!this.isTune) await this.question.showProblem();
  }

  /** Take in what happens, until the job has ended. */
  async follow() {
    for await (const { type, data } of events(`${this.path}/events`, this.stop.signal)) {
      if (type === "state") await this.reload();
      if (type === "incumbent" || type === "bound") this.improve(data);
      if (type === "log") this.tuned.say(data.text);
    }
    await this.reload();
    if (this.isComparison && this.job.state === "succeeded") {
      const { rows } = await askJson(`${this.path}/comparison`, { signal: this.stop.signal });
      this.rows.replaceChildren(comparisonTable(rows, this.titleOf));
    }
    if (this.isComparison) return;
    this.tuned.show().catch(showFault);
    const title = this.isTune ? "Why the fastest takes as long as it does" : "Why";
    if (this.job.has_schedule) await why(this.why, `${this.path}/explanation`, title, this.stop.signal);
    if (!this.isTune) await this.whatIf.ended();
  }

  improve(data) {
    const { job } = this;
    job.objective_ms = data.objective_ms ?? job.objective_ms;
    job.bound_ms = data.bound_ms ?? job.bound_ms;
    job.gap = data.gap ?? job.gap;
    job.has_schedule ||= data.kind === "incumbent";
    this.progress.add(data);
    if (data.objective_ms > 0 || data.bound_ms > 0) this.drawing ??= this.progress.draw().catch(showFault);
    this.tell();
    if (data.kind === "incumbent") this.tuned.show().catch(showFault);
    // Of an ended job they are history: its chart shows the last one already.
    if (data.kind === "incumbent" && !this.isFinal) this.refreshChart();
  }

  async reload() {
    const before = this.job.num_schedules;
    this.job = await askJson(this.path, { signal: this.stop.signal });
    this.tell();
    if (this.job.num_schedules !== before || this.isBehind) this.refreshChart();
  }

  refreshChart() {
    if (!this.job.has_schedule || !this.isOpen) return;
    const isFiles = this.beside === "files", isItself = this.beside === `row:${this.row}`;
    const path = isFiles
      ? `v1/charts${address({ job: this.id, row: this.row })}`
      : `${this.path}/chart${address({ row: this.row, beside: isItself ? "" : this.beside })}`;
    this.chart.show(path, isFiles ? { files: this.files } : undefined).catch((error) => {
      showFault(error);
      if (!this.chart.drawn) this.chart.say("There is no picture of it; the schedule can be saved.");
    });
  }

  /** Show opened files next to the schedule: what was measured, or another schedule of the problem. */
  showFiles(files) {
    this.files = files;
    setBeside(this.place.querySelector("#beside"), "files", files);
    this.isBesideChosen = true;
    this.beside = "files";
    this.refreshChart();
    this.chart.element.scrollIntoView({ block: "center" });
  }

  /** Show the schedule of another row of a tune; "" is the fastest. */
  showRow(id) {
    this.row = id;
    amend({ row: id });
    this.refreshChart();
  }

  /** Show the schedule of the current run next to it, unless another one was chosen. */
  besideToday(id) {
    if (this.isBesideChosen) return;
    this.isBesideChosen = true;
    this.beside = `row:${id}`;
    setBeside(this.place.querySelector("#beside"), this.beside);
    this.refreshChart();
  }

  async compare(beside) {
    this.isBesideChosen = true;
    this.beside = beside;
    amend({ beside });
    this.refreshChart();
  }

  repaint() {
    this.refreshChart();
    this.progress.redraw().catch(showFault);
  }

  sentence() {
    const { job } = this;
    const { objective_ms, gap: known } = this.seen;
    const gap = known === null ? "" : `, gap ${share(known)}`;
    if (this.isComparison) return `${stateWord(job)}: a comparison of all methods`;
    return job.has_schedule
      ? `${stateWord(job)}: ${job.objective} ${msUnit(objective_ms)}${gap}`
      : `${stateWord(job)}: no schedule yet`;
  }

  tell() {
    const { job } = this;
    // An end is told together with its schedule: head and chart are of one version.
    if (this.isFinal && this.isBehind) return;
    for (const part of this.ofSchedule ?? []) part.hidden = this.isVain;
    if (job.has_schedule && !this.chart.drawn && !this.chart.isBroken) this.chart.say("Drawing the schedule.");
    Object.assign(this.place.dataset, { state: job.state, schedules: job.num_schedules });
    this.head.replaceChildren(
      el("h1", {}, job.name || "Unnamed problem"),
      el("span", { class: `state ${job.state}` }, stateWord(job)), this.acts);
    this.facts.replaceChildren(...factsOf(this));
    tellActions(this, this.acts);
    this.say();
  }

  async cancel() {
    this.job = await (await ask(`${this.path}/cancel`, { method: "POST" })).json();
    this.tell();
  }

  async resume() {
    const more = Number(this.seconds.value);
    this.job = await askJson(`${this.path}/resume`, { json: { time_limit_s: more } });
    this.tell();
    await this.followAgain();
  }

  async followAgain() {
    this.whatIf.pause();
    this.stop.abort();
    this.stop = new AbortController();
    this.progress.close();
    this.progress.points = [];
    this.drawing = null;
    this.follow().catch(showFault);
  }

  close() {
    this.stop.abort();
    this.chart.close();
    this.progress.close();
  }
}
