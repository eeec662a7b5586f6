// Actions on a job: cancel it while it runs, search on when it has ended.

import { button, el } from "./dom.js";
import { guarded } from "./faults.js";

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
