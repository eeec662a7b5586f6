// Requests to the service that serves this page, with the key if there is one. An error has the
// service's code and message.

import { askForKey, storedKey } from "./key.js";

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
