// The rows of a comparison that has ended.

import { el } from "./dom.js";
import { ms, share } from "./format.js";

const NAMES = ["Method", "Placement", "Makespan, ms", "Bubble of the busiest device", ""];

/** Return a table of a row per method, as `/v1/jobs/{id}/comparison` has them. */
export function comparisonTable(rows) {
  const line = (row) => el("tr", {}, ...[row.method, row.placement,
    row.programs ? ms(row.makespan_ms) : "–", row.programs ? share(row.makespan_bubble) : "–",
    row.reason || (row.over_limit ? "over the memory limit" : "")]
    .map((text) => el("td", {}, text)));
  return el("table", {},
    el("thead", {}, el("tr", {}, ...NAMES.map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, ...rows.map(line)));
}
