// Why a schedule is as long as it is: the service's explanation, where it gives one.

import { el } from "./dom.js";
import { Fault, askJson } from "./http.js";

const NONE = [404, 413, 429];
const SHOWN = 2;

/** Show the explanation of a path in a place; where there is none the place stays hidden. */
export async function why(place, path, title, signal) {
  try {
    const { sentences = [] } = await askJson(path, { signal });
    place.replaceChildren(el("h2", {}, title), ...[...byTopic(sentences)].map(partOf));
    place.hidden = sentences.length === 0;
  } catch (error) {
    if (!(error instanceof Fault) || !NONE.includes(error.status)) throw error;
    place.hidden = true;
  }
}

const partOf = ([topic, sentences]) => el("div", { class: "reason" },
  el("h3", {}, topic),
  el("div", {}, listOf(sentences.slice(0, SHOWN)), rest(sentences.slice(SHOWN))));

const listOf = (sentences) => el("ul", {}, sentences.map(({ text }) => el("li", {}, text)));

const rest = (sentences) => (sentences.length
  ? el("details", {}, el("summary", {}, `${sentences.length} more`), listOf(sentences))
  : null);

function byTopic(sentences) {
  const topics = new Map();
  for (const sentence of sentences) {
    topics.set(sentence.topic, [...(topics.get(sentence.topic) ?? []), sentence]);
  }
  return topics;
}
