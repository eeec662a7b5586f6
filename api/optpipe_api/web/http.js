// Requests to the service this page came from: with the key, where there is one, and with faults
// as errors that say what the service said.

import { askForKey, storedKey } from "./key.js";

/** What the service refused: `detail` says value, rule and fix; `status` 0 = nobody answered. */
export class Fault extends Error {
  constructor(status, code, detail) {
    super(detail);
    this.status = status;
    this.code = code;
  }
}

/**
 * Return the answer to a request, whose status is 2xx or 304; asks for a key where one is wanted.
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

/** Return what a request is answered with, read as JSON. */
export const askJson = async (path, options) => (await ask(path, options)).json();

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
    const { detail, code } = await answer.json();
    return new Fault(answer.status, code, detail);
  } catch {
    return new Fault(answer.status, "unknown",
      `The service answered with ${answer.status} and did not say why; its log may.`);
  }
}
