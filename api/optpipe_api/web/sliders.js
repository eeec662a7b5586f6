// "What if": the axes along which a problem is varied. The service varies it; see /v1/variants.

import { choiceField, Slider } from "./controls.js";
import { byId, el } from "./dom.js";
import { bytes, digits } from "./format.js";

const FACTORS = [0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.25, 1.5,
  1.75, 2, 2.5, 3, 4];
const PERCENTS = Array.from({ length: 191 }, (_, index) => (index + 10) / 100);
const MICROBATCHES = [...Array.from({ length: 64 }, (_, index) => index + 1), 72, 80, 96, 112, 128,
  160, 192, 224, 256, 320, 384, 448, 512];
const LATENCIES = ["as given", 0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50];

const least = (values) => Math.min(...values.filter((value) => value !== null));

function memory(value, problem) {
  const percent = `${Math.round(100 * value)}%`;
  if (!problem) return percent;
  return `${percent} · ${bytes(Math.max(...problem.devices.map((d) => d.memory_bytes)) * value)}`;
}

function bus(value, problem) {
  const rates = problem?.devices.map((device) => device.d2h_gb_per_s) ?? [];
  const rate = least(rates);
  return Number.isFinite(rate) ? `×${value} · ${digits(rate * value)} GB/s` : `×${value}`;
}

function network(value, problem) {
  const rate = least(problem?.links.map((link) => link.bandwidth_gb_per_s) ?? []);
  return Number.isFinite(rate) ? `×${value} · ${digits(rate * value)} GB/s` : `×${value}`;
}

function latency(value, problem) {
  if (value !== "as given") return `${value} ms`;
  const most = Math.max(0, ...(problem?.links.map((link) => link.latency_ms) ?? []));
  return `as given · ${digits(most)} ms`;
}

const AXES = [
  { axis: "num_microbatches", label: "Micro-batches", stops: ["as given", ...MICROBATCHES],
    neutral: "as given",
    describe: (value, problem) => (value === "as given" && problem
      ? `as given · ${problem.num_microbatches}` : String(value)) },
  { axis: "memory_scale", label: "Memory limit", stops: PERCENTS, neutral: 1, describe: memory },
  { axis: "pcie_scale", label: "PCIe bandwidth", stops: FACTORS, neutral: 1, describe: bus },
  { axis: "link_scale", label: "Communication bandwidth", stops: FACTORS, neutral: 1,
    describe: network },
  { axis: "latency_ms", label: "Communication latency", stops: LATENCIES, neutral: "as given",
    describe: latency },
];
const SWITCHES = [["offload", "Offload activations"], ["recompute", "Recompute activations"]];

// What a preset's own fields say.
const OF_PRESETS = ["num_microbatches", "placement"];

/** The sliders and switches; `values` of those that are moved are sent. */
export class Sliders {
  constructor(onChange) {
    this.sliders = AXES.map((axis) => new Slider(axis, onChange));
    this.placement = choiceField("placement_axis", "Placement", [
      ["", "as given"], ["linear", "linear"], ["loop", "loop"], ["v", "V"]], "",
    { onchange: onChange });
    this.switches = SWITCHES.map(([axis, text]) => [axis, el("input", {
      type: "checkbox", "data-axis": axis, checked: true, onchange: onChange }), text]);
    byId("sliders").append(
      ...this.sliders.map((slider) => slider.element),
      el("div", { class: "fields" }, this.placement),
      ...this.switches.map(([, input, text]) => el("label", { class: "switch" }, input, text)));
    // Until there is a problem nobody knows which of them change it.
    this.show(null, [...Sliders.names, ...OF_PRESETS], true);
  }

  get values() {
    const found = {};
    for (const slider of this.sliders) {
      if (!slider.isNeutral && !slider.input.disabled) found[slider.axis] = slider.value;
    }
    const placement = this.placement.querySelector("select");
    if (placement.value && !placement.disabled) found.placement = placement.value;
    for (const [axis, input] of this.switches) {
      if (!input.checked && !input.disabled) found[axis] = false;
    }
    return found;
  }

  /** Move them to values; those not named leave the problem as it is. */
  set values(wanted) {
    for (const slider of this.sliders) {
      const value = wanted[slider.axis];
      slider.value = value === undefined ? slider.neutral : Number(value);
    }
    this.placement.querySelector("select").value = wanted.placement ?? "";
    for (const [axis, input] of this.switches) input.checked = String(wanted[axis]) !== "false";
  }

  /** The names under which `values` of a problem from a file stand in an address. */
  static get axes() {
    return [...AXES.map(({ axis }) => axis), ...SWITCHES.map(([axis]) => axis), "placement"];
  }

  /** Those of a problem from a preset, which names the others itself. */
  static get names() {
    return Sliders.axes.filter((axis) => !OF_PRESETS.includes(axis));
  }

  /**
   * Say what each means for the problem before it is varied; `axes` are those that can change it.
   * A preset names placement and micro-batches itself.
   */
  show(problem, axes, isPreset) {
    for (const slider of this.sliders) {
      slider.describeValue(problem);
      const isElsewhere = isPreset && OF_PRESETS.includes(slider.axis);
      slider.enable(axes.includes(slider.axis) && !isElsewhere);
      slider.element.hidden = isElsewhere;
    }
    this.placement.hidden = isPreset;
    this.placement.querySelector("select").disabled = isPreset || !axes.includes("placement");
    for (const [axis, input] of this.switches) input.disabled = !axes.includes(axis);
  }
}

// --- What the sliders are factors of.

/** Return a problem with the factors of the sliders taken out again. */
export function unvaried(problem, values, { num_microbatches }) {
  const { memory_scale = 1, pcie_scale = 1, link_scale = 1 } = values;
  const over = (value, factor) => (value === null ? null : value / factor);
  return {
    num_microbatches,
    devices: problem.devices.map((device) => ({
      memory_bytes: device.memory_bytes / memory_scale,
      d2h_gb_per_s: over(device.d2h_gb_per_s, pcie_scale),
    })),
    links: problem.links.map((link) => ({
      latency_ms: link.latency_ms,
      bandwidth_gb_per_s: over(link.bandwidth_gb_per_s, link_scale),
    })),
  };
}
