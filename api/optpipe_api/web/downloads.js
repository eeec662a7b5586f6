// A schedule as a file: JSON, CSV, a trace, a picture.

import { button, el, save } from "./dom.js";
import { guarded } from "./faults.js";
import { ask } from "./http.js";

const FORMS = [["json", "Schedule, JSON", "json"], ["csv", "Schedule, CSV (torch)", "csv"],
  ["trace", "Trace (Perfetto)", "trace.json"], ["svg", "Picture, SVG", "svg"]];

/** A menu that saves the best schedule of a job, or what its chart shows. */
export function downloads(view) {
  const name = () => (view.job.name || view.id.slice(0, 8)).replaceAll(/[^\w.-]+/g, "-");
  const menu = el("details", { class: "menu", id: "downloads" }, el("summary", {}, "Save as"));
  const item = (text, form, action) => button(text, guarded(async () => {
    menu.open = false;
    await action();
  }), { "data-form": form });
  menu.append(el("div", {},
    FORMS.map(([form, text, suffix]) => item(text, form, async () => {
      const answer = await ask(`${view.path}/schedule?format=${form}`);
      save(await answer.blob(), `${name()}.${suffix}`);
    })),
    item("Picture as seen, PNG", "png", async () => save(await view.chart.png(), `${name()}.png`)),
    item("Problem, JSON", "problem", async () => {
      const answer = await ask(`${view.path}/problem`);
      save(await answer.blob(), `${name()}.problem.json`);
    })));
  menu.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      menu.open = false;
      menu.querySelector("summary").focus();
    }
  });
  menu.addEventListener("focusout", (event) => {
    if (!menu.contains(event.relatedTarget)) menu.open = false;
  });
  return menu;
}
