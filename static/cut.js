// Long names are cut in the middle: what tells them apart is often at their end. The whole stands in the tooltip.

/** Below this a name is left to the layout, which cuts its end. */
const LONG = 24;
/** Characters of the end that stay. */
const TAIL = 12;

/** Writes `words` into a node of one line, with as much of the beginning as there is room for and the end. */
export function cut(node, words) {
  if (node.dataset.whole === words) return;
  node.dataset.whole = words;
  node.title = words.length > LONG ? words : "";
  const all = [...words];
  node.classList.toggle("cut", all.length > LONG);
  if (all.length <= LONG) { node.textContent = words; return; }
  const part = (className, text) => Object.assign(document.createElement("span"), { className, textContent: text });
  node.replaceChildren(part("cut-head", all.slice(0, -TAIL).join("")), part("cut-tail", all.slice(-TAIL).join("")));
  // The parts are one word.
  if (node.tagName === "A") node.setAttribute("aria-label", words);
}

/** The same for a canvas, of at most `most` characters. */
export function middle(words, most) {
  const all = [...words], end = most >> 1;
  return all.length <= most ? words : `${all.slice(0, most - end - 1).join("")}…${all.slice(-end).join("")}`;
}
