// Problem files: chosen, dropped, pasted; and config.json of Hugging Face, which names a shape.

import { byId } from "./dom.js";
import { guarded } from "./faults.js";

const MOST_BYTES = 8 * 1024 * 1024;

/** Let people hand in files; they end up in the form. */
export function setUpFiles(compose) {
  const form = byId("compose");
  byId("file-input").addEventListener("change", guarded(async (event) => {
    const [file] = event.target.files;
    if (file) await take(compose, file);
    event.target.value = "";
  }, "form"));
  byId("paste-button").addEventListener("click", guarded(() =>
    use(compose, byId("paste-text").value, "the pasted text"), "form"));
  form.addEventListener("dragover", (event) => event.preventDefault());
  form.addEventListener("drop", guarded(async (event) => {
    event.preventDefault();
    const [file] = event.dataTransfer.files;
    if (file) await take(compose, file);
  }, "form"));
}

async function take(compose, file) {
  if (file.size > MOST_BYTES) {
    throw problem(`${file.name} has ${file.size} bytes, and a problem may have ${MOST_BYTES}; `
      + "choose a smaller file");
  }
  await use(compose, await file.text(), file.name);
}

async function use(compose, text, name) {
  const data = parsed(text, name);
  const isConfig = "hidden_size" in data || "n_embd" in data || "model_type" in data;
  if (isConfig) {
    compose.preset.use(data, name);
    compose.source = "preset";
    await compose.refresh();
    return;
  }
  // A submission as the API takes it holds the problem inside.
  await compose.use(data.problem ?? data, name);
}

/** Return the JSON of a text; NaN and Infinity, which Python writes into a config.json, as words. */
export const readJson = (text) => JSON.parse(text.replaceAll(
  /("(?:[^"\\]|\\.)*")|-?\b(?:NaN|Infinity)\b/g, (word, quoted) => quoted ?? `"${word}"`));

function parsed(text, name) {
  let data;
  try {
    data = readJson(text);
  } catch (error) {
    throw problem(`${name} is not JSON: ${error.message}; choose a problem file `
      + "(optpipe/problem/v1), as optpipe estimate writes it");
  }
  if (data === null || typeof data !== "object" || Array.isArray(data)) {
    throw problem(`${name} holds no JSON object; choose a problem file (optpipe/problem/v1)`);
  }
  return data;
}

/** An error that is the file's. */
const problem = (message) => Object.assign(new Error(message), { code: "file.invalid" });
