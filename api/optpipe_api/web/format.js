// Numbers as the command line writes them: times in ms, sizes in binary units, shares in percent.

const grouped = new Intl.NumberFormat("en-US", {
  minimumFractionDigits: 1, maximumFractionDigits: 1,
});

/** A time in ms: 2,345.6 or 0.042; a dash where there is none. */
export function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0 || Math.abs(value) >= 100) return grouped.format(value);
  return String(Number(value.toPrecision(4)));
}

/** The same with its unit. */
export const msUnit = (value) => (value === null || value === undefined ? "–" : `${ms(value)} ms`);

/** A size: 74.8 GiB. */
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  if (Math.abs(value) < 1024) return `${value} B`;
  const units = ["KiB", "MiB", "GiB", "TiB", "PiB"];
  let size = value / 1024;
  let at = 0;
  while (Math.abs(size) >= 1024 && at < units.length - 1) {
    size /= 1024;
    at += 1;
  }
  return `${size.toFixed(1)} ${units[at]}`;
}

/** A sentence of the service with its sizes for people: "12345678901 (11.5 GiB)" is 11.5 GiB. */
export const sized = (text) => text.replaceAll(/\b\d+ \((\d+\.\d [KMGTP]iB)\)/g, "$1");

/** A share of one: 9.4%; small ones keep a digit that is not 0. */
export function share(value) {
  if (value === null || value === undefined) return "–";
  const percent = 100 * value;
  const digits = percent !== 0 && Math.abs(percent) < 0.1 ? 3 : 1;
  return `${percent.toFixed(digits)}%`;
}

/** A number with at most so many significant digits. */
export const digits = (value, count = 3) => String(Number(value.toPrecision(count)));

/** Parameters of a model: 8.03 B. */
export const billions = (value) => `${(value / 1e9).toFixed(2)} B`;

/** How long ago a moment was. */
export function ago(iso, now = Date.now()) {
  const seconds = Math.max(0, (now - Date.parse(iso)) / 1000);
  if (seconds < 60) return `${Math.round(seconds)} s ago`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.round(seconds / 3600)} h ago`;
  return new Date(iso).toISOString().slice(0, 10);
}

/** A word for how a job or an item stands. */
export const stateWord = (job) =>
  job.cancel_requested && job.state === "running" ? "cancelling" : job.state;

/** A sentence of the service's as one by itself. */
export const sentence = (said) => `${said[0].toUpperCase()}${said.slice(1)}.`;

/** A number and its noun: 1 stage, 4 stages. */
export const plural = (number, noun, ending = "s") => `${number} ${noun}${number === 1 ? "" : ending}`;
