// What a tune has found: the gain, the configurations as a table, what is proven, how far off it is.

import { button, el, table } from "./dom.js";
import { ms, share } from "./format.js";
import { askJson } from "./http.js";

const GIB = 2 ** 30;
const MOST_ROWS = 11;
const peak = (row) => Math.max(...row.peak_bytes);
const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** A configuration in words: the degrees that are not 1. */
export function labelOf(row) {
  const parts = [`tp ${row.tp}`, `pp ${row.pp}${row.chunks > 1 ? ` x${row.chunks}` : ""}`];
  for (const name of ["cp", "ep", "etp"]) if (row[name] > 1) parts.push(`${name} ${row[name]}`);
  parts.push(`dp ${row.dp}`, `mb ${row.micro_batch}`);
  if (row.zero > 1) parts.push(`zero ${row.zero}`);
  if (row.recompute.length) parts.push(`recompute ${row.recompute.join(", ")}`);
  return parts.join(" ");
}

/** The part of a job's view that shows it, where the job tunes. */
export class Tuned {
  constructor(view) {
    this.view = view;
    this.turn = 0;
    this.by = "step_ms";
    this.falls = false;
    this.note = el("p", { class: "hint", id: "tune-note" });
    this.found = el("div", { class: "found" });
    this.element = el("section", { id: "configuration" }, this.note, this.found);
  }

  /** Show a sentence of the search. */
  say(text) {
    this.note.textContent = text;
  }

  /** Show what is known by now: the best so far, or all. */
  async show() {
    const { isTune, isFinal, job, path, stop } = this.view;
    if (!isTune || !job.has_schedule) return;
    const turn = ++this.turn;
    const result = await askJson(`${path}/configuration`, { signal: stop.signal });
    if (turn !== this.turn) return;
    this.result = result;
    if (isFinal) this.note.textContent = "";
    this.tell();
  }

  tell() {
    const { result } = this;
    this.found.replaceChildren(...(result.counts ? this.headline() : []), this.rows(),
      ...(result.certificate ? [el("p", { class: "hint", id: "certificate" },
        `${result.certificate[0].toUpperCase()}${result.certificate.slice(1)}.`)] : []));
  }

  /** The gain, and whether an estimate can know it. */
  headline() {
    const { gain, error } = this.result;
    const band = error === null
      ? "Estimates of this kind were compared with no published run."
      : `Estimates of this kind are ${share(error.median)} off in the median, at worst `
        + `${share(error.worst)} (${error.num_rows} published runs).`;
    const isSmall = gain !== null && error !== null && gain < error.median;
    const said = gain === null ? "What you run today was not said, or is too large to simulate."
      : `${share(Math.max(0, gain))} less time per step than what you run today`
        + (isSmall ? ": smaller than the estimate's error. Measure before you change." : ".");
    return [el("p", { id: "gain" }, el("strong", {}, said)), el("p", { class: "hint" }, band)];
  }

  /** The configurations, in the order that was chosen. */
  rows() {
    const { rows, current } = this.result;
    const same = (row) => current !== null && labelOf(row) === labelOf(current)
      && row.step_ms === current.step_ms;
    const shown = rows.slice(0, MOST_ROWS);
    if (current !== null && !shown.some(same)) shown.push(current);
    const columns = [
      { title: "Configuration", of: labelOf, text: (row) => `${same(row) ? "today: " : ""}${labelOf(row)}` },
      { title: "Step, ms", key: "step_ms", number: true, of: (row) => row.step_ms,
        text: (row) => ms(row.step_ms) },
      { title: "Gain", number: true, of: (row) => -row.step_ms,
        text: (row) => (current === null || same(row) ? "" : share(1 - row.step_ms / current.step_ms)) },
      { title: "Tokens/s/GPU", number: true, of: (row) => row.tokens_per_s_per_gpu,
        text: (row) => whole.format(row.tokens_per_s_per_gpu) },
      { title: "MFU", number: true, of: (row) => row.mfu, text: (row) => share(row.mfu) },
      { title: "GiB", number: true, of: peak, text: (row) => (peak(row) / GIB).toFixed(1) },
      { title: "Schedule", of: (row) => row.method, text: (row) => row.method },
    ].map((column) => this.sortable({ key: column.title, ...column }));
    const { of } = columns.find(({ key }) => key === this.by);
    const sign = this.falls ? -1 : 1;
    shown.sort((one, other) => sign * (of(one) < of(other) ? -1 : of(one) > of(other) ? 1 : 0));
    return table("Configurations", columns, shown.map((row) => ({
      cells: columns.map(({ text }) => text(row)),
      attributes: { "data-best": row === rows[0] || null, "data-today": same(row) || null } })));
  }

  /** A column whose title sorts by it, and turns the order where it does already. */
  sortable(column) {
    const { key, title } = column;
    const isBy = key === this.by;
    const head = button(title, () => {
      this.falls = key === this.by && !this.falls;
      this.by = key;
      this.tell();
      this.found.querySelector(`[data-sort="${key}"]`).focus();
    }, { class: "quiet", "data-sort": key });
    return { ...column, head, sort: isBy ? (this.falls ? "descending" : "ascending") : null };
  }
}
