// Errors, shown as sentences (value, rule, fix), next to the reader; the field of an error gets the focus.

import { button, byId, el } from "./dom.js";

let number = 0;

/** Return the number of the last error: a request made before the next error clears only this one. */
export const lastFault = () => number;

/** Show an error until a later action of its source succeeds, or until somebody dismisses it. */
export function showFault(error, source = "view") {
  if (error?.name === "AbortError") return;
  const place = byId("fault");
  const lines = String(error?.message ?? error).split("\n").filter(Boolean);
  const said = lines.length > 1
    ? el("ul", {}, lines.map((line) => el("li", {}, line)))
    : el("p", {}, lines[0] ?? "Something failed without a message. The console of the browser may say more.");
  place.replaceChildren(said, button("Dismiss", () => clearFault(source), { class: "quiet" }));
  number += 1;
  Object.assign(place.dataset, { code: error?.code ?? "", source });
  place.hidden = false;
  markFields(error?.pointers ?? []);
  if (!(error?.code)) console.error(error);
}

/** Clear an error of the source "view" or "form", unless it is later than `last`. */
export function clearFault(source = "view", last = number) {
  const place = byId("fault");
  if (place.dataset.source !== source || number > last) return;
  place.hidden = true;
  place.replaceChildren();
  markFields([]);
}

/** Mark the visible controls that JSON pointers name; scroll to the first of them and focus it. */
function markFields(pointers) {
  for (const input of document.querySelectorAll("[aria-invalid]")) input.removeAttribute("aria-invalid");
  const found = pointers.map(fieldOf).filter(Boolean);
  for (const input of found) input.setAttribute("aria-invalid", "true");
  const [first] = found;
  if (!first) return;
  for (let part = first.closest("details"); part; part = part.parentElement.closest("details")) part.open = true;
  first.scrollIntoView({ block: "center" });
  first.focus({ preventScroll: true });
}

/** Return the control of a place in a request: /current/ep is current_ep, /current the first of its controls. */
function fieldOf(pointer) {
  const form = [...document.querySelectorAll("#ask, #compose")].find((one) => one.offsetParent);
  const names = pointer.split("/").slice(1);
  if (!form || !names[0]) return null;
  const last = CSS.escape(names.at(-1));
  return form.querySelector(`[name="${CSS.escape(names.join("_"))}"]`)
    ?? form.querySelector(`[name="${last}"], [data-axis="${last}"]`)
    ?? form.querySelector(`[name^="${CSS.escape(names[0])}_"]`);
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
