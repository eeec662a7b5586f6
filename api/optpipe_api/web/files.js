// Files: chosen, dropped or pasted. A problem or a config.json fills a form; schedules and traces are drawn.

import { byId } from "./dom.js";
import { guarded } from "./faults.js";
import { go } from "./link.js";
import { setOpened } from "./opened.js";

const MOST_BYTES = 8 * 1024 * 1024;

/** Let people hand in files; `shownView` returns the view that is shown, null for the form. */
export function setUpFiles(compose, shownView) {
  byId("file-input").addEventListener("change", guarded(async (event) => {
    const [file] = await readAll(event.target.files);
    if (file) await use(compose, parsed(file), file.name);
    event.target.value = "";
  }, "form"));
  byId("paste-button").addEventListener("click", guarded(() => {
    const file = { name: "the pasted text", text: byId("paste-text").value };
    return use(compose, parsed(file), file.name);
  }, "form"));
  const take = guarded(async (list) => open(compose, shownView(), await readAll(list)), "form");
  byId("open-input").addEventListener("change", async (event) => {
    await take(event.target.files);
    event.target.value = "";
  });
  const hint = byId("drop");
  document.addEventListener("dragover", (event) => {
    event.preventDefault();
    hint.hidden = !event.dataTransfer.types.includes("Files");
  });
  document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) hint.hidden = true; });
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    hint.hidden = true;
    if (event.dataTransfer.files.length) take(event.dataTransfer.files);
  });
}

/** Show files: a lone problem or config.json in its form, schedules and traces as a chart. */
async function open(compose, view, files) {
  const isForm = (file) => ["problem", "config"].includes(file.kind);
  const known = files.map((file) => ({ ...file, ...kindOf(file) }));
  const problem = known.find(isForm);
  const drawn = known.filter((file) => !isForm(file)).map(({ name, text }) => ({ name, text }));
  if (drawn.length) {
    if (view?.showFiles && !problem) return view.showFiles(drawn);
    setOpened({ files: drawn, problem: problem ? problemOf(problem) : view ? undefined : compose.view?.problem });
    return go({ view: "open" });
  }
  if (problem?.kind === "config" && view?.use) return view.use(problem.data, problem.name);
  await compose.load();
  await use(compose, problem.data, problem.name);
  if (view) go({ view: "schedule" });
  return undefined;
}

/** Return what a file is by its content, and its JSON if that is needed here. */
function kindOf(file) {
  if (!/^\s*\{/.test(file.text)) return { kind: "drawn" };
  const data = parsed(file);
  if (isConfig(data)) return { kind: "config", data };
  const isDrawn = "traceEvents" in data || "programs" in data;
  return isDrawn ? { kind: "drawn" } : { kind: "problem", data };
}

const isConfig = (data) => "hidden_size" in data || "n_embd" in data || "model_type" in data;

function problemOf({ kind, data, name }) {
  if (kind === "problem") return data.problem ?? data;
  throw fault(`${name} is a config.json, and a schedule needs a problem; drop a problem file instead`);
}

async function use(compose, data, name) {
  if (isConfig(data)) {
    compose.preset.use(data, name);
    compose.source = "preset";
    await compose.refresh();
    return;
  }
  // A submission as the API takes it holds the problem inside.
  await compose.use(data.problem ?? data, name);
}

/** Return names and texts of files; those that end in .gz are unpacked. */
async function readAll(list) {
  let left = MOST_BYTES;
  const read = [];
  for (const file of list) {
    const isPacked = file.name.endsWith(".gz");
    const stream = isPacked ? file.stream().pipeThrough(new DecompressionStream("gzip")) : null;
    left -= file.size;
    const text = left < 0 ? "" : await (stream ? new Response(stream) : file).text().catch(() => {
      throw fault(`${file.name} is no complete gzip file; write it again`);
    });
    if (isPacked) left -= text.length - file.size;
    if (left < 0) {
      throw fault(`${file.name}: the files have more than ${MOST_BYTES} bytes, which is the limit of this page; `
        + "record fewer steps, or use the command line (optpipe plot, optpipe import)");
    }
    read.push({ name: file.name, text });
  }
  return read;
}

/** Return the JSON of a text; NaN and Infinity, which Python writes into a config.json, as words. */
export const readJson = (text) => JSON.parse(text.replaceAll(
  /("(?:[^"\\]|\\.)*")|-?\b(?:NaN|Infinity)\b/g, (word, quoted) => quoted ?? `"${word}"`));

function parsed({ name, text }) {
  let data;
  try {
    data = readJson(text);
  } catch (error) {
    throw fault(`${name} is not JSON: ${error.message}; choose a problem file `
      + "(optpipe/problem/v1), as optpipe estimate writes it");
  }
  if (data === null || typeof data !== "object" || Array.isArray(data)) {
    throw fault(`${name} holds no JSON object; choose a problem file (optpipe/problem/v1)`);
  }
  return data;
}

/** Return an error that a file causes. */
const fault = (message) => Object.assign(new Error(message), { code: "file.invalid" });
