// The page: the view that the address names; the form of a schedule has the problem next to it.

import { BatchView } from "./batch.js";
import { Compose } from "./compose.js";
import { byId } from "./dom.js";
import { clearFault, guarded } from "./faults.js";
import { OpenedView, setUpFiles } from "./files.js";
import { askJson, setUpKeyButton } from "./http.js";
import { JobView } from "./job.js";
import { inAddress, onGo, read, setUp } from "./link.js";
import { BatchList, JobList } from "./lists.js";
import { problemSummary } from "./question.js";
import { StartView } from "./start.js";

const result = byId("result");
let shown = null;

const compose = new Compose((view) => {
  byId("about").replaceChildren(problemSummary(view));
  if (!shown) writeAddress();
});
const writeAddress = guarded(() => compose.writeAddress(), "form");

/** Whether the address names the start: an empty one, or a question to change. */
const isStart = (query) => Boolean(query.ask) || (Object.keys(query).length === 0 && !inAddress());

/** Show the view that an address names. */
const show = guarded(async (query) => {
  clearFault();
  clearFault("form");
  shown?.close();
  shown = viewOf(query);
  mark(query);
  result.replaceChildren();
  if (shown) await shown.open(result);
  else await guarded(() => compose.open(query), "form")();
});

function viewOf(query) {
  if (isStart(query)) return new StartView(query.ask);
  if (query.job) return new JobView(query.job, query);
  if (query.batch) return new BatchView(query.batch);
  if (query.view === "open") return new OpenedView();
  if (query.list === "jobs") return new JobList();
  if (query.list === "batches") return new BatchList();
  return null;
}

function mark(query) {
  const name = query.list ?? (query.view === "open" ? "open" : isStart(query) ? "start" : shown ? "" : "new");
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.body.dataset.view = shown ? "one" : "form";
}

/** Set the key's role for all parts of the page: a key that may only read has no button to submit. */
const setRole = guarded(async () => {
  const { role } = await askJson("v1/key");
  document.body.dataset.role = role;
}, "form");

setUp();
setUpFiles(compose, () => shown);
setUpKeyButton(() => location.reload());
onGo(show);
await setRole();
await show(read());
document.body.dataset.ready = "yes";
