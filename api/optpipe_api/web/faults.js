// Errors, shown as sentences: what is wrong, the rule, what to do.

import { byId, button, el } from "./dom.js";

let number = 0;

/** Return the number of the last error: what was asked before the next one puts only this away. */
export const lastFault = () => number;

/** Show an error until something goes well where it came from, or until it is put away. */
export function showFault(error, source = "view") {
  if (error?.name === "AbortError") return;
  const place = byId("fault");
  const lines = String(error?.message ?? error).split("\n").filter(Boolean);
  const said = lines.length > 1
    ? el("ul", {}, lines.map((line) => el("li", {}, line)))
    : el("p", {}, lines[0] ?? "Something failed, and did not say what.");
  place.replaceChildren(said, button("Dismiss", () => clearFault(source), { class: "quiet" }));
  number += 1;
  Object.assign(place.dataset, { code: error?.code ?? "", source });
  place.hidden = false;
  if (!(error?.code)) console.error(error);
}

/** Put an error away that came from there, the "view" or the "form", unless it is a later one. */
export function clearFault(source = "view", last = number) {
  const place = byId("fault");
  if (place.dataset.source !== source || number > last) return;
  place.hidden = true;
  place.replaceChildren();
}

/** Return a listener that shows what goes wrong in an action. */
export const guarded = (action, source) => async (...args) => {
  try {
    return await action(...args);
  } catch (error) {
    showFault(error, source);
    return undefined;
  }
};
