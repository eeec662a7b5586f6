// What a tune has found: the gain first, then memory, configurations, the chosen one, what to paste.

import { choiceField } from "./controls.js";
import { button, el, later, save, table } from "./dom.js";
import { guarded, showFault } from "./faults.js";
import { ms, sentence, share } from "./format.js";
import { ask, askJson } from "./http.js";
import { address, go } from "./link.js";
import { countsBar, paretoPlot, partsKey, peak, rankBars } from "./tuned_plots.js";
import { scalingPart, switchesPart } from "./tuned_tables.js";

const GIB = 2 ** 30, MOST_ROWS = 11, SOON_MS = 200;
const PASTES = {
  megatron: [["arguments", "Megatron-LM arguments", "arguments.sh"], ["yaml", "Megatron-Core YAML", "megatron.yaml"]],
  torchtitan: [["python", "torchtitan config", "optpipe_config.py"], ["csv", "Schedule, CSV", "schedule.csv"]],
  huggingface: [],
  any: [],
};
const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** The part of a job's view that shows it, where the job tunes. */
export class Tuned {
  constructor(view) {
    this.view = view;
    this.turn = 0;
    this.by = "step_ms";
    this.falls = false;
    this.note = el("p", { class: "hint", id: "tune-note" });
    this.gain = el("div", { id: "gain-part" });
    this.found = el("div", { class: "found" });
    this.element = el("section", { id: "configuration" }, this.note, this.found);
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
    if (!job.has_schedule) {
      if (isFinal) this.found.replaceChildren(this.elsewhere());
      return;
    }
    const turn = ++this.turn;
    const [result, question] = await Promise.all([
      askJson(`${path}/configuration`, { signal: stop.signal }),
      this.question ?? askJson(`${path}/question`, { signal: stop.signal })]);
    if (turn !== this.turn) return;
    Object.assign(this, { result, question });
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
    return [["Tokens/s/GPU", whole.format(best.tokens_per_s_per_gpu)], ["MFU (bf16 peak)", share(best.mfu)],
      ["Fullest rank", `${(peak(best) / GIB).toFixed(1)} of ${(this.result.memory_bytes / GIB).toFixed(1)} GiB`]];
  }

  tell() {
    const { result, chosen } = this;
    if (!chosen) return;
    const { current, memory_bytes: memory } = result;
    const focused = document.activeElement?.dataset?.key;
    this.gain.replaceChildren(...this.headline());
    const bars = [rankBars(chosen, chosen === result.rows[0] ? "fastest" : "chosen", memory)];
    if (current && current.id !== chosen.id) bars.push(rankBars(current, "today", memory));
    const shown = this.shown(), again = (changes) => this.askAgain(changes);
    this.found.replaceChildren(
      ...(this.view.isFinal ? [] : [countsBar(result.counts)]),
      ...scalingPart(result.scaling, again), el("h2", {}, "Configurations"), this.rows(shown),
      el("div", { class: "pair" },
        el("div", {}, el("h2", {}, "Step time, ms, against memory"),
          paretoPlot(shown.filter((row) => row.id !== current?.id), result.pareto, current, chosen.id,
            (row) => this.choose(row))),
        el("div", {}, el("h2", {}, "Memory of each pipeline rank"), el("div", { class: "pair" }, bars),
          partsKey())),
      el("p", { class: "hint", id: "certificate" }, sentence(result.certificate)),
      ...(result.notes ?? []).map((said) => el("p", { class: "hint" }, sentence(said))),
      ...switchesPart(result.switches, this.question, again), this.acts(chosen));
    if (focused) this.element.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  }

  /** The gain, or why there is none, and the interval of the fastest step. */
  headline() {
    const { verdict, changes, error } = this.result;
    const band = error === null
      ? "Estimates of this kind were compared with too few published runs, or none."
      : error.text && `Step of the fastest: ${sentence(error.text)}`;
    return [el("p", { id: "gain" }, el("strong", {}, verdict ? sentence(verdict) : "")),
      ...(changes?.length ? [el("p", { id: "changes" }, `Change ${changes.join(", ")}.`)] : []), el("p", { class: "hint" }, band)];
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

  /** Show a row's schedule beside that of today. */
  choose(row) {
    this.view.showRow(row === this.result.rows[0] ? "" : row.id);
    this.tell();
  }

  /** The way back to the five questions, as they were asked. */
  elsewhere() {
    return el("a", { href: address({ ask: this.view.id }) }, "Ask something else");
  }

  /** What can be done with the chosen row: paste it, solve it further, or ask something else. */
  acts(row) {
    const { view, question } = this;
    const path = `${view.path}/rows/${row.id}`;
    const pastes = PASTES[question.framework].map(([form, text, name]) => button(text,
      guarded(async () => save(await (await ask(`${path}/paste?format=${form}`)).blob(), name)),
      { "data-paste": form, "data-key": `paste-${form}` }));
    const again = (text, changes) => button(text, guarded(() => this.askAgain(changes)),
      { "data-needs": "submit", "data-key": `again-${text}` });
    const more = Math.max(141, Math.round(2 * this.result.memory_bytes / 1e9));
    return el("div", { id: "tune-acts" },
      el("h2", {}, `${row.label || row.id}: ${row.layers.length} ${row.layers.length === 1 ? "stage" : "stages"} of ${row.layers.join(", ")} layers`),
      el("div", { class: "buttons" }, pastes.length ? ["Paste", ...pastes] : [],
        button("Solve its schedule further", guarded(() => this.solve(path)),
          { "data-needs": "submit", id: "solve-row", "data-key": "solve" })),
      row.command ? [el("p", { class: "hint" }, "To train by it, on every host, beside what is pasted:"),
        el("pre", { id: "train-command" }, row.command)] : [],
      el("h2", {}, "What if"),
      el("div", { class: "buttons" },
        again(`${Math.round(this.result.memory_bytes / 1e9)} → ${more} GB`, { memory_bytes: more * 1e9 }),
        again("Twice the batch", { global_batch: 2 * question.global_batch }),
        ...(question.gpu.includes(",") ? [] : [again("Other numbers of GPUs", {
          gpu_counts: "auto", gpu: question.gpu.split(":")[0], num_gpus: undefined, current: undefined,
          current_file: undefined, current_format: undefined, measured_step_s: undefined })]),
        again("100 Gbit/s Ethernet", { network: "ethernet:100" }),
        ...(question.framework === "any" ? [] : [again("Any schedule", { framework: "any" })]),
        this.elsewhere()),
      row.layers.length > 1 ? this.mover(row, path) : null);
  }

  /** One layer from a stage to another: what the step would take. */
  mover(row, path) {
    const stages = row.layers.map((layers, stage) => [stage, `${stage} (${layers})`]);
    const last = row.layers.length - 1;
    const from = choiceField("from_stage", "One layer from stage", stages, last);
    const to = choiceField("to_stage", "to stage", stages, last - 1);
    const said = el("output", { id: "moved" });
    const chosen = (field) => Number(field.querySelector("select").value);
    const move = async () => {
      const layers = [...row.layers];
      layers[chosen(from)] -= 1;
      layers[chosen(to)] += 1;
      said.textContent = "";
      const moved = await askJson(`${path}/recut?layers=${layers}`);
      const change = moved.step_ms / row.step_ms - 1;
      said.textContent = `${ms(moved.step_ms)} ms per step by ${moved.method} `
        + `(${change < 0 ? "" : "+"}${share(change)}), fullest rank ${(peak(moved) / GIB).toFixed(1)} `
        + `of ${(this.result.memory_bytes / GIB).toFixed(1)} GiB.`;
    };
    return el("div", { class: "buttons" }, from, to,
      button("Move it", guarded(move), { id: "move-layer", "data-key": "move" }), said);
  }

  async askAgain(changes) {
    const { time_limit_s } = this.view.job.options;
    const asked = { ...this.question, ...changes, options: { time_limit_s }, tags: ["page"] };
    go({ job: (await askJson("v1/tunes", { json: asked })).id });
  }

  async solve(path) {
    const problem = await askJson(`${path}/problem`);
    const options = { time_limit_s: 30 };
    go({ job: (await askJson("v1/jobs", { json: { problem, options, tags: ["page"] } })).id });
  }
}
