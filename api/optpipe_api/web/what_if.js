// What a job gains from a little more of something: a batch, started by a button, and its items as they end.

import { announce, button, el } from "./dom.js";
import { guarded, showFault } from "./faults.js";
import { ms, share } from "./format.js";
import { askJson, Fault } from "./http.js";
import { address, amend } from "./link.js";

const WAIT_S = 1;
const SECONDS = 20;
const SAME = 1e-6;
const ENDED = ["succeeded", "infeasible", "failed", "cancelled"];

/** The part of a job's view that asks, and shows what is found, until the view is closed. */
export class WhatIf {
  /** `batchId`: of what was asked before, as the address says it; or nothing. */
  constructor(view, batchId) {
    this.view = view;
    this.batchId = batchId;
    this.seconds = el("input", { type: "number", min: 1, value: SECONDS, required: true,
      "aria-label": "Seconds for each question" });
    this.button = button("Find out", guarded(() => this.start()), { id: "ask-what-if" });
    this.asking = el("p", { class: "buttons", "data-needs": "submit" },
      this.button, this.seconds, "s each");
    this.note = el("p", { class: "hint" });
    this.rows = el("div", {});
    // Who may only read sees it once there is something to see.
    this.element = el("section", { id: "what-if", hidden: true, "data-needs": "submit" },
      el("h2", {}, "What more memory, bandwidth or micro-batches gain"), this.asking, this.note, this.rows);
  }

  /** The job has ended: it can be asked about, and what was asked before is shown. */
  async ended() {
    if (!this.view.job.has_schedule) return;
    this.element.hidden = false;
    this.button.disabled = false;
    if (!this.batchId) return;
    try {
      await this.follow();
    } catch (error) {
      if (!(error instanceof Fault) || error.status !== 404) throw error;
      this.keep(null);
    }
  }

  /** The job goes on: nothing can be asked until it has ended. */
  pause() {
    this.button.disabled = true;
  }

  async start() {
    if (!this.seconds.reportValidity()) return;
    const options = { time_limit_s: Number(this.seconds.value) };
    this.button.disabled = true;
    try {
      const batch = await askJson("v1/batches", { json: { what_if: this.view.id, options } });
      this.keep(batch.id);
      this.tell(batch);
    } catch (error) {
      this.button.disabled = false;
      throw error;
    }
    this.follow(true).catch(showFault);
  }

  /** The address leads to what was asked last. */
  keep(batchId) {
    this.batchId = batchId;
    amend({ what_if: batchId });
  }

  /** Look again and again until all has ended; each time the service waits a little for that. */
  async follow(isNews = false) {
    const { signal } = this.view.stop;
    const path = `v1/batches/${this.batchId}`;
    let batch = await askJson(path, { signal });
    this.tell(batch);
    isNews ||= !batch.is_finished;
    while (!batch.is_finished && !signal.aborted) {
      batch = await askJson(`${path}?wait=${WAIT_S}`, { signal });
      this.tell(batch);
    }
    if (isNews && batch.is_finished) announce(`Answered: ${this.told(batch).map(sentence).join(". ")}`);
  }

  /** The items as answers: what each is called, and its times beside the job's own. */
  told(batch) {
    const { job } = this.view;
    const counts = batch.items.map(({ values }) => values.num_microbatches);
    // One question asks for more micro-batches; all others have as many as the job.
    const before = Math.min(...counts);
    const gainOf = (value, count) =>
      (value === null || !job.objective_ms ? null : 1 - (value / count) / (job.objective_ms / before));
    return batch.items.map((item, index) => {
      const [count, isEach] = [counts[index], counts[index] !== before];
      return { ...item, isEach,
        text: item.name.startsWith(`${job.name}: `) ? item.name.slice(job.name.length + 2) : item.name,
        before: isEach ? job.objective_ms / before : job.objective_ms,
        after: isEach && item.objective_ms !== null ? item.objective_ms / count : item.objective_ms,
        gain: gainOf(item.objective_ms, count),
        most: gainOf(item.bound_ms, count),
        isEnded: ENDED.includes(item.state) };
    });
  }

  tell(batch) {
    const { job } = this.view;
    this.button.disabled = !batch.is_finished;
    this.button.textContent = "Ask again";
    this.element.dataset.finished = batch.is_finished;
    delete this.element.dataset.needs;
    const isOld = Date.parse(job.finished_at) > Date.parse(batch.created_at);
    const note = isOld
      ? "This job was searched again since it was asked about: ask again, to start from what it has now."
      : `Each is searched for ${batch.options.time_limit_s} s from this schedule. What is gained without `
        + "a change is gained by searching.";
    if (this.note.textContent !== note) this.note.textContent = note;
    const answers = this.told(batch);
    // What has the focus keeps it: nothing is exchanged that is there already.
    const key = JSON.stringify(answers);
    if (this.key === key) return;
    this.key = key;
    this.rows.replaceChildren(...answers.map((answer) => this.rowOf(answer)),
      el("p", { class: "hint" }, el("a", { href: address({ batch: batch.id }) }, "As a batch")));
  }

  rowOf(answer) {
    const links = [["Its schedule", {}], ["Next to this one", { beside: this.view.id }]];
    return el("div", { class: "reason", "data-name": answer.values.question,
      "data-state": answer.state },
      el("h3", {}, headline(answer)),
      el("div", {}, el("p", {}, sentence(answer)),
        answer.error ? el("p", { class: "hint" }, answer.error.message) : null,
        el("p", { class: "hint links" }, links.map(([text, beside]) => el("a", {
          href: address({ job: answer.job_id, ...beside }),
          "aria-label": `${text}: ${answer.text}` }, text)))));
  }
}

/** What is said of an answer: its question, until the search has ended. */
function sentence({ text, isEnded, isEach, before, after, gain, most, gap }) {
  if (!isEnded || gain === null) return text;
  const unit = isEach ? "ms per micro-batch" : "ms";
  const length = Math.abs(gain) <= SAME ? `${ms(before)} ${unit} as before`
    : `${ms(before)} → ${ms(after)} ${unit}, ${change(gain)}`;
  return `${text}: ${length}; ${proof(most, gap)}`;
}

const change = (gain) => `${share(Math.abs(gain))} ${gain > 0 ? "less" : "more"}`;

function proof(most, gap) {
  if (most === null) return "nothing is proven";
  if (most <= SAME) return "proven: nothing can be gained";
  if (gap <= SAME) return "proven: that is the best";
  return `no schedule gains more than ${share(most)} (proven)`;
}

/** The gain in a word, or how far the search is. */
function headline({ isEnded, isEach, state, gain }) {
  if (!isEnded || gain === null) return el("span", { class: `state ${state}` }, state);
  if (Math.abs(gain) <= SAME) return "no gain";
  return el("strong", {}, `${change(gain)}${isEach ? " each" : ""}`);
}
