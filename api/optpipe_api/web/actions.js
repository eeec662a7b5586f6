// What can be done about a job: cancel it while it goes on, give it more time when it has ended.

import { button, el } from "./dom.js";
import { guarded } from "./faults.js";

/** Show in a place what can be done about the job of a view. */
export function tellActions(view, place) {
  const canGoOn = view.isFinal && !view.isComparison && view.job.state !== "infeasible" && !view.isProven;
  const seconds = view.seconds ??= el("input", { type: "number", min: 1, value: 30, required: true,
    "aria-label": "Seconds more" });
  const shown = [];
  if (!view.isFinal) shown.push(button("Cancel", guarded(() => view.cancel()), { id: "cancel" }));
  if (canGoOn) shown.push(seconds, button("s more", guarded(() => view.resume()), { id: "resume" }));
  // What has the focus keeps it: nothing is exchanged that is there already.
  const key = shown.map((item) => item.id || "seconds").join();
  if (place.dataset.key === key) return;
  place.dataset.key = key;
  place.replaceChildren(...shown);
}
