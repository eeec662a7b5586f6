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
