// What the service knows by name: models, accelerators, and the fields of its requests.

import { bytes } from "./format.js";
import { askOnce } from "./http.js";

/** Return {fields, choices}: fields by request and name; for `controls`, the models and GPUs. */
export async function catalogue() {
  const { models, gpus, fields } = await askOnce("v1/presets");
  const gpuChoices = gpus.map(({ name, memory_bytes }) => [name, `${name} · ${bytes(memory_bytes)}`]);
  return { fields,
    choices: { model: { choices: models.map(({ name }) => name) }, gpu: { choices: gpuChoices } } };
}

// --- The methods of the service, and their titles.

/** Return the methods, {name, title, description}. */
export const methods = async () => (await askOnce("v1/methods")).methods;

/** Return a function from a method's name to its title; names that the service does not know stay. */
export async function titles() {
  const found = new Map((await methods()).map(({ name, title }) => [name, title]));
  return (name) => found.get(name) ?? name;
}
