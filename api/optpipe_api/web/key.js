// The API key of this tab: in its session storage, sent as a header, never in an address.

import { byId } from "./dom.js";

const NAME = "optpipe-key";
let asking = null;

/** Return the key, or null. */
export const storedKey = () => sessionStorage.getItem(NAME);

/**
 * Ask whoever is there for a key; return whether there is another now than the one refused.
 * Requests that are refused at the same time wait for one answer.
 */
export function askForKey(why, refused = null) {
  if (storedKey() !== refused) return Promise.resolve(true);
  asking ??= showDialog(refused === null ? "" : why).finally(() => { asking = null; });
  return asking;
}

function showDialog(why) {
  const dialog = byId("key-dialog");
  const input = byId("key-input");
  byId("key-why").textContent = why;
  byId("key-button").hidden = false;
  input.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  input.focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const given = input.value.trim();
      const isGiven = dialog.returnValue === "use" && given !== "";
      if (isGiven) sessionStorage.setItem(NAME, given);
      resolve(isGiven);
    }, { once: true });
  });
}

/** Let the button in the header change the key, once one was asked for. */
export function setUpKeyButton(onChange) {
  const shown = byId("key-button");
  shown.hidden = storedKey() === null;
  shown.addEventListener("click", async () => {
    if (await askForKey("Another key takes the place of the one that is in use.", storedKey())) {
      onChange();
    }
  });
}
