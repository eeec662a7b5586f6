// Form controls: numbers, choices, and sliders over a list of stops.

import { el } from "./dom.js";

/** A labelled number of one field. */
export function numberField(name, label, value, attributes = {}) {
  return el("label", {}, label,
    el("input", { type: "number", name, value, required: true, min: 1, step: 1, ...attributes }));
}

/** A labelled choice; `choices` are texts or [value, text]. */
export function choiceField(name, label, choices, value, attributes = {}) {
  const options = choices.map((choice) => {
    const [key, text] = Array.isArray(choice) ? choice : [choice, choice];
    return el("option", { value: key, selected: String(key) === String(value) }, text);
  });
  return el("label", {}, label, el("select", { name, ...attributes }, options));
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
      oninput: () => { this.tell(this.problem); onChange(); },
    });
    this.output = el("output", { for: this.input.id });
    this.element = el("div", { class: "slider" },
      el("label", { for: this.input.id }, label), this.output, this.input);
    this.value = neutral;
  }

  get value() {
    return this.stops[Number(this.input.value)];
  }

  /** The nearest stop to a value. */
  set value(wanted) {
    const exact = this.stops.indexOf(wanted);
    const distance = (stop) => Math.abs((Number(stop) || 0) - wanted);
    const nearest = this.stops.reduce((best, stop, index) =>
      (distance(stop) < distance(this.stops[best]) ? index : best), 0);
    this.input.value = exact >= 0 ? exact : nearest;
    this.tell(this.problem);
  }

  get isNeutral() {
    return this.value === this.neutral;
  }

  /** Say what the value means for a problem as it was before it was varied. */
  tell(problem) {
    this.problem = problem;
    const text = this.describe(this.value, problem);
    this.output.textContent = text;
    this.input.setAttribute("aria-valuetext", text);
  }

  /** Let it be used only where it changes something; say so where not. */
  enable(isUseful) {
    this.input.disabled = !isUseful;
    this.element.classList.toggle("off", !isUseful);
  }
}
