// Schedules and traces from files, drawn on one time axis.

import { onTheme } from "./bokeh.js";
import { BUBBLE, Chart } from "./chart.js";
import { el } from "./dom.js";
import { showFault } from "./faults.js";

let opened = null;

/** Keep what the next view shows: `files` of {name, text}, and their `problem` if there is one. */
export const setOpened = (value) => { opened = value; };

/** Shows the opened files; a browser gives a page no file again, so that a reload shows how to open some. */
export class OpenedView {
  constructor() {
    [this.opened, opened] = [opened, null];
  }

  async open(host) {
    if (!this.opened) {
      host.replaceChildren(el("section", { id: "opened" }, el("h1", {}, "Open a schedule or the traces of a run"),
        el("ul", { class: "plain" },
          el("li", {}, "A schedule: JSON of OptPipe, or CSV of torch. With its problem it has times and memory."),
          el("li", {}, "Traces: of the PyTorch profiler, one file per rank, or of ",
            el("code", {}, "PipelineRunner"), ". Text or gzip."),
          el("li", {}, "On the page of an answer, they are drawn next to its schedule: measured next to planned.")),
        el("div", { class: "buttons" }, el("label", { class: "button main", for: "open-input" }, "Choose files")),
        el("p", { class: "hint" }, "Or drop them anywhere on the page. They are drawn and not stored.")));
      return;
    }
    this.chart = new Chart("Opened files: lanes of every device over time");
    const names = this.opened.files.map(({ name }) => name);
    const title = names.length > 3 ? `${names[0]} and ${names.length - 1} more files` : names.join(", ");
    host.replaceChildren(el("section", { id: "opened" }, el("h1", {}, title),
      el("div", { class: "bar" }, this.chart.buttons()), this.chart.element,
      el("p", { class: "hint" }, BUBBLE)));
    this.chart.say("Drawing the files.");
    onTheme(() => this.draw());
    await this.draw();
  }

  draw() {
    if (this.chart.isClosed) return undefined;
    return this.chart.show("v1/charts", this.opened).catch((error) => {
      showFault(error);
      if (!this.chart.drawn) this.chart.say("The files cannot be drawn.");
    });
  }

  close() {
    this.chart?.close();
  }
}
