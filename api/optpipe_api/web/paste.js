// What to paste into the training framework: a preview of each file, to copy or to save.

import { button, el, save } from "./dom.js";
import { guarded } from "./faults.js";
import { ask } from "./http.js";

/** The files of each framework: format of the service, title, file name. */
const PASTES = {
  megatron: [["arguments", "Megatron-LM arguments", "arguments.sh"], ["yaml", "Megatron-Core YAML", "megatron.yaml"]],
  torchtitan: [["python", "torchtitan config", "optpipe_config.py"], ["csv", "Schedule, CSV", "schedule.csv"]],
  huggingface: [],
  any: [],
};

/** The preview of the files of one row, and the command that trains with them. */
export class Paste {
  constructor() {
    this.element = el("section", { id: "paste-part", hidden: true });
  }

  /** Show the files of a row whose address is `path`; nothing is loaded twice. */
  show(row, path, framework) {
    if (this.path === path) return;
    this.path = path;
    const files = PASTES[framework];
    this.element.hidden = !files.length && !row.command;
    const place = el("div", {});
    const tabs = files.map(([form, title, name], index) => el("label", {},
      el("input", { type: "radio", name: "paste-form", value: form, checked: index === 0,
        onchange: guarded(() => this.load(place, path, form, name)) }), el("span", {}, title)));
    this.element.replaceChildren(el("h2", {}, `What to paste: ${row.label || row.id}`),
      ...(tabs.length > 1 ? [el("div", { class: "tabs", role: "radiogroup", "aria-label": "File" }, tabs)] : []),
      place, ...(row.command ? [el("h3", {}, "Command, on every host"), preview(row.command, "train-command")] : []));
    if (files.length) guarded(() => this.load(place, path, files[0][0], files[0][2]))();
  }

  async load(place, path, form, name) {
    const text = await (await ask(`${path}/paste?format=${form}`)).text();
    const chosen = this.element.querySelector("[name=paste-form]:checked")?.value ?? form;
    if (this.path !== path || chosen !== form) return;
    place.replaceChildren(preview(text, "pasted",
      button(`Save ${name}`, () => save(new Blob([text], { type: "text/plain" }), name), { "data-paste": form })));
  }
}

/** Return a text with a button that copies it, and more buttons. */
function preview(text, id, ...more) {
  const shown = el("pre", { id, tabindex: 0 }, text);
  const copy = button("Copy", async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // Without https there is no clipboard: the text is selected, and the old command copies it.
      getSelection().selectAllChildren(shown);
      document.execCommand("copy");
    }
    copy.textContent = "Copied";
    setTimeout(() => { copy.textContent = "Copy"; }, 2000);
  }, { "data-copy": id });
  return el("div", { class: "preview" }, shown, el("div", { class: "buttons" }, copy, ...more));
}
