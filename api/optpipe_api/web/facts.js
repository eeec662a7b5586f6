// The numbers of an answer: the objective, what is proven, and what a tune knows of its fastest row.

import { fact } from "./dom.js";
import { msUnit, share, sized } from "./format.js";

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
