// What a little more would buy a job: asked by a button, and the answers as their searches end.

import { announce, button, el } from "./dom.js";
import { guarded, showFault } from "./faults.js";
import { share } from "./format.js";
import { Fault, askJson } from "./http.js";
import { address } from "./link.js";

const WAIT_S = 1;
const SECONDS = 20;
const SAME = 1e-6;

let key = null;

/** Whether the key of this page may ask for searches; who may only read sees no button. */
async function maySubmit() {
  key ??= askJson("v1/key");
  return (await key).role !== "read";
}

/** The part of a job's view that asks, and shows what was answered, until the view is closed. */
export class WhatIf {
  constructor(view) {
    this.view = view;
    this.wanted = 0;
    this.seconds = el("input", { type: "number", min: 1, value: SECONDS, required: true,
      "aria-label": "Seconds for each question" });
    this.button = button("What would more buy?", guarded(() => this.start()), { id: "ask-what-if" });
    this.asking = el("p", { class: "buttons" }, this.button, this.seconds, "s each");
    this.note = el("p", { class: "hint" });
    this.rows = el("div", {});
    this.element = el("section", { id: "what-if", hidden: true },
      el("h2", {}, "What more would buy"), this.asking, this.note, this.rows);
  }

  get path() {
    return `${this.view.path}/what-ifs`;
  }

  /** The job has ended: ask what was to be asked then, or show what was asked before. */
  async ended() {
    const { job } = this.view;
    if (!job.has_schedule || job.options.method !== "auto") return;
    this.asking.hidden = !await maySubmit();
    this.element.hidden = this.asking.hidden && !this.told;
    const seconds = this.wanted;
    this.wanted = 0;
    this.note.textContent = "";
    this.button.disabled = false;
    if (seconds && job.state === "succeeded") await this.ask(seconds);
    else await this.look();
  }

  /** The job goes on: nothing can be asked until it has ended. */
  pause() {
    this.button.disabled = true;
  }

  /** Search the schedule itself once more, unless it is proven, then ask. */
  async start() {
    if (!this.seconds.reportValidity()) return;
    const seconds = Number(this.seconds.value);
    this.button.disabled = true;
    try {
      if (this.view.isProven) await this.ask(seconds);
      else await this.searchFirst(seconds);
    } catch (error) {
      this.wanted = 0;
      this.button.disabled = false;
      this.note.textContent = "";
      throw error;
    }
  }

  async searchFirst(seconds) {
    this.note.textContent = `First this schedule is searched for ${seconds} s more, so that what `
      + "more searching finds is not put down to a change.";
    announce(this.note.textContent);
    this.wanted = seconds;
    try {
      await this.view.resume(seconds);
    } catch (error) {
      if (!(error instanceof Fault) || error.status !== 422) throw error;
      await this.ask(seconds);
      this.note.textContent = "This schedule may not be searched any longer, so a gain may be one of "
        + "more searching.";
    }
  }

  async ask(seconds) {
    this.wanted = 0;
    this.note.textContent = "";
    this.tell(await askJson(this.path, { json: { options: { time_limit_s: seconds } } }));
    this.follow().catch(showFault);
  }

  async look() {
    const { signal } = this.view.stop;
    try {
      this.tell(await askJson(this.path, { signal }));
    } catch (error) {
      if (!(error instanceof Fault) || error.status !== 404) throw error;
      return;
    }
    await this.follow();
  }

  /** Look again and again until all is answered; each time the service waits a little for that. */
  async follow() {
    const { signal } = this.view.stop;
    while (!this.told.is_finished && !signal.aborted) {
      this.tell(await askJson(`${this.path}?wait=${WAIT_S}`, { signal }));
      if (this.told.is_finished) announce(`Answered: ${this.told.answers.map(words).join(". ")}`);
    }
  }

  tell(told) {
    this.told = told;
    this.element.hidden = false;
    this.button.disabled = !told.is_finished;
    this.button.textContent = "Ask again";
    this.element.dataset.finished = told.is_finished;
    if (!told.is_current) {
      this.note.textContent = "These answers are about an earlier schedule of this job; a better one "
        + "was found since.";
    }
    // What has the focus keeps it: nothing is exchanged that is there already.
    const key = JSON.stringify(told.answers);
    if (this.key === key) return;
    this.key = key;
    this.rows.replaceChildren(
      ...told.answers.map((answer) => this.rowOf(answer)), ...told.unasked.map(unaskedRow),
      el("p", { class: "hint" }, el("a", { href: address({ batch: told.batch_id }) }, "As a batch")));
  }

  rowOf(answer) {
    const links = [["Its schedule", {}], ["Beside this one", { beside: this.view.id }]];
    return el("div", { class: "reason", "data-name": answer.name, "data-state": answer.state },
      el("h3", {}, gainOf(answer)),
      el("div", {}, el("p", {}, words(answer)),
        answer.error ? el("p", { class: "hint" }, answer.error.message) : null,
        el("p", { class: "hint links" }, links.map(([text, beside]) => el("a", {
          href: address({ job: answer.job_id, ...beside }),
          "aria-label": `${text}: ${answer.question}` }, text)))));
  }
}

const unaskedRow = ({ sentence }) => el("div", { class: "reason" },
  el("h3", {}, "not asked"), el("div", {}, el("p", {}, sentence)));

/** What is said of an answer: its question, until the search has ended. */
const words = ({ sentence, question }) => sentence ?? question;

/** The gain in a word, or how far the search is. */
function gainOf({ sentence, state, gain, microbatches_before: before, microbatches_after: after }) {
  if (sentence === null || gain === null) return el("span", { class: `state ${state}` }, state);
  if (Math.abs(gain) <= SAME) return "no gain";
  const each = before === after ? "" : " each";
  return el("strong", {}, `${share(Math.abs(gain))} ${gain > 0 ? "less" : "more"}${each}`);
}
