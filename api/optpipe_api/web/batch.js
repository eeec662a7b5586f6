// A batch: how far it is, its items, and what memory buys.

import { Chart, onTheme } from "./chart.js";
import { announce, button, el, fact, save, table } from "./dom.js";
import { guarded, showFault } from "./faults.js";
import { bytes, ms, share } from "./format.js";
import { ask, askJson } from "./http.js";
import { address } from "./link.js";

const WAIT_S = 2;

/** Shows one batch until it is closed. */
export class BatchView {
  constructor(id) {
    this.path = `v1/batches/${encodeURIComponent(id)}`;
    this.stop = new AbortController();
    this.chart = new Chart("Frontier: objective and bound over the memory limit");
    this.chart.say("No item has ended yet.");
    this.place = el("div", { id: "batch", "data-id": id });
    this.top = el("div", {});
    this.rows = el("div", {});
    onTheme(() => !this.stop.signal.aborted && this.draw());
  }

  async open(host) {
    this.place.append(this.top, this.chart.element, this.rows);
    const batch = await askJson(this.path);
    host.replaceChildren(this.place);
    this.tell(batch);
    if (!batch.is_finished) this.follow().catch(showFault);
  }

  /** Look again and again; each time the service waits a little for the end. */
  async follow() {
    const { signal } = this.stop;
    let batch;
    do {
      batch = await askJson(`${this.path}?wait=${WAIT_S}`, { signal });
      if (signal.aborted) return;
      this.tell(batch);
    } while (!batch.is_finished);
    announce(`The batch has ended: ${batch.counts.succeeded} of ${batch.num_items} succeeded.`);
  }

  tell(batch) {
    const ended = batch.items.filter((item) => !["queued", "running"].includes(item.state)).length;
    const isNews = this.ended !== ended;
    this.ended = ended;
    Object.assign(this.place.dataset, { finished: batch.is_finished, ended });
    this.top.replaceChildren(
      el("div", { class: "head" }, el("h1", {}, batch.name || "Unnamed batch"),
        el("div", { class: "buttons" }, this.actions(batch))),
      el("dl", { class: "facts strong" },
        fact("Done", share(batch.progress)), fact("Items", String(batch.num_items)),
        ...["running", "queued", "succeeded", "infeasible", "failed"]
          .filter((state) => batch.counts[state])
          .map((state) => fact(state[0].toUpperCase() + state.slice(1), String(batch.counts[state])))));
    this.rows.replaceChildren(itemsOf(batch));
    if (isNews && ended) this.draw();
  }

  draw() {
    this.chart.show(`${this.path}/chart`).catch(showFault);
  }

  actions(batch) {
    const csv = button("Save table, CSV", guarded(async () => {
      save(await (await ask(`${this.path}/table?format=csv`)).blob(), `${batch.name || "batch"}.csv`);
    }));
    const stop = button("Cancel", guarded(async () => {
      await ask(`${this.path}/cancel`, { method: "POST" });
    }), { "data-needs": "submit" });
    const again = button("Retry failed", guarded(async () => {
      this.tell(await (await ask(`${this.path}/retry`, { method: "POST" })).json());
      await this.follow();
    }), { "data-needs": "submit" });
    return [batch.is_finished ? null : stop, batch.counts.failed ? again : null, csv];
  }

  close() {
    this.stop.abort();
    this.chart.close();
  }
}

function itemsOf(batch) {
  const axes = Object.keys(batch.axes ?? {});
  const columns = [
    ...(axes.length ? axes.map((axis) => ({ title: axis, number: true })) : [{ title: "Name" }]),
    { title: "State" }, { title: "Memory", number: true }, { title: "Objective ms", number: true },
    { title: "Bound ms", number: true }, { title: "Gap", number: true }, { title: "Remark" }];
  const rows = batch.items.map((item) => ({
    attributes: { "data-state": item.state },
    cells: [
      ...(axes.length
        ? axes.map((axis) => el("a", { href: address({ job: item.job_id }) }, String(item.values[axis])))
        : [el("a", { href: address({ job: item.job_id }) }, item.name || String(item.index))]),
      el("span", { class: `state ${item.state}` }, item.state), bytes(item.memory_bytes),
      ms(item.objective_ms), ms(item.bound_ms), share(item.gap), whyNot(item)],
  }));
  return table("Items of the batch", columns, rows);
}

/** Link the tighter item's job whose schedule an item shows; else say why it has no schedule. */
function whyNot({ error, job_id: own, schedule_job_id: source }) {
  if (source && source !== own) return el("a", { href: address({ job: source }) }, "of a tighter item");
  if (!error) return "";
  return el("span", { title: error.message }, error.message.split("\n")[0].slice(0, 160));
}
