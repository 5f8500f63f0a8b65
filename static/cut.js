// Long names are cut in the middle: what tells them apart is often at their end. The whole stands in the tooltip. No path and no
// sentence is cut within a word where there is a place between two near by.

/**
 * `long`: what has no more characters is left to the layout, which cuts its end. `tail`: characters of the end that stay, from `least` to `most`
 * where that makes it begin between two words.
 */
const USUAL = { long: 24, tail: 12, least: 5, most: 20 };
/** For a column of a hundred pixels. */
export const NARROW = { long: 13, tail: 6, least: 3, most: 10 };
/** For a list at the side, of two hundred pixels. */
export const SIDE = { long: 16, tail: 10, least: 5, most: 14 };
/** No line has room for more characters. */
const LINE = 300;
/** Words begin with these, or behind a space. */
const BETWEEN = new Set("/-_");
const begins = (all, at) => (BETWEEN.has(all[at]) && !BETWEEN.has(all[at - 1])) || (all[at - 1] === " " && all[at] !== " ");

/** How many characters of the end stay, about `wanted`, at most `most`: from the nearest place between two words on. */
function tail(all, { tail: wanted, least, most }) {
  let best = 0;
  for (let n = least; n <= most && n < all.length; n++) {
    if (begins(all, all.length - n) && (!best || Math.abs(n - wanted) < Math.abs(best - wanted))) best = n;
  }
  return best || wanted;
}

/**
 * The beginning, word by word: where room ends within a box, the layout leaves the whole box out. What of a word goes on beyond twice what is
 * before it is text, which is cut anywhere: less than half of the room would be used else.
 */
function head(all) {
  const node = Object.assign(document.createElement("span"), { className: "cut-head" }), line = all.slice(0, LINE);
  for (let from = 0, to = 1; from < line.length; from = to++) {
    while (to < line.length && !begins(line, to)) to++;
    const end = Math.min(to, 2 * from);
    if (from) node.append(Object.assign(document.createElement("span"), { textContent: line.slice(from, end).join("") }));
    if (end < to) node.append(line.slice(end, to).join(""));
  }
  if (all.length > LINE) node.append(all.slice(LINE).join(""));
  return node;
}

/** Writes `words` into a node of one line, with as much of the beginning as there is room for and the end. */
export function cut(node, words, room = USUAL) {
  if (node.dataset.whole === words) return;
  node.dataset.whole = words;
  const all = [...words], isLong = all.length > room.long;
  // Also of a short one: how much room there is, the layout knows.
  node.title = words;
  node.classList.toggle("cut", isLong);
  // The parts are one word.
  if (node.tagName === "A") { if (isLong) node.setAttribute("aria-label", words); else node.removeAttribute("aria-label"); }
  if (!isLong) { node.textContent = words; return; }
  const end = tail(all, room);
  node.replaceChildren(head(all.slice(0, -end)), Object.assign(document.createElement("span"), { className: "cut-tail", textContent: all.slice(-end).join("") }));
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

/** A path or a name of a sentence is not longer than this, where nothing else is said. */
const WORD = 48;

/** Writes a sentence with its long words (paths, names) shortened in the middle; the whole stands in the tooltip. */
export function sentenceOf(node, words, most = WORD) {
  const shown = words.split(" ").map((word) => middle(word, most)).join(" ");
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
