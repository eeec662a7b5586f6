// Elements from descriptions. Text is always text: nothing that came over the network is markup.

/** Return the element of an id that the page has. */
export const byId = (id) => document.getElementById(id);

/**
 * Return a new element.
 * `attributes`: "class", "data-..." and so on as attributes, `on...` as listeners, booleans as
 * properties that are there or not; null and undefined are left out.
 */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else element.setAttribute(name, String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** A button that does something; `attributes` as of `el`. */
export const button = (text, onclick, attributes = {}) =>
  el("button", { type: "button", onclick, ...attributes }, text);

/** A row of name and value. */
export const fact = (name, value, attributes = {}) =>
  el("div", { class: "fact", ...attributes }, el("dt", {}, name), el("dd", {}, value));

/**
 * A table with a caption for those who do not see it; `columns` are {title, number?}, and where one
 * can be sorted by: `head`, what stands for its title, and `sort`, how rows stand by it now.
 */
export function table(caption, columns, rows) {
  const head = columns.map(({ title, number, head: shown, sort }) =>
    el("th", { scope: "col", role: "columnheader", class: number ? "number" : null,
      "aria-sort": sort }, shown ?? (title || el("span", { class: "unseen" }, "What can be done"))));
  const body = rows.map(({ cells, attributes = {} }) =>
    el("tr", { role: "row", ...attributes }, cells.map((cell, index) =>
      el("td", { role: "cell", "data-title": columns[index].title || null,
        class: columns[index].number ? "number" : null }, cell ?? ""))));
  // The roles are those that the elements have, until a narrow page lays rows out as blocks.
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    el("table", { role: "table" }, el("caption", { class: "unseen" }, caption),
      el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, head)),
      el("tbody", { role: "rowgroup" }, body)));
}

/** Say something to those who listen instead of look. */
export function announce(text) {
  byId("announce").textContent = text;
}

/** Call a function once, some milliseconds after the last of many requests to, or `cancel` it. */
export function later(action, pauseMs) {
  let timer = 0;
  const request = (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...args), pauseMs);
  };
  request.cancel = () => clearTimeout(timer);
  return request;
}

/** Have the browser save a blob as a file. */
export function save(blob, name) {
  const url = URL.createObjectURL(blob);
  const link = el("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
