// Long names are cut in the middle: what tells them apart is often at their end. The whole stands in the tooltip. No path and no
// sentence is cut within a word where there is a place between two near by.

/** Below this a name is left to the layout, which cuts its end. */
const LONG = 24;
/** Characters of the end that stay: so many, or as many more or fewer as make it begin between two words. */
const TAIL = 12, LEAST = 5, MOST = 20;
/** Words begin with these, or behind a space. */
const BETWEEN = new Set("/-_");
const begins = (all, at) => (BETWEEN.has(all[at]) && !BETWEEN.has(all[at - 1])) || (all[at - 1] === " " && all[at] !== " ");

/** How many characters of the end stay, about `wanted`, at most `most`: from the nearest place between two words on. */
function tail(all, wanted, most) {
  let best = 0;
  for (let n = Math.min(LEAST, wanted); n <= most && n < all.length; n++) {
    if (begins(all, all.length - n) && (!best || Math.abs(n - wanted) < Math.abs(best - wanted))) best = n;
  }
  return best || wanted;
}

/** Writes `words` into a node of one line, with as much of the beginning as there is room for and the end. */
export function cut(node, words) {
  if (node.dataset.whole === words) return;
  node.dataset.whole = words;
  node.title = words.length > LONG ? words : "";
  const all = [...words];
  node.classList.toggle("cut", all.length > LONG);
  if (all.length <= LONG) { node.textContent = words; return; }
  const part = (className, text) => Object.assign(document.createElement("span"), { className, textContent: text }), end = tail(all, TAIL, MOST);
  node.replaceChildren(part("cut-head", all.slice(0, -end).join("")), part("cut-tail", all.slice(-end).join("")));
  // The parts are one word.
  if (node.tagName === "A") node.setAttribute("aria-label", words);
}

/** The place from `low` to `high` where a word begins that is the nearest to `wanted`; `wanted` where none does. */
function between(all, wanted, low, high) {
  let best = -1;
  for (let at = low; at <= high && at < all.length; at++) if (begins(all, at) && (best < 0 || Math.abs(at - wanted) < Math.abs(best - wanted))) best = at;
  return best < 0 ? wanted : best;
}

/** At most `most` characters: the beginning and the end, both cut between two words where there is a place near by. As protocol/src/cut.rs. */
export function middle(words, most) {
  const all = [...words];
  if (all.length <= most) return words;
  const end = between(all, all.length - (most >> 1), all.length - Math.floor(most * 0.7), all.length - Math.max(1, most >> 2)), room = most - 1 - (all.length - end);
  return `${all.slice(0, between(all, room, Math.max(1, Math.floor(room * 2 / 3)), room)).join("")}…${all.slice(end).join("")}`;
}

/** A path or a name of a sentence is not longer than this. */
const WORD = 48;

/** Writes a sentence with its long words (paths, names) shortened in the middle; the whole stands in the tooltip. */
export function sentenceOf(node, words) {
  const shown = words.split(" ").map((word) => middle(word, WORD)).join(" ");
  if (node.textContent !== shown) node.textContent = shown;
  const title = shown === words ? "" : words;
  if (node.title !== title) node.title = title;
}

/** Writes words that may go on in the next line, as paths do: between two words of theirs. */
export function wrap(node, words) {
  if (node.dataset.wrapped === words) return;
  node.dataset.wrapped = words;
  node.replaceChildren(...words.split(/(?<=[/\-_.])(?=[^/\-_. ])/).flatMap((part, i) => (i ? [document.createElement("wbr"), part] : [part])));
}
