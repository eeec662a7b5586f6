// A chart that the service makes and BokehJS draws: embedded, exchanged without losing the zoom.

import { button, el } from "./dom.js";
import { ask } from "./http.js";

/** The one definition of the word on the page. */
export const BUBBLE = "Bubble: the share of the time in which a device is idle, as the mean over all devices. "
  + "The busiest device is the one that is idle for the smallest share.";
const STEP = 0.25;
const ZOOM = 1.5;
const BUSY = 429;
const AGAIN_MS = 2000;

/**
 * A place for a chart; `onZoom({start, end})` tells the part of the time axis that is seen, null =
 * all, and `onDrawn()` that another schedule is seen, or that none can be.
 */
export class Chart {
  constructor(label, { onZoom = null, onDrawn = null } = {}) {
    this.onZoom = onZoom;
    this.onDrawn = onDrawn;
    this.stage = el("div", { class: "stage" });
    this.hint = el("p", { class: "hint" }, "No schedule yet.");
    this.element = el("div", { class: "chart", tabindex: 0, role: "group", "aria-label": label,
      onkeydown: (event) => this.press(event) }, this.hint, this.stage);
    this.drawn = null;
    this.Bokeh = null;
    this.tag = "";
    this.wanted = null;
    this.working = null;
    this.zoom = null;
  }

  /**
   * Show the chart of a path, with `json` as the body of the request if it has one. Of many calls
   * while a chart is loaded the last one counts. Resolves when the chart is visible.
   */
  show(path, json = undefined) {
    this.wanted = { path, json };
    this.working ??= this.work().finally(() => { this.working = null; });
    return this.working;
  }

  /** The number of the schedule that is seen; 0 before the first. */
  get number() {
    return Number(this.tag.split(".")[1] ?? 0);
  }

  /** The objective in ms of the schedule that is seen; undefined where none is. */
  get objective() {
    return this.drawn ? this.document.get_model_by_name("schedules")?.tags[0] : undefined;
  }

  async work() {
    while (this.wanted !== null) {
      const { path, json } = this.wanted;
      this.wanted = null;
      try {
        await this.load(path, json);
      } catch (error) {
        // Another view has taken the place away.
        if (this.isClosed) return;
        if (error.status !== BUSY) {
          this.isBroken = true;
          this.onDrawn?.();
          throw error;
        }
        await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
        // Unless a later call wants another chart.
        if (!this.isClosed) this.wanted ??= { path, json };
      }
    }
  }

  async load(path, json) {
    const scheme = theme();
    const query = `${path}${path.includes("?") ? "&" : "?"}theme=${scheme}`;
    const known = this.query === query && this.tag && !json ? { "If-None-Match": this.tag } : {};
    const [Bokeh, answer] = await Promise.all([
      bokeh(), ask(query, { json, headers: known, cache: "no-store" })]);
    this.isBroken = false;
    if (answer.status === 304) {
      this.onDrawn?.();
      return;
    }
    const item = await answer.json();
    if (this.isClosed) return;
    await this.draw(Bokeh, item);
    this.query = query;
    this.tag = answer.headers.get("ETag") ?? "";
    this.element.dataset.tag = this.tag.replaceAll('"', "");
    this.element.dataset.theme = scheme;
    this.onDrawn?.();
  }

  /** Draw behind what is seen, move to where that is, then take its place. */
  async draw(Bokeh, item) {
    const fresh = el("div", { class: "layer", "data-fresh": true });
    this.stage.append(fresh);
    const drawn = await Bokeh.embed.embed_item(item, fresh);
    if (this.isClosed) {
      dispose(Bokeh, drawn);
      return;
    }
    const before = this.drawn;
    this.Bokeh = Bokeh;
    this.drawn = drawn;
    this.range = this.document.get_model_by_name("time");
    this.follow();
    delete fresh.dataset.fresh;
    for (const layer of [...this.stage.children]) if (layer !== fresh) layer.remove();
    if (before) dispose(Bokeh, before);
    this.hint.hidden = true;
    this.element.dataset.drawn = String(Number(this.element.dataset.drawn ?? 0) + 1);
  }

  get document() {
    return [...this.drawn][0].model.document;
  }

  /** Keep the zoom of whatever was shown before, and tell of every change of it. */
  follow() {
    if (!this.range) return;
    this.full = { start: this.range.start, end: this.range.end };
    if (this.zoom) {
      this.see(this.zoom);
      this.zoomed();
    }
    const told = () => this.zoomed();
    this.range.properties.start.change.connect(told);
    this.range.properties.end.change.connect(told);
  }

  zoomed() {
    const { start, end } = this.range;
    const isWhole = start === this.full.start && end === this.full.end;
    this.zoom = isWhole ? null : { start, end };
    this.onZoom?.(this.zoom);
  }

  /** See a part of the time axis, in ms, moved into what there is; null, or too much = all of it. */
  see(zoom) {
    if (!this.range) return;
    const { start: least, end: most } = this.full;
    const width = zoom ? zoom.end - zoom.start : most - least;
    const from = Math.max(least, Math.min(zoom?.start ?? least, most - width));
    this.range.setv(width < most - least ? { start: from, end: from + width } : this.full);
  }

  /** Move by a share of what is seen, and show `factor` times as much. */
  move(share, factor = 1) {
    if (!this.range) return;
    const { start, end } = this.range;
    const width = (end - start) * factor;
    const middle = (start + end) / 2 + share * (end - start);
    this.see({ start: middle - width / 2, end: middle + width / 2 });
  }

  press(event) {
    const moves = { ArrowLeft: [-STEP], ArrowRight: [STEP], "+": [0, 1 / ZOOM], "=": [0, 1 / ZOOM],
      "-": [0, ZOOM] };
    if (event.target !== this.element || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "0") this.see(null);
    else if (event.key in moves) this.move(...moves[event.key]);
    else return;
    event.preventDefault();
  }

  /** Buttons for those who have no wheel. */
  buttons() {
    const made = (text, name, action) => button(text, action, { "aria-label": name, title: name });
    return el("span", { class: "zoom", role: "group", "aria-label": "Zoom" },
      made("−", "Zoom out (-)", () => this.move(0, ZOOM)),
      made("+", "Zoom in (+)", () => this.move(0, 1 / ZOOM)),
      made("‹", "Earlier (arrow left)", () => this.move(-STEP)),
      made("›", "Later (arrow right)", () => this.move(STEP)),
      made("All", "See all (0)", () => this.see(null)));
  }

  /** Return what is seen as a PNG file. */
  async png() {
    const [view] = this.drawn;
    return view.export("auto", true).to_blob();
  }

  /** Show a sentence instead of a chart. */
  say(text) {
    this.hint.textContent = text;
    this.hint.hidden = false;
  }

  close() {
    this.isClosed = true;
    this.wanted = null;
    if (this.drawn) dispose(this.Bokeh, this.drawn);
    this.drawn = null;
  }
}

// --- BokehJS, loaded when the first chart is wanted, from the package that is installed on the server.

let loading = null;

/** Return the global of BokehJS. */
export function bokeh() {
  loading ??= load();
  return loading;
}

/** The colours that charts are to have. */
export const theme = () =>
  (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");

/** Call a function whenever the colours change. */
export function onTheme(listener) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", listener);
}

async function load() {
  const scripts = document.body.dataset.bokeh.split(" ").filter(Boolean);
  if (!scripts.length) {
    throw new Error("There are no charts, as the server lacks bokeh; install it there: "
      + "pip install '.[plot]' in a clone of OptPipe");
  }
  // One after the other: the later ones extend the first.
  for (const src of scripts) await script(src);
  globalThis.Bokeh.set_log_level("warn");
  return globalThis.Bokeh;
}

function script(src) {
  return new Promise((resolve, reject) => {
    const element = document.createElement("script");
    element.src = src;
    element.onload = resolve;
    element.onerror = () => reject(new Error(`${src} could not be loaded; reload the page`));
    document.head.append(element);
  });
}

/** Take a chart's document away, with its views. */
export function dispose(Bokeh, drawn) {
  const roots = [...drawn];
  const owner = roots[0]?.model.document;
  for (const view of roots) Bokeh.index.delete(view);
  owner?.clear();
  const at = Bokeh.documents.indexOf(owner);
  if (at >= 0) Bokeh.documents.splice(at, 1);
}
