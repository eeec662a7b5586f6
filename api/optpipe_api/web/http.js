// Requests to the service that serves this page, with the key if there is one. An error has the
// service's code and message.

import { byId } from "./dom.js";

/**
 * A refusal of the service; its message has value, rule and fix. `status` 0: there was no answer.
 * `pointers` are the places in the request, one per line of the message.
 */
export class Fault extends Error {
  constructor(status, code, detail, pointers = []) {
    super(detail);
    Object.assign(this, { status, code, pointers });
  }
}

/**
 * Return the answer to a request, with status 2xx or 304; asks the user for a key after a 401.
 * `options` as of `fetch`; `json` is sent as the body.
 */
export async function ask(path, { json, headers = {}, ...options } = {}) {
  const sent = { ...headers };
  if (json !== undefined) {
    sent["Content-Type"] = "application/json";
    options = { method: "POST", body: JSON.stringify(json), ...options };
  }
  for (;;) {
    const key = storedKey();
    const answer = await reach(path, {
      ...options,
      headers: key ? { ...sent, Authorization: `Bearer ${key}` } : sent,
    });
    if (answer.ok || answer.status === 304) return answer;
    const fault = await faultOf(answer);
    if (answer.status !== 401 || !(await askForKey(fault.message, key))) throw fault;
  }
}

/** Return the answer to a request, read as JSON. */
export const askJson = async (path, options) => (await ask(path, options)).json();

const answers = new Map();

/** Return an answer that never changes while the service runs; requests it once. */
export function askOnce(path) {
  if (!answers.has(path)) {
    answers.set(path, askJson(path).catch((error) => { answers.delete(path); throw error; }));
  }
  return answers.get(path);
}

async function reach(path, options) {
  try {
    return await fetch(path, { cache: "no-cache", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Fault(0, "unreachable", "The service does not answer; check that it runs, and try again.");
  }
}

async function faultOf(answer) {
  try {
    const { detail, code, pointers } = await answer.json();
    return new Fault(answer.status, code, detail, pointers ?? []);
  } catch {
    return new Fault(answer.status, "unknown",
      `The service answered with ${answer.status} and did not say why; its log may.`);
  }
}

// --- The API key of this tab: in its session storage, sent as a header, never in an address.

const KEY_NAME = "optpipe-key";
let asking = null;

/** Return the key, or null. */
const storedKey = () => sessionStorage.getItem(KEY_NAME);

/**
 * Ask whoever is there for a key; return whether there is another now than the one refused.
 * Requests that are refused at the same time wait for one answer.
 */
function askForKey(why, refused = null) {
  if (storedKey() !== refused) return Promise.resolve(true);
  asking ??= showDialog(refused === null ? "" : why).finally(() => { asking = null; });
  return asking;
}

function showDialog(why) {
  const dialog = byId("key-dialog");
  const input = byId("key-input");
  byId("key-why").textContent = why;
  byId("key-button").hidden = false;
  input.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  input.focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const given = input.value.trim();
      const isGiven = dialog.returnValue === "use" && given !== "";
      if (isGiven) sessionStorage.setItem(KEY_NAME, given);
      resolve(isGiven);
    }, { once: true });
  });
}

/** Let the button in the header change the key, once one was asked for. */
export function setUpKeyButton(onChange) {
  const shown = byId("key-button");
  shown.hidden = storedKey() === null;
  shown.addEventListener("click", async () => {
    if (await askForKey("Another key takes the place of the one that is in use.", storedKey())) {
      onChange();
    }
  });
}

// --- Server-sent events over fetch: unlike EventSource it can send a key. Nothing is missed and nothing
// comes twice: whoever reconnects names the last event it has seen.

const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 10_000;

/** Yield the events of a stream, {type, id, data}, until the service says that there are no more. */
export async function* events(path, signal) {
  let last = "";
  let pauseMs = FIRST_PAUSE_MS;
  for (;;) {
    try {
      const headers = { Accept: "text/event-stream", ...(last && { "Last-Event-ID": last }) };
      const answer = await ask(path, { headers, signal, cache: "no-store" });
      if (answer.status === 204) return;
      for await (const event of parsed(answer.body)) {
        last = event.id || last;
        pauseMs = FIRST_PAUSE_MS;
        yield event;
      }
    } catch (error) {
      const isLasting = error instanceof Fault && error.status >= 400 && error.status < 500
        && error.status !== 429;
      if (signal.aborted || isLasting) throw error;
      await pause(pauseMs, signal);
      pauseMs = Math.min(2 * pauseMs, LONGEST_PAUSE_MS);
    }
  }
}

/** Yield the events of a body of bytes. */
async function* parsed(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      const blocks = text.split(/\r?\n\r?\n/);
      text = blocks.pop();
      for (const block of blocks) {
        const event = eventOf(block);
        if (event) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Return the event of a block of lines; null where it is only a sign of life. */
function eventOf(block) {
  const event = { type: "message", id: "", data: "" };
  const data = [];
  for (const line of block.split(/\r?\n/)) {
    if (line.startsWith(":")) continue;
    const [, name, value] = /^([^:]*):? ?(.*)$/.exec(line);
    if (name === "event") event.type = value;
    else if (name === "id") event.id = value;
    else if (name === "data") data.push(value);
  }
  if (!data.length) return null;
  event.data = JSON.parse(data.join("\n"));
  return event;
}

function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    }, { once: true });
  });
}
