// The page: the form at the left, and at the right what the address says.

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
  if (isWork(read())) tellAddress();
});
const tellAddress = guarded(() => compose.tellAddress(), "form");

const isWork = (told) => !told.list && !told.batch && !isStart(told);

/** The start: nothing is said yet, or what was asked before is to be asked otherwise. */
const isStart = (told) => Boolean(told.ask) || (Object.keys(told).length === 0 && !inAddress());

/** Show what the address says. */
const show = guarded(async (told) => {
  clearFault();
  shown?.close();
  shown = viewOf(told);
  mark(told);
  result.replaceChildren();
  if (shown) {
    await shown.open(result);
    if (compose.isLoaded && !saysForm(told)) await fillByQuestion(told.job);
  } else if (compose.isLoaded && compose.differs(told)) await compose.restore(told);
  else if (compose.view) await compose.tellAddress();
});

function viewOf(told) {
  if (isStart(told)) return new StartView(told.ask);
  if (told.job) return new JobView(told.job, told);
  if (told.batch) return new BatchView(told.batch);
  if (told.list === "jobs") return new JobList();
  if (told.list === "batches") return new BatchList();
  return null;
}

function mark(told) {
  const name = told.list ?? (isStart(told) ? "start" : "new");
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.body.dataset.view = isWork(told) ? "work" : "list";
}

/** Whether the address says what stands in the form, which is also the question of a job from there. */
const saysForm = (told) => !told.job || "time_limit_s" in told || Boolean(inAddress());

/** Let the form show the question that a tune answers; return whether the job is a tune of one GPU kind. */
async function fillByQuestion(job) {
  const question = await askJson(`v1/jobs/${job}/question`).catch(() => null);
  // The form has one kind of GPU.
  if (!question || question.gpu.includes(":")) return false;
  const known = question.current_file && await askJson(`v1/jobs/${job}/configuration`).catch(() => null);
  await compose.tune.show(question, question.current ?? known?.current ?? {});
  return true;
}

/** Fill the form: from the address; else, beside a job, with its question or its problem. */
const fill = guarded(async (told) => {
  await compose.load();
  if (!saysForm(told) && !told.model && await fillByQuestion(told.job)) return;
  // Where there is none, the view says why.
  const problem = told.job && !told.model && !inAddress()
    ? await askJson(`v1/jobs/${told.job}/problem`).catch(() => null) : null;
  if (problem) await compose.use(problem, "The problem of this job.", { isOfJob: true });
  else await restore(told);
}, "form");

/** Take the form from the address; from a damaged one, what a first visit shows, and the fault. */
async function restore(told) {
  try {
    await compose.restore(told);
  } catch (error) {
    if (error.code !== "link.broken") throw error;
    history.replaceState(null, "", location.search || "?");
    await compose.restore(told);
    throw error;
  }
}

/** Say to all parts of the page what the key may do: who may only read has no button to submit. */
const tellRole = guarded(async () => {
  const { role } = await askJson("v1/key");
  document.body.dataset.role = role;
}, "form");

setUp();
setUpFiles(compose);
setUpKeyButton(() => location.reload());
onGo(show);
const told = read();
await tellRole();
await Promise.all([show(told), fill(told)]);
document.body.dataset.ready = "yes";
