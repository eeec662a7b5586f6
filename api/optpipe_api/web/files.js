// Files: chosen, dropped or pasted. A problem or a config.json fills a form; schedules and traces are drawn.

import { BUBBLE, Chart, onTheme } from "./chart.js";
import { byId, el } from "./dom.js";
import { guarded, showFault } from "./faults.js";
import { MOST_BYTES, go, readParts } from "./link.js";

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

/** Return names and texts of files; those that end in .gz are unpacked, up to the limit of all together. */
async function readAll(list) {
  let left = MOST_BYTES;
  const read = [];
  for (const file of list) {
    const isPacked = file.name.endsWith(".gz");
    const stream = isPacked ? file.stream().pipeThrough(new DecompressionStream("gzip")) : file.stream();
    const parts = await readParts(stream, left).catch(() => {
      throw fault(`${file.name} is no complete gzip file; write it again`);
    });
    if (parts === null) {
      throw fault(`${file.name}: the files have more than ${MOST_BYTES} bytes, which is the limit of this page; `
        + "record fewer steps, or use the command line (optpipe plot, optpipe import)");
    }
    const bytes = new Blob(parts);
    left -= bytes.size;
    read.push({ name: file.name, text: await bytes.text() });
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

// --- Schedules and traces from files, drawn on one time axis.

let opened = null;

/** Keep what the next view shows: `files` of {name, text}, and their `problem` if there is one. */
const setOpened = (value) => { opened = value; };

/** Shows the opened files; a browser gives a page no file again, so that a reload shows how to open some. */
export class OpenedView {
  constructor() {
    [this.opened, opened] = [opened, null];
  }

  async open(host) {
    if (!this.opened) {
      host.replaceChildren(el("section", { id: "opened" }, el("h1", {}, "Open a schedule or the traces of a run"),
        el("ul", { class: "plain" },
          el("li", {}, "A schedule: JSON of OptPipe, or CSV of torch. With its problem it has times and memory."),
          el("li", {}, "Traces: of the PyTorch profiler, one file per rank, or of ",
            el("code", {}, "PipelineRunner"), ". Text or gzip."),
          el("li", {}, "On the page of an answer, they are drawn next to its schedule: measured next to planned.")),
        el("div", { class: "buttons" }, el("label", { class: "button main", for: "open-input" }, "Choose files")),
        el("p", { class: "hint" }, "Or drop them anywhere on the page. They are drawn and not stored.")));
      return;
    }
    this.chart = new Chart("Opened files: lanes of every device over time");
    const names = this.opened.files.map(({ name }) => name);
    const title = names.length > 3 ? `${names[0]} and ${names.length - 1} more files` : names.join(", ");
    host.replaceChildren(el("section", { id: "opened" }, el("h1", {}, title),
      el("div", { class: "bar" }, this.chart.buttons()), this.chart.element,
      el("p", { class: "hint" }, BUBBLE)));
    this.chart.say("Drawing the files.");
    onTheme(() => this.draw());
    await this.draw();
  }

  draw() {
    if (this.chart.isClosed) return undefined;
    return this.chart.show("v1/charts", this.opened).catch((error) => {
      showFault(error);
      if (!this.chart.drawn) this.chart.say("The files cannot be drawn.");
    });
  }

  close() {
    this.chart?.close();
  }
}
