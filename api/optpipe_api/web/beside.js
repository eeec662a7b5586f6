// The schedule next to a job's on the same time axis: a published method, another job, opened files.

import { el } from "./dom.js";
import { guarded } from "./faults.js";
import { msUnit } from "./format.js";
import { askJson } from "./http.js";
import { methods, titles } from "./methods.js";

const SHOWN = 30;

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
    methods(), askJson(`v1/jobs?limit=${2 * SHOWN}`)]);
  const chosen = select.value;
  const others = jobs.filter((job) => job.has_schedule && job.id !== view.id).slice(0, SHOWN);
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
