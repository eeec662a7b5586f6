// What can be done after an answer: ask with one change, move a layer, solve a schedule further.

import { choiceField } from "./controls.js";
import { button, el } from "./dom.js";
import { guarded } from "./faults.js";
import { bytes, ms, share } from "./format.js";
import { askJson } from "./http.js";
import { go } from "./link.js";
import { peak } from "./tuned_plots.js";

const LARGE_BYTES = 141e9; // an H200

/** Return buttons that ask the question of an answer with one change each. */
export function whatIfs({ memory_bytes: memory }, question, askAgain) {
  const again = (text, changes) => button(text, guarded(() => askAgain(changes)),
    { "data-needs": "submit", "data-key": `again-${text}` });
  const more = Math.max(LARGE_BYTES, 2 * memory);
  return el("div", { class: "buttons" },
    again(`${bytes(more)} instead of ${bytes(memory)} per GPU`, { memory_bytes: more }),
    again("Twice the batch", { global_batch: 2 * question.global_batch }),
    ...(question.gpu.includes(",") ? [] : [again("Other numbers of GPUs", {
      gpu_counts: "auto", gpu: question.gpu.split(":")[0], num_gpus: undefined, current: undefined,
      current_file: undefined, current_format: undefined, measured_step_s: undefined })]),
    again("100 Gbit/s Ethernet", { network: "ethernet:100" }),
    ...(question.framework === "any" ? [] : [again("Any schedule (our runtime)", { framework: "any" })]));
}

/** Return a form that moves one layer of a row to another stage, and says how long the step is then. */
export function layerMover(row, path, memory) {
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
      + `(${change < 0 ? "" : "+"}${share(change)}), fullest rank ${bytes(peak(moved))} of ${bytes(memory)}.`;
  };
  return el("div", { class: "buttons" }, from, to,
    button("Move it", guarded(move), { id: "move-layer", "data-key": "move" }), said);
}

/** Solve the problem of a row alone, as a job of its own. */
export async function solveRow(path) {
  const problem = await askJson(`${path}/problem`);
  go({ job: (await askJson("v1/jobs", { json: { problem, options: { time_limit_s: 30 }, tags: ["page"] } })).id });
}
