// The answer of a tune: gain, difference to today and what to paste; then configurations and memory.

import { button, el, later, table } from "./dom.js";
import { guarded, showFault } from "./faults.js";
import { ms, msUnit, sentence, share } from "./format.js";
import { askJson } from "./http.js";
import { go } from "./link.js";
import { layerMover, Paste, scalingPart, solveRow, switchesPart, whatIfs } from "./tuned_parts.js";
import { countsBar, layersOf, paretoPlot, partsKey, peak, rankBars } from "./tuned_plots.js";

const GIB = 2 ** 30, MOST_ROWS = 11, SOON_MS = 200;
const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** The part of a job's view that shows it, where the job tunes. */
export class Tuned {
  constructor(view) {
    this.view = view;
    this.turn = 0;
    this.by = "step_ms";
    this.falls = false;
    this.note = el("p", { class: "hint", id: "tune-note" });
    this.paste = new Paste();
    this.gain = el("div", { id: "gain-part" });
    this.next = el("section", { id: "next" });
    this.found = el("div", { class: "found" });
    this.difference = el("div", { id: "changes", hidden: true });
    this.element = el("section", { id: "configuration" }, this.note, this.difference, this.paste.element, this.found);
    this.soon = later(() => this.show().catch(showFault), SOON_MS);
  }

  /** Show a sentence of the search, and soon what is known with it. */
  say(text) {
    if (!this.view.isFinal) this.note.textContent = text;
    this.soon();
  }

  /** Show what is known by now. */
  async show() {
    const { isTune, isFinal, job, path, stop } = this.view;
    if (!isTune || stop.signal.aborted) return;
    const turn = ++this.turn;
    const [result, question] = await Promise.all([
      job.has_schedule ? askJson(`${path}/configuration`, { signal: stop.signal }) : null,
      this.question ?? askJson(`${path}/question`, { signal: stop.signal })]);
    if (turn !== this.turn) return;
    this.question = question;
    await this.view.question.showTune(question, result?.current);
    if (!result || turn !== this.turn) return;
    this.result = result;
    if (isFinal) this.note.textContent = "";
    this.tell();
    this.view.tell();
    if (result.current) this.view.besideToday(result.current.id);
  }

  get chosen() {
    const { rows, current } = this.result;
    return [...rows, ...(current ? [current] : [])].find(({ id }) => id === this.view.row) ?? rows[0];
  }

  /** Name and value of what the fastest reaches. */
  get facts() {
    const best = this.result?.rows[0];
    if (!best) return [];
    const { current } = this.result;
    return [...(current ? [["Step today", msUnit(current.step_ms)]] : []),
      ["Tokens/s/GPU", whole.format(best.tokens_per_s_per_gpu)], ["MFU (bf16 peak)", share(best.mfu)],
      ["Fullest rank", `${(peak(best) / GIB).toFixed(1)} of ${(this.result.memory_bytes / GIB).toFixed(1)} GiB`]];
  }

  tell() {
    const { result, chosen } = this;
    if (!chosen) return;
    const { current, memory_bytes: memory } = result;
    const focused = document.activeElement?.dataset?.key;
    this.tellGain();
    const bars = [rankBars(chosen, chosen === result.rows[0] ? "fastest" : "chosen", memory)];
    if (current && current.id !== chosen.id) bars.push(rankBars(current, "today", memory));
    const shown = this.shown(), again = (changes) => this.askAgain(changes);
    const path = `${this.view.path}/rows/${chosen.id}`;
    if (this.view.isFinal) this.paste.show(chosen, path, this.question.framework);
    this.found.replaceChildren(
      ...(this.view.isFinal ? [] : [countsBar(result.counts)]),
      ...scalingPart(result.scaling, again), el("h2", {}, "Configurations"), this.rows(shown),
      el("div", { class: "pair" },
        el("div", {}, el("h2", {}, "Step time against memory"),
          paretoPlot(shown.filter((row) => row.id !== current?.id), result.pareto, current, chosen.id,
            (row) => this.choose(row))),
        el("div", {}, el("h2", {}, "Memory of each pipeline rank"), el("div", { class: "pair" }, bars),
          partsKey())),
      el("h2", {}, "How sure this is"),
      el("p", { class: "hint", id: "certificate" }, sentence(result.certificate)),
      ...(result.notes ?? []).map((said) => el("p", { class: "hint" }, sentence(said))));
    this.next.replaceChildren(
      ...switchesPart(result.switches, this.question, again),
      el("div", { id: "tune-acts" },
        el("h2", {}, "The same question with one change"), whatIfs(result, this.question, again),
        el("h2", {}, `Stages of ${chosen.label || chosen.id}`), layersOf(chosen),
        chosen.layers.length > 1 ? layerMover(chosen, path, memory) : null,
        el("div", { class: "buttons" }, button("Solve this schedule further", guarded(() => solveRow(path)),
          { "data-needs": "submit", id: "solve-row", "data-key": "solve" }))));
    if (focused) document.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  }

  /** Show the gain, or why there is none; the interval of the fastest step; the difference to today. */
  tellGain() {
    const { verdict, changes = [], error } = this.result;
    const band = error === null
      ? "Too few published runs were compared with estimates of this kind to give an interval."
      : error.text && `Step of the fastest: ${sentence(error.text)}`;
    this.gain.replaceChildren(el("p", { id: "gain" }, el("strong", {}, verdict ? sentence(verdict) : "")),
      el("p", { class: "hint", id: "band" }, band));
    this.difference.hidden = !changes.length;
    this.difference.replaceChildren(el("h2", {}, "Difference to today"),
      el("ul", {}, changes.map((change) => el("li", {}, change))));
  }

  /** The fastest rows, and what is run today. */
  shown() {
    const { rows, current } = this.result;
    const shown = rows.slice(0, MOST_ROWS);
    if (current !== null && !shown.some(({ id }) => id === current.id)) shown.push(current);
    return shown;
  }

  /** The configurations, in the order that was chosen. */
  rows(shown) {
    const { rows, current, gain } = this.result;
    const same = (row) => row.id === current?.id;
    const columns = [
      { title: "Configuration", of: ({ label }) => label, text: (row) => button(
        `${same(row) ? "today: " : ""}${row.label || row.id}`, () => this.choose(row),
        { class: "quiet row", "data-key": `row-${row.id}`, "aria-pressed": String(row === this.chosen),
          title: "See its schedule" }) },
      { title: "Step, ms", key: "step_ms", number: true, of: (row) => row.step_ms,
        text: (row) => ms(row.step_ms) },
      { title: "Gain", number: true, of: (row) => -row.step_ms,
        text: (row) => (gain === null || same(row) ? "" : share(1 - row.step_ms / current.step_ms)) },
      { title: "Tokens/s/GPU", number: true, of: (row) => row.tokens_per_s_per_gpu,
        text: (row) => whole.format(row.tokens_per_s_per_gpu) },
      { title: "TFLOP/s/GPU", number: true, of: (row) => row.tflops_per_gpu,
        text: (row) => whole.format(row.tflops_per_gpu) },
      { title: "bf16 MFU", number: true, of: (row) => row.mfu, text: (row) => share(row.mfu) },
      { title: "GiB", number: true, of: peak, text: (row) => (peak(row) / GIB).toFixed(1) },
      { title: "Schedule", of: (row) => row.method, text: (row) => row.method },
    ].map((column) => this.sortable({ key: column.title, ...column }));
    const { of } = columns.find(({ key }) => key === this.by);
    const sign = this.falls ? -1 : 1;
    const sorted = [...shown].sort((one, other) => sign * (of(one) < of(other) ? -1 : of(one) > of(other) ? 1 : 0));
    return table("Configurations", columns, sorted.map((row) => ({
      cells: columns.map(({ text }) => text(row)),
      attributes: { "data-best": row === rows[0] || null, "data-today": same(row) || null,
        "data-chosen": row === this.chosen || null, "data-row": row.id } })));
  }

  /** A column whose title sorts by it, and turns the order where it does already. */
  sortable(column) {
    const { key, title } = column;
    const isBy = key === this.by;
    const head = button(title, () => {
      this.falls = key === this.by && !this.falls;
      this.by = key;
      this.tell();
    }, { class: "quiet", "data-sort": key, "data-key": `sort-${key}` });
    return { ...column, head, sort: isBy ? (this.falls ? "descending" : "ascending") : null };
  }

  /** Show a row's schedule, with that of today next to it. */
  choose(row) {
    this.view.showRow(row === this.result.rows[0] ? "" : row.id);
    this.tell();
  }

  async askAgain(changes) {
    const { time_limit_s } = this.view.job.options;
    const asked = { ...this.question, ...changes, options: { time_limit_s }, tags: ["page"] };
    go({ job: (await askJson("v1/tunes", { json: asked })).id });
  }
}
