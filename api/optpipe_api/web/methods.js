// The methods of the service, and what they are called.

import { askJson } from "./http.js";

let asked = null;

/** Return the methods, {name, title, description}; asks the service once. */
export function methods() {
  asked ??= askJson("v1/methods").then((answer) => answer.methods).catch((error) => {
    asked = null;
    throw error;
  });
  return asked;
}

/** Return what says how a method is called; names that the service does not know stay. */
export async function titles() {
  const found = new Map((await methods()).map(({ name, title }) => [name, title]));
  return (name) => found.get(name) ?? name;
}
