// The methods of the service, and their titles.

import { askOnce } from "./http.js";

/** Return the methods, {name, title, description}. */
export const methods = async () => (await askOnce("v1/methods")).methods;

/** Return a function from a method's name to its title; names that the service does not know stay. */
export async function titles() {
  const found = new Map((await methods()).map(({ name, title }) => [name, title]));
  return (name) => found.get(name) ?? name;
}
