// Errors, shown as sentences: what is wrong, the rule, what to do.

import { byId, button, el } from "./dom.js";

/** Show an error until the next thing goes well or it is put away. */
export function showFault(error) {
  if (error?.name === "AbortError") return;
  const place = byId("fault");
  const lines = String(error?.message ?? error).split("\n").filter(Boolean);
  const said = lines.length > 1
    ? el("ul", {}, lines.map((line) => el("li", {}, line)))
    : el("p", {}, lines[0] ?? "Something failed, and did not say what.");
  place.replaceChildren(said, button("Dismiss", clearFault, { class: "quiet" }));
  place.dataset.code = error?.code ?? "";
  place.hidden = false;
  if (!(error?.code)) console.error(error);
}

/** Put the error away. */
export function clearFault() {
  const place = byId("fault");
  place.hidden = true;
  place.replaceChildren();
}

/** Return a listener that shows what goes wrong in an action. */
export const guarded = (action) => async (...args) => {
  try {
    return await action(...args);
  } catch (error) {
    showFault(error);
    return undefined;
  }
};
