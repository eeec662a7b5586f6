// The page: the form at the left; at the right the view that the address names.

import { BatchView } from "./batch.js";
import { Compose } from "./compose.js";
import { byId } from "./dom.js";
import { clearFault, guarded } from "./faults.js";
import { inAddress } from "./fragment.js";
import { setUpFiles } from "./files.js";
import { askJson } from "./http.js";
import { JobView } from "./job.js";
import { setUpKeyButton } from "./key.js";
import { onGo, read, setUp } from "./link.js";
import { BatchList, JobList } from "./lists.js";
import { problemSummary } from "./problem.js";
import { StartView } from "./start.js";

const result = byId("result");
let shown = null;

const compose = new Compose((view) => {
  byId("about").replaceChildren(problemSummary(view));
  if (isWork(read())) writeAddress();
});
const writeAddress = guarded(() => compose.writeAddress(), "form");

const isWork = (query) => !query.list && !query.batch && !isStart(query);

/** Whether the address names the start: an empty one, or a question to change. */
const isStart = (query) => Boolean(query.ask) || (Object.keys(query).length === 0 && !inAddress());

/** Show the view that an address names. */
const show = guarded(async (query) => {
  clearFault();
  shown?.close();
  shown = viewOf(query);
  mark(query);
  result.replaceChildren();
  if (shown) {
    await shown.open(result);
    if (compose.isLoaded && !hasForm(query)) await fillByQuestion(query.job);
  } else if (compose.isLoaded && compose.differs(query)) await compose.restore(query);
  else if (compose.view) await compose.writeAddress();
});

function viewOf(query) {
  if (isStart(query)) return new StartView(query.ask);
  if (query.job) return new JobView(query.job, query);
  if (query.batch) return new BatchView(query.batch);
  if (query.list === "jobs") return new JobList();
  if (query.list === "batches") return new BatchList();
  return null;
}

function mark(query) {
  const name = query.list ?? (isStart(query) ? "start" : "new");
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.body.dataset.view = isWork(query) ? "work" : "list";
}

/** Whether the address has the form, which is also the request of a job that was submitted there. */
const hasForm = (query) => !query.job || "time_limit_s" in query || Boolean(inAddress());

/** Fill the form from the request of a tune; return whether the job is a tune of one GPU kind. */
async function fillByQuestion(job) {
  const question = await askJson(`v1/jobs/${job}/question`).catch(() => null);
  // The form has one kind of GPU and one number of them.
  if (!question || question.gpu.includes(":") || question.gpu_counts) return false;
  const known = question.current_file && await askJson(`v1/jobs/${job}/configuration`).catch(() => null);
  await compose.tune.show(question, question.current ?? known?.current ?? {});
  return true;
}

/** Fill the form: from the address; else, next to a job, from its request or its problem. */
const fill = guarded(async (query) => {
  await compose.load();
  if (!hasForm(query) && !query.model && await fillByQuestion(query.job)) return;
  // If there is none, the view says why.
  const problem = query.job && !query.model && !inAddress()
    ? await askJson(`v1/jobs/${query.job}/problem`).catch(() => null) : null;
  if (problem) await compose.use(problem, "The problem of this job.", { isOfJob: true });
  else await restore(query);
}, "form");

/** Fill the form from the address; from a damaged one as at a first visit, and show the fault. */
async function restore(query) {
  try {
    await compose.restore(query);
  } catch (error) {
    if (error.code !== "link.broken") throw error;
    history.replaceState(null, "", location.search || "?");
    await compose.restore(query);
    throw error;
  }
}

/** Set the key's role for all parts of the page: a key that may only read has no button to submit. */
const setRole = guarded(async () => {
  const { role } = await askJson("v1/key");
  document.body.dataset.role = role;
}, "form");

setUp();
setUpFiles(compose);
setUpKeyButton(() => location.reload());
onGo(show);
const query = read();
await setRole();
await Promise.all([show(query), fill(query)]);
document.body.dataset.ready = "yes";
