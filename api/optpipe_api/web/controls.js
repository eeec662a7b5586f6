// Form controls: those of a request's fields, choices, and sliders over a list of stops.

import { el } from "./dom.js";

// HTML has no exclusive limits: an input's limit is this much inside of one.
const INSIDE = 0.001;

/**
 * Return the controls of a request's fields, as `fields` of `/v1/presets` describes them.
 *
 * `listed` has [name, label, own] in order; `more` has further own attributes by name. `own` is how
 * a control differs from the field:
 * `start`, its first value ("" for none); `choices` of a text; `texts` of choices, that of "" where
 * nothing is chosen; `scale`, the input's unit in that of the field; `prefix` of its name; attributes.
 */
export const controls = (fields, listed, more = {}) => listed.map(([name, label, own]) =>
  el("label", {}, label, control(fields[name], name, { ...own, ...more[name] })));

/** Return the input of one field, without a label. */
export function control(field, name, own = {}) {
  const { start = field.default ?? "", choices, texts = {}, scale = 1, prefix = "", ...attributes } = own;
  const common = { name: prefix + name, title: field.description.replaceAll("`", "") || null, ...attributes };
  const listed = choices ?? field.choices ?? (field.kind === "boolean" ? ["false", "true"] : null);
  const isOptional = start === "";
  if (listed) return select(isOptional ? ["", ...listed] : listed, start, common, { "": "–", ...texts });
  const limit = (inclusive, exclusive, inside) =>
    (inclusive === null && exclusive === null ? null : (inclusive ?? exclusive + inside) / scale);
  return el("input", { type: field.kind === "text" ? null : "number", value: start,
    min: limit(field.minimum, field.exclusive_minimum, INSIDE),
    max: limit(field.maximum, field.exclusive_maximum, -INSIDE),
    step: field.kind === "integer" && scale === 1 ? 1 : "any",
    required: !isOptional, placeholder: isOptional ? field.default : null, ...common });
}

/** Return the values of a request's fields from the texts of their controls, without empty ones. */
export const valuesOf = (fields, texts) => Object.fromEntries(Object.entries(texts)
  .filter(([, text]) => text !== "").map(([name, text]) => [name, valueOf(fields[name], text)]));

function valueOf({ kind }, text) {
  if (kind === "boolean") return text === "true";
  return kind === "text" ? text : Number(text);
}

/** Return the names of listed fields. */
export const namesOf = (...lists) => lists.flat().map(([name]) => name);

/** Return the entries of an object that have one of the names. */
export const pick = (values, names) => Object.fromEntries(
  names.filter((name) => name in values).map((name) => [name, values[name]]));

/** Return a labelled choice; `choices` are texts or [value, text]. */
export const choiceField = (name, label, choices, value, attributes = {}) =>
  el("label", {}, label, select(choices, value, { name, ...attributes }));

function select(choices, value, attributes, texts = {}) {
  return el("select", attributes, choices.map((choice) => {
    const [key, text] = Array.isArray(choice) ? choice : [choice, texts[choice] ?? choice];
    return el("option", { value: key, selected: String(key) === String(value) }, text);
  }));
}

/**
 * A slider over stops, one of which leaves the problem as it is.
 *
 * `axis`: a name of `/v1/variants`; `stops`: its values, in order; `neutral`: the stop that is not
 * sent; `describe(value, problem)`: what a stop means for a problem.
 */
export class Slider {
  constructor({ axis, label, stops, neutral, describe }, onChange) {
    Object.assign(this, { axis, stops, neutral, describe });
    this.input = el("input", {
      type: "range", id: `slider-${axis}`, min: 0, max: stops.length - 1, step: 1,
      "data-axis": axis,
      oninput: () => { this.describeValue(this.problem); onChange(); },
    });
    this.output = el("output", { for: this.input.id });
    this.element = el("div", { class: "slider" },
      el("label", { for: this.input.id }, label), this.output, this.input);
    this.value = neutral;
  }

  get value() {
    return this.stops[Number(this.input.value)];
  }

  /** Move to the nearest stop to a value. */
  set value(wanted) {
    const exact = this.stops.indexOf(wanted);
    const distance = (stop) => Math.abs((Number(stop) || 0) - wanted);
    const nearest = this.stops.reduce((best, stop, index) =>
      (distance(stop) < distance(this.stops[best]) ? index : best), 0);
    this.input.value = exact >= 0 ? exact : nearest;
    this.describeValue(this.problem);
  }

  get isNeutral() {
    return this.value === this.neutral;
  }

  /** Show what the value means for a problem before it is varied. */
  describeValue(problem) {
    this.problem = problem;
    const text = this.describe(this.value, problem);
    this.output.textContent = text;
    this.input.setAttribute("aria-valuetext", text);
  }

  /** Enable the slider only if it changes something. */
  enable(isUseful) {
    this.input.disabled = !isUseful;
    this.element.classList.toggle("off", !isUseful);
  }
}
