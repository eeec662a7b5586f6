// What stands beside a schedule on the same time axis: a published method, or another job.

import { el } from "./dom.js";
import { guarded } from "./faults.js";
import { msUnit } from "./format.js";
import { askJson } from "./http.js";
import { methods, titles } from "./methods.js";

const SHOWN = 30;

/** A choice of what stands beside the schedule of a job; tells `onChoice` a name or "". */
export function besideField(view, onChoice) {
  const select = el("select", { id: "beside", onchange: guarded(() => onChoice(select.value)) },
    el("option", { value: "" }, "nothing"),
    el("option", { value: "method:1f1b" }, "1F1B"));
  const { beside } = view;
  if (beside && beside !== "method:1f1b") select.append(optionOf(beside));
  select.value = beside;
  // The rest is asked for when somebody is about to choose.
  select.addEventListener("focus", guarded(() => fill(select, view)), { once: true });
  return el("label", { class: "inline" }, "Beside it", select);
}

/** Choose what stands beside it, also where the lists do not have it. */
export function setBeside(select, beside) {
  if (![...select.options].some((option) => option.value === beside)) select.append(optionOf(beside));
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
  setBeside(select, chosen);
}

/** What is chosen before the lists are known: a method by its title, a job by the start of its id. */
function optionOf(beside) {
  if (beside.startsWith("row:")) return el("option", { value: beside }, "What you run today");
  const name = beside.replace(/^method:/, "");
  const option = el("option", { value: beside }, name.slice(0, 12));
  if (name !== beside) guarded(async () => { option.textContent = (await titles())(name); })();
  return option;
}
