// The address says what is shown: a job or a batch, what stands beside it, the zoom, and the form.

const listeners = [];

/** Return what the address says, as an object of texts. */
export const read = () => Object.fromEntries(new URLSearchParams(location.search));

/** Return the address of a view; null, undefined and "" are left out. */
export function address(state) {
  const told = Object.entries(state).filter(([, value]) =>
    value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(told.map(([name, value]) => [name, String(value)]));
  return `?${query}`;
}

/** Change parts of the address without leaving the view; null takes a part out. */
export function amend(changes, fragment = location.hash) {
  history.replaceState(null, "", address({ ...read(), ...changes }) + fragment);
}

/** Say what part of the time axis is seen, {start, end} in ms; null is all of it. */
export function amendZoom(zoom) {
  amend({ from: zoom?.start.toFixed(3), to: zoom?.end.toFixed(3) });
}

/** Go to another view; the browser's back button returns. */
export function go(state) {
  history.pushState(null, "", address(state));
  tell();
}

/** Call a function whenever another view is to be shown. */
export function onGo(listener) {
  listeners.push(listener);
}

function tell() {
  for (const listener of listeners) listener(read());
}

/** Follow links of the page without loading it again, and the browser's buttons. */
export function setUp() {
  addEventListener("popstate", tell);
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("a[href^='?']");
    const isPlain = !(event.ctrlKey || event.metaKey || event.shiftKey || event.button);
    if (!link || !isPlain) return;
    event.preventDefault();
    history.pushState(null, "", link.getAttribute("href"));
    tell();
  });
}

// --- What the form holds and no name stands for, in the fragment of the address: a problem of a file, a
// model's config. Compressed, as text that survives a chat; browsers never send it to a server.

const FRAGMENT = "#form=";
const MOST_CHARS = 16_000;
/** Of what the page reads at once, from a link or from files. */
export const MOST_BYTES = 8 * 1024 * 1024;

/** Return what stands in the address, as text; "" where nothing does. */
export const inAddress = () => (location.hash.startsWith(FRAGMENT) ? location.hash : "");

/** Return a value as a fragment; null where it is too long for a link. */
export async function packed(value) {
  const bytes = new Blob([JSON.stringify(value)]).stream();
  const parts = await readParts(bytes.pipeThrough(new CompressionStream("deflate-raw")), MOST_CHARS);
  if (parts === null) return null;
  const text = btoa(parts.map((part) => String.fromCharCode(...part)).join(""));
  const fragment = FRAGMENT + text.replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
  return fragment.length <= MOST_CHARS ? fragment : null;
}

/** Return the value of a fragment. */
export async function unpacked(fragment) {
  try {
    const text = fragment.slice(FRAGMENT.length).replaceAll("-", "+").replaceAll("_", "/");
    const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
    const stream = new Blob([bytes]).stream();
    const parts = await readParts(stream.pipeThrough(new DecompressionStream("deflate-raw")), MOST_BYTES);
    if (parts === null) throw new Error(`it holds more than ${MOST_BYTES} bytes`);
    const value = JSON.parse(await new Blob(parts).text());
    if (!value.problem && !value.config) throw new Error("it holds neither problem nor config");
    return value;
  } catch (error) {
    const why = error.message || error.name;
    throw Object.assign(new Error("The problem in this link cannot be read, as the link is damaged "
      + `or cut off: ${why}; copy the whole link again, or choose the problem's file.`),
    { code: "link.broken" });
  }
}

/** Return the parts of a stream of bytes; null where they are too many. */
export async function readParts(stream, most) {
  const reader = stream.getReader();
  const parts = [];
  let size = 0;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return parts;
    size += value.length;
    if (size > most) {
      reader.cancel().catch(() => {});
      return null;
    }
    parts.push(value);
  }
}
