// Jobs and batches, newest first: how they stand, and what can be done about them.

import { titles } from "./catalogue.js";
import { button, el, table } from "./dom.js";
import { guarded, showFault } from "./faults.js";
import { ago, ms, share, stateWord } from "./format.js";
import { ask, askJson } from "./http.js";
import { address } from "./link.js";

const AGAIN_MS = 2000;
const PAGE = 50;

/** What both lists do: load, show, look again while something goes on, load more. */
class ListView {
  constructor(title) {
    this.title = title;
    this.limit = PAGE;
    this.stop = new AbortController();
  }

  async open(host) {
    this.place = el("div", { id: this.kind, class: "list" });
    host.replaceChildren(this.place);
    await this.refresh();
  }

  async refresh() {
    if (this.stop.signal.aborted) return;
    clearTimeout(this.timer);
    const { things, more } = await this.load();
    const focused = document.activeElement?.dataset?.act;
    this.place.replaceChildren(...this.shown(things, more));
    if (focused) this.place.querySelector(`[data-act="${CSS.escape(focused)}"]`)?.focus();
    if (things.some((thing) => this.goesOn(thing))) {
      this.timer = setTimeout(() => this.refresh().catch(showFault), AGAIN_MS);
    }
  }

  shown(things, more) {
    const rows = things.map((thing) => ({
      cells: this.cells(thing), attributes: { "data-id": thing.id, "data-state": thing.state } }));
    return [
      el("div", { class: "head" }, el("h1", {}, this.title), this.filter ?? ""),
      things.length ? table(this.title, this.columns, rows) : el("p", { class: "hint" }, "None yet."),
      more ? button("Older ones", guarded(() => { this.limit = 200; return this.refresh(); })) : "",
    ];
  }

  act(text, thing, options) {
    return button(text, guarded(async () => {
      await ask(`v1/${this.kind}/${thing.id}${options.path ?? ""}`, options.request);
      await this.refresh();
    }), { class: "quiet", "data-act": `${text}-${thing.id}`,
      "aria-label": `${text} ${thing.name || thing.id}` });
  }

  close() {
    this.stop.abort();
    clearTimeout(this.timer);
  }
}

/** The jobs. */
export class JobList extends ListView {
  kind = "jobs";
  columns = [{ title: "Name" }, { title: "State" }, { title: "Objective ms", number: true },
    { title: "Bound ms", number: true }, { title: "Gap", number: true }, { title: "Method" },
    { title: "Made" }, { title: "" }];

  constructor() {
    super("Jobs");
    const states = ["queued", "running", "succeeded", "infeasible", "failed", "cancelled"];
    this.select = el("select", { onchange: guarded(() => this.refresh()) },
      el("option", { value: "" }, "all"), states.map((state) => el("option", {}, state)));
    this.filter = el("label", { class: "inline" }, "State", this.select);
  }

  async load() {
    const state = this.select.value ? `&state=${this.select.value}` : "";
    const [{ jobs, next }, titleOf] = await Promise.all([
      askJson(`v1/jobs?limit=${this.limit}${state}`), titles()]);
    this.titleOf = titleOf;
    return { things: jobs, more: next !== null && this.limit === PAGE };
  }

  goesOn(job) {
    return ["queued", "running"].includes(job.state);
  }

  cells(job) {
    const isComparison = job.kind === "compare";
    const isProven = isComparison || job.state === "infeasible" || (job.gap !== null && job.gap <= 1e-6);
    const action = this.goesOn(job)
      ? this.act("Cancel", job, { path: "/cancel", request: { method: "POST" } })
      : isProven ? "" : this.act("Resume", job, { path: "/resume", request: { json: { time_limit_s: 30 } } });
    return [el("a", { href: address({ job: job.id }) }, job.name || job.id.slice(0, 8)),
      el("span", { class: `state ${job.state}` }, stateWord(job)), ms(job.objective_ms),
      ms(job.bound_ms), share(job.gap),
      { compare: "comparison", tune: "configurations", follow: "running schedule" }[job.kind]
        ?? this.titleOf(job.options.method), ago(job.created_at), action];
  }
}

/** The batches. */
export class BatchList extends ListView {
  kind = "batches";
  columns = [{ title: "Name" }, { title: "Done", number: true }, { title: "Items", number: true },
    { title: "Failed", number: true }, { title: "Made" }, { title: "" }];

  constructor() {
    super("Batches");
  }

  async load() {
    const { batches, next } = await askJson(`v1/batches?limit=${this.limit}`);
    return { things: batches, more: next !== null && this.limit === PAGE };
  }

  goesOn(batch) {
    return !batch.is_finished;
  }

  cells(batch) {
    return [el("a", { href: address({ batch: batch.id }) }, batch.name || batch.id.slice(0, 8)),
      share(batch.progress), String(batch.num_items), String(batch.counts.failed ?? 0),
      ago(batch.created_at),
      this.goesOn(batch) ? this.act("Cancel", batch, { path: "/cancel", request: { method: "POST" } }) : ""];
  }
}
