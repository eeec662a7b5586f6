// BokehJS, loaded when the first chart is wanted, from the package that is installed on the server.

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
      + "pip install 'optpipe[plot]'");
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
