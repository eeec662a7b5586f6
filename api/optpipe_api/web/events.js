// Server-sent events over fetch: unlike EventSource it can send a key. Nothing is missed and nothing
// comes twice: whoever reconnects names the last event it has seen.

import { Fault, ask } from "./http.js";

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
export function eventOf(block) {
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
