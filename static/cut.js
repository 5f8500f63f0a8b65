// Shortens long names in the middle, because names often differ at their end. The tooltip has the whole name. Paths and sentences are cut
// between two words if possible.

import { make } from "./page.js";

/**
 * Limits in characters. `long`: texts up to this length are not cut here; the layout may cut their end. `tail`: number of characters that
 * are kept at the end, or a number from `least` to `most` if the kept end then begins with a word.
 */
const DEFAULT = { long: 24, tail: 12, least: 5, most: 20 };
/** Limits for a column that is about 100 pixels wide. */
export const NARROW = { long: 13, tail: 6, least: 3, most: 10 };
/** Limits for a list that is about 200 pixels wide. */
export const SIDE = { long: 16, tail: 10, least: 5, most: 14 };
/** Number of characters that never fit on a line. */
const LINE = 300;
/** Separators. A word begins with a separator, or after a space. */
const SEPARATORS = new Set("/-_");
const startsWord = (all, at) => (SEPARATORS.has(all[at]) && !SEPARATORS.has(all[at - 1])) || (all[at - 1] === " " && all[at] !== " ");

/** Returns the beginning of a word between `low` and `high` that is nearest to `wanted`, or `wanted` if no word begins there. */
function nearestWordStart(all, wanted, low, high) {
  let best = -1;
  for (let at = low; at <= high && at < all.length; at++) if (startsWord(all, at) && (best < 0 || Math.abs(at - wanted) < Math.abs(best - wanted))) best = at;
  return best < 0 ? wanted : best;
}

/**
 * Returns the beginning of a text in boxes of one word each, because the layout leaves out a box that does not fit. If a word is longer than
 * the text before it, the rest of the word is plain text, which the layout may cut anywhere. In a box, the word could leave more than half
 * of the space unused.
 */
function headNode(all) {
  const node = make("span", { className: "cut-head" }), line = all.slice(0, LINE);
  for (let from = 0, to = 1; from < line.length; from = to++) {
    while (to < line.length && !startsWord(line, to)) to++;
    const end = Math.min(to, 2 * from);
    if (from) node.append(make("span", { textContent: line.slice(from, end).join("") }));
    if (end < to) node.append(line.slice(end, to).join(""));
  }
  if (all.length > LINE) node.append(all.slice(LINE).join(""));
  return node;
}

/** Writes `text` into a node of one line: the end of the text, and as much of the beginning as fits. */
export function writeShortened(node, text, limits = DEFAULT) {
  if (node.dataset.whole === text) return;
  node.dataset.whole = text;
  const all = [...text], isLong = all.length > limits.long;
  // A short text has a tooltip, too, because only the layout knows the available space.
  node.title = text;
  node.classList.toggle("cut", isLong);
  // A screen reader reads the whole name and not the parts.
  if (node.tagName === "A") { if (isLong) node.setAttribute("aria-label", text); else node.removeAttribute("aria-label"); }
  if (!isLong) { node.textContent = text; return; }
  const end = nearestWordStart(all, all.length - limits.tail, all.length - limits.most, all.length - limits.least);
  node.replaceChildren(headNode(all.slice(0, end)), make("span", { className: "cut-tail", textContent: all.slice(end).join("") }));
}

/** Returns at most `maxChars` characters: the beginning and the end, both cut between two words if possible. The same as protocol/src/cut.rs. */
export function shortenMiddle(text, maxChars) {
  const all = [...text];
  if (all.length <= maxChars) return text;
  const end = nearestWordStart(all, all.length - (maxChars >> 1), all.length - Math.floor(maxChars * 0.7), all.length - Math.max(1, maxChars >> 2)), room = maxChars - 1 - (all.length - end);
  return `${all.slice(0, nearestWordStart(all, room, Math.max(1, Math.floor(room * 2 / 3)), room)).join("")}…${all.slice(end).join("")}`;
}

/** Default for the maximum length of a path or name in a sentence, in characters. */
const MAX_WORD_CHARS = 48;

/** Writes a sentence whose long words (paths, names) are shortened in the middle. The tooltip has the whole sentence. */
export function writeSentence(node, text, maxChars = MAX_WORD_CHARS) {
  const shown = text.split(" ").map((word) => shortenMiddle(word, maxChars)).join(" ");
  if (node.textContent !== shown) node.textContent = shown;
  const title = shown === text ? "" : text;
  if (node.title !== title) node.title = title;
}

/** Writes a text that may wrap between its words, such as a path. */
export function writeWrapped(node, text) {
  if (node.dataset.wrapped === text) return;
  node.dataset.wrapped = text;
  node.replaceChildren(...text.split(/(?<=[/\-_.])(?=[^/\-_. ])/).flatMap((part, i) => (i ? [make("wbr"), part] : [part])));
}
