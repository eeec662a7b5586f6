// The parts of a job's page: actions, facts, a comparison's rows, reasons, files, and a second schedule.

import { methods, titles } from "./catalogue.js";
import { button, el, fact, save, table } from "./dom.js";
import { guarded } from "./faults.js";
import { bytes, ms, msUnit, share, sized } from "./format.js";
import { ask, askJson, Fault } from "./http.js";

// --- Actions on a job: cancel it while it runs, search on when it has ended.

/** Show the actions on the job of a view in a place. */
export function tellActions(view, place) {
  const canGoOn = view.isFinal && !view.isComparison && view.job.state !== "infeasible" && !view.isProven;
  const seconds = view.seconds ??= el("input", { type: "number", min: 1, value: 30, required: true,
    "aria-label": "Seconds more" });
  const shown = [];
  if (!view.isFinal) shown.push(button("Cancel", guarded(() => view.cancel()), { id: "cancel" }));
  if (canGoOn) shown.push(button("Search", guarded(() => view.resume()), { id: "resume" }), seconds, el("span", {}, "s more"));
  // Nothing is replaced that is there already, so that the focus stays.
  const key = shown.map((item) => item.id || "seconds").join();
  if (place.dataset.key === key) return;
  place.dataset.key = key;
  place.replaceChildren(...shown);
}

// --- The numbers of an answer: the objective, what is proven, and what a tune knows of its fastest row.

export const OPTIMAL_GAP = 1e-6;
const OBJECTIVES = { span: "Span", step: "Step" };

/** Return the facts of the job of a view; objective and gap are those of the visible schedule. */
export function factsOf({ job, seen: { objective_ms, gap }, tuned }) {
  const proven = gap !== null && gap <= OPTIMAL_GAP ? "0 · optimal" : share(job.bound_ms ? gap : null);
  const error = { class: "fact long", id: "reason" };
  return [
    fact(OBJECTIVES[job.objective] ?? "Makespan", msUnit(objective_ms), { id: "objective" }),
    ...tuned.facts.map(([name, value]) => fact(name, value)),
    // A bound of 0 is always true, and says nothing.
    fact("Bound", msUnit(job.bound_ms || null), { id: "bound" }),
    fact("Gap", proven, { id: "gap" }),
    ...(job.place ? [fact("Place in the queue", String(job.place))] : []),
    ...(job.cache === "miss" ? [] : [fact("Cache", job.cache)]),
    ...(job.error ? [fact("Reason", sized(job.error.message), error)] : [])];
}

// --- The rows of a comparison that has ended.

const COLUMNS = [{ title: "Method" }, { title: "Placement" }, { title: "Makespan, ms", number: true },
  { title: "Gain over 1F1B", number: true }, { title: "Bubble", number: true },
  { title: "95th percentile, ms", number: true }, { title: "Fullest device", number: true }, { title: "Note" }];

/** Return a table of a row per method, as `/v1/jobs/{id}/comparison` has them; `titleOf` names methods. */
export function comparisonTable(rows, titleOf) {
  // The baseline is 1F1B; with several stages per device, its interleaved form.
  const usual = rows.find((row) => row.programs && row.method === "1f1b")
    ?? rows.find((row) => row.programs && row.method === "interleaved");
  return table("Methods, best first", COLUMNS, rows.map((row) => ({
    attributes: { "data-method": row.method },
    cells: [titleOf(row.method), row.placement,
      ...(row.programs ? [ms(row.makespan_ms),
        usual && row !== usual ? share(1 - row.makespan_ms / usual.makespan_ms) : "",
        share(row.makespan_bubble), ms(row.p95_ms), bytes(row.peak_bytes)] : ["–", "", "–", "–", "–"]),
      row.reason || (row.over_limit ? "over the memory limit" : "")],
  })));
}

// --- Why a schedule is as long as it is: the service's explanation, where it gives one.

const NONE = [404, 413, 429];
const SHOWN_SENTENCES = 2;

/** Show the explanation of a path in a place; where there is none the place stays hidden. */
export async function why(place, path, title, signal) {
  try {
    const { sentences = [] } = await askJson(path, { signal });
    place.replaceChildren(el("h2", {}, title), ...[...byTopic(sentences)].map(partOf));
    place.hidden = sentences.length === 0;
  } catch (error) {
    if (!(error instanceof Fault) || !NONE.includes(error.status)) throw error;
    place.hidden = true;
  }
}

const partOf = ([topic, sentences]) => el("div", { class: "reason" },
  el("h3", {}, topic),
  el("div", {}, listOf(sentences.slice(0, SHOWN_SENTENCES)), rest(sentences.slice(SHOWN_SENTENCES))));

const listOf = (sentences) => el("ul", {}, sentences.map(({ text }) => el("li", {}, text)));

const rest = (sentences) => (sentences.length
  ? el("details", {}, el("summary", {}, `${sentences.length} more`), listOf(sentences))
  : null);

function byTopic(sentences) {
  const topics = new Map();
  for (const sentence of sentences) {
    topics.set(sentence.topic, [...(topics.get(sentence.topic) ?? []), sentence]);
  }
  return topics;
}

// --- A schedule as a file: JSON, CSV, a trace, a picture.

const FORMS = [["json", "Schedule, JSON", "json"], ["csv", "Schedule, CSV (torch)", "csv"],
  ["trace", "Trace (Perfetto)", "trace.json"], ["svg", "Picture, SVG", "svg"]];

const BEYOND_TORCH = /OFFLOAD|RELEASE|RELOAD|RECOMPUTE|@/;
const WHY_NOT = "torch has no OFFLOAD or RECOMPUTE, which this schedule needs to fit; save it as JSON, "
  + "and run it with optpipe.runtime.";

/** A menu that saves the best schedule of a job, or what its chart shows. */
export function downloads(view) {
  const name = () => (view.job.name || view.id.slice(0, 8)).replaceAll(/[^\w.-]+/g, "-");
  const menu = el("details", { class: "menu", id: "downloads" }, el("summary", {}, "Save as"));
  const item = (text, form, action) => button(text, guarded(async () => {
    menu.open = false;
    await action();
  }), { "data-form": form });
  menu.append(el("div", {},
    FORMS.map(([form, text, suffix]) => item(text, form, async () => {
      const answer = await ask(`${view.path}/schedule?format=${form}`);
      save(await answer.blob(), `${name()}.${suffix}`);
    })),
    item("Picture as seen, PNG", "png", async () => save(await view.chart.png(), `${name()}.png`)),
    item("Problem, JSON", "problem", async () => {
      const answer = await ask(`${view.path}/problem`);
      save(await answer.blob(), `${name()}.problem.json`);
    })));
  const [csv, why] = [menu.querySelector("[data-form=csv]"), el("p", { class: "hint", hidden: true }, WHY_NOT)];
  csv.after(why);
  menu.addEventListener("toggle", guarded(async () => {
    if (!menu.open || !view.job.has_schedule) return;
    const text = await (await ask(`${view.path}/schedule?format=csv`)).text();
    csv.disabled = BEYOND_TORCH.test(text);
    why.hidden = !csv.disabled;
  }));
  menu.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      menu.open = false;
      menu.querySelector("summary").focus();
    }
  });
  menu.addEventListener("focusout", (event) => {
    if (!menu.contains(event.relatedTarget)) menu.open = false;
  });
  return menu;
}

// --- The schedule next to a job's on the same time axis: a published method, another job, opened files.

const SHOWN_JOBS = 30;

/** Return a choice of the schedule next to that of a job; calls `onChoice` with a name or "". */
export function besideField(view, onChoice) {
  const select = el("select", { id: "beside", onchange: guarded(() => onChoice(select.value)) },
    el("option", { value: "" }, "nothing"),
    el("option", { value: "method:1f1b" }, "1F1B"));
  const { beside } = view;
  if (beside && beside !== "method:1f1b") select.append(optionOf(beside));
  select.value = beside;
  // The other choices are loaded when the select gets the focus.
  select.addEventListener("focus", guarded(() => fill(select, view)), { once: true });
  return el("label", { class: "inline" }, "Next to it", select);
}

/** Choose a schedule, also one that the lists do not have. */
export function setBeside(select, beside, files = null) {
  const known = [...select.options].find((option) => option.value === beside);
  if (!known || files) known?.remove(), select.append(optionOf(beside, files));
  select.value = beside;
}

async function fill(select, view) {
  const [known, { jobs }] = await Promise.all([
    methods(), askJson(`v1/jobs?limit=${2 * SHOWN_JOBS}`)]);
  const chosen = select.value;
  const others = jobs.filter((job) => job.has_schedule && job.id !== view.id).slice(0, SHOWN_JOBS);
  const published = known.filter(({ name }) => name !== "auto" && name !== "1f1b");
  select.replaceChildren(
    el("option", { value: "" }, "nothing"),
    el("option", { value: "method:1f1b" }, "1F1B"),
    el("optgroup", { label: "Jobs" }, others.map((job) =>
      el("option", { value: job.id }, `${job.name || job.id.slice(0, 8)} · ${msUnit(job.objective_ms)}`))),
    el("optgroup", { label: "Methods" }, published.map(({ name, title }) =>
      el("option", { value: `method:${name}` }, title))));
  const kept = view.tuned.result?.current;
  if (kept) select.append(optionOf(`row:${kept.id}`));
  if (view.files) select.append(optionOf("files", view.files));
  setBeside(select, chosen);
}

/** Return an option before the lists are known: a method by its title, a job by the start of its id. */
function optionOf(beside, files = null) {
  if (files) return el("option", { value: beside }, files.map(({ name }) => name).join(", "));
  if (beside.startsWith("row:")) return el("option", { value: beside }, "What you run today");
  const name = beside.replace(/^method:/, "");
  const option = el("option", { value: beside }, name.slice(0, 12));
  if (name !== beside) guarded(async () => { option.textContent = (await titles())(name); })();
  return option;
}
