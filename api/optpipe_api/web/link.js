// The address says what is shown: a job or a batch, what stands beside it, the zoom, and the form
// (of which `fragment.js` keeps what has no name).

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
