// The rows of a comparison that has ended.

import { table } from "./dom.js";
import { bytes, ms, share } from "./format.js";

const COLUMNS = [{ title: "Method" }, { title: "Placement" }, { title: "Makespan, ms", number: true },
  { title: "Gain over 1F1B", number: true }, { title: "Idle, busiest device", number: true },
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
