// Why a schedule is as long as it is: the service's explanation, where it gives one.

import { el } from "./dom.js";
import { Fault, askJson } from "./http.js";

/** Show the explanation of a path in a place; without one the place stays hidden. */
export async function why(place, path, signal) {
  try {
    const told = await askJson(path, { signal });
    place.replaceChildren(el("h2", {}, "Why"), ...partsOf(told));
    place.hidden = false;
  } catch (error) {
    if (!(error instanceof Fault) || ![404, 405, 501].includes(error.status)) throw error;
    place.hidden = true;
  }
}

/** Sentences, alone or below headings: a list, {sentences}, {sections: [{title, sentences}]}. */
function partsOf(told) {
  if (typeof told === "string") return [el("p", {}, told)];
  if (Array.isArray(told)) return [listOf(told)];
  const sections = (told.sections ?? []).flatMap(({ title, sentences }) =>
    [el("h3", {}, title), listOf(sentences)]);
  return told.sentences ? [listOf(told.sentences), ...sections] : sections;
}

const listOf = (sentences) =>
  el("ul", { class: "sentences" }, sentences.map((sentence) => el("li", {}, String(sentence))));
