// Objective, bound and gap while a job is solved: numbers that grow as events come.

import { bokeh, dispose, theme } from "./chart.js";
import { el } from "./dom.js";

const COLOURS = {
  light: { text: "#4a5058", line: "#d5d9de", back: "#ffffff", objective: "#0b62a4", bound: "#b35900" },
  dark: { text: "#b4bac2", line: "#343a42", back: "#15181c", objective: "#6cb4ee", bound: "#f0a04b" },
};
const SIZE = 5;
const AHEAD = 0.04;
const ABOVE = 1.25;

/** The chart of a job's progress. */
export class Progress {
  constructor() {
    this.plot = el("div", { class: "progress", role: "img",
      "aria-label": "Objective and bound over the seconds of solving" });
    this.key = el("p", { class: "key" }, ["objective", "bound"].map((name) =>
      el("span", { class: name }, name)));
    this.element = el("div", {}, this.key, this.plot);
    this.points = [];
    this.sources = null;
    this.drawn = null;
  }

  /** Take in what an event says: {seconds, objective_ms, bound_ms}. */
  add(point) {
    this.points.push(point);
    this.plot.dataset.points = String(this.points.length);
    if (this.sources) this.fill();
  }

  /** Draw what is known; later points are added to it. */
  async draw() {
    const Bokeh = await bokeh();
    const colours = COLOURS[theme()];
    const plot = styled(Bokeh, colours);
    const sources = {};
    for (const name of ["bound", "objective"]) {
      const source = new Bokeh.ColumnDataSource({ data: { x: [], y: [], size: [] } });
      const [x, y, size] = ["x", "y", "size"].map((field) => ({ field }));
      const line_color = colours[name];
      plot.step(x, y, "after", { source, line_width: 2, line_color });
      plot.scatter(x, y, { source, size, line_color, fill_color: line_color });
      sources[name] = source;
    }
    this.Bokeh = Bokeh;
    this.remove();
    this.sources = sources;
    this.range = plot.y_range;
    this.fill();
    this.drawn = await Bokeh.Plotting.show(plot, this.plot);
  }

  /** Lines up to the last event, and a little further: nothing has changed since. */
  fill() {
    const until = Math.max(...this.points.map((point) => point.seconds ?? 0)) * (1 + AHEAD);
    for (const [name, field] of [["objective", "objective_ms"], ["bound", "bound_ms"]]) {
      // A bound of 0 says nothing, and would flatten the rest.
      const told = this.points.filter((point) => point[field] > 0 && point.seconds !== null);
      const x = told.map((point) => point.seconds);
      const y = told.map((point) => point[field]);
      const size = told.map(() => SIZE);
      if (told.length) {
        x.push(until);
        y.push(y.at(-1));
        size.push(0);
      }
      this.sources[name].data = { x, y, size };
    }
    this.range.setv(this.scale());
  }

  /** What the best schedule and its bound take of the axis: the first schedule, Serial, may be far above. */
  scale() {
    const objectives = this.points.map((point) => point.objective_ms).filter((value) => value > 0);
    const bounds = this.points.map((point) => point.bound_ms).filter((value) => value > 0);
    const best = objectives.length ? Math.min(...objectives) : Math.max(0, ...bounds);
    const [first, last] = bounds.length ? [Math.min(...bounds), Math.max(...bounds)] : [best, best];
    const start = Math.min(last, Math.max(first, best / ABOVE));
    const end = Math.min(ABOVE * best, Math.max(best, ...objectives));
    const margin = AHEAD * (end - start || end || 1);
    return { start: start - margin, end: end + margin };
  }

  remove() {
    this.plot.replaceChildren();
    if (this.drawn) dispose(this.Bokeh, [this.drawn].flat());
    this.drawn = null;
  }

  /** Draw again, in the colours of now. */
  async redraw() {
    this.remove();
    if (this.points.length) await this.draw();
  }

  close() {
    this.remove();
    this.sources = null;
  }
}

function styled(Bokeh, colours) {
  const plot = Bokeh.Plotting.figure({
    height: 190, sizing_mode: "stretch_width", tools: "xpan,xwheel_zoom,reset",
    x_range: new Bokeh.DataRange1d({ start: 0 }), y_range: new Bokeh.Range1d(),
    x_axis_label: "seconds of solving", y_axis_label: "ms", toolbar_location: null,
    background_fill_color: colours.back, border_fill_color: colours.back,
    outline_line_color: colours.line, output_backend: "canvas",
  });
  plot.toolbar.active_scroll = null;
  plot.xaxis.ticker = new Bokeh.BasicTicker({ desired_num_ticks: 5 });
  plot.xaxis.formatter = new Bokeh.BasicTickFormatter({ use_scientific: false });
  for (const axis of [plot.xaxis, plot.yaxis]) {
    axis.axis_label_text_color = colours.text;
    axis.axis_label_text_font_style = "normal";
    axis.major_label_text_color = colours.text;
    axis.axis_line_color = colours.line;
    axis.major_tick_line_color = colours.line;
    axis.minor_tick_line_color = null;
  }
  for (const grid of [plot.xgrid, plot.ygrid]) grid.grid_line_color = colours.line;
  return plot;
}
