// A schedule as a file: JSON, CSV, a trace, a picture.

import { button, el, save } from "./dom.js";
import { guarded } from "./faults.js";
import { ask } from "./http.js";

const FORMS = [["json", "Schedule, JSON", "json"], ["csv", "Schedule, CSV (torch)", "csv"],
  ["trace", "Trace (Perfetto)", "trace.json"], ["svg", "Picture, SVG", "svg"]];

const BEYOND_TORCH = /OFFLOAD|RELEASE|RELOAD|RECOMPUTE|@/;
const WHY_NOT = "torch has no OFFLOAD or RECOMPUTE, which this schedule needs to fit; save it as JSON, "
  + "and run it with optpipe.runtime.";

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
  const [csv, why] = [menu.querySelector("[data-form=csv]"), el("p", { class: "hint", hidden: true }, WHY_NOT)];
  csv.after(why);
  menu.addEventListener("toggle", guarded(async () => {
    if (!menu.open || !view.job.has_schedule) return;
    const text = await (await ask(`${view.path}/schedule?format=csv`)).text();
    csv.disabled = BEYOND_TORCH.test(text);
    why.hidden = !csv.disabled;
  }));
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
