// What the form holds and no name stands for, in the fragment of the address: a problem of a file, a
// model's config. Compressed, as text that survives a chat; browsers never send it to a server.

const NAME = "#form=";
const MOST_CHARS = 16_000;
const MOST_BYTES = 8 * 1024 * 1024;

/** Return what stands in the address, as text; "" where nothing does. */
export const inAddress = () => (location.hash.startsWith(NAME) ? location.hash : "");

/** Return a value as a fragment; null where it is too long for a link. */
export async function packed(value) {
  const bytes = new Blob([JSON.stringify(value)]).stream();
  const parts = await read(bytes.pipeThrough(new CompressionStream("deflate-raw")), MOST_CHARS);
  if (parts === null) return null;
  const text = btoa(parts.map((part) => String.fromCharCode(...part)).join(""));
  const fragment = NAME + text.replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
  return fragment.length <= MOST_CHARS ? fragment : null;
}

/** Return the value of a fragment. */
export async function unpacked(fragment) {
  try {
    const text = fragment.slice(NAME.length).replaceAll("-", "+").replaceAll("_", "/");
    const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
    const stream = new Blob([bytes]).stream();
    const parts = await read(stream.pipeThrough(new DecompressionStream("deflate-raw")), MOST_BYTES);
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
async function read(stream, most) {
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
