// The order of the list: a click on a column's head sorts by it, another one turns it round. It stands in the address.

import { read } from "../address.js";
import { cut, NARROW } from "../cut.js";
import { ALL } from "../job/names.js";
import { text } from "../page.js";
import { setting } from "../settings.js";

/** The order without one in the address. */
export const USUAL = "-created";
/** Class of a head: what the server sorts by, and whether the largest come first at the first click. As in web/src/jobs.rs. */
const OWN = {
  "c-state": ["state", false], "c-name": ["name", false], "c-progress": ["step", true], "c-loss": ["loss", false],
  "c-best": ["best", true], "c-speed": ["speed", true], "c-age": ["created", true],
};
/** Columns that people add and that are sorted by their own name; settings are by `spec.` and theirs. */
const METRICS = {
  ...Object.fromEntries(Object.keys(ALL).map((name) => [name, !/(^|_)loss$/.test(name)])), step: true, epoch: true, attempt: true, ranks: true, owner: false, project: false,
};

export const order = () => read("sort") || USUAL;
const VALUES = {
  created: (j) => j.created_at, started: (j) => j.started_at, finished: (j) => j.finished_at, best: (j) => j.best?.value,
  speed: (j) => j.images_per_second, images_per_second: (j) => j.images_per_second, priority: (j) => j.spec.priority,
};

/** What a job is sorted by: whether it has changed, and the job with it may have another place. */
export function key(job) {
  const by = order().replace(/^-/, "");
  if (by.startsWith("tag:")) return job.tags.includes(by.slice(4));
  const value = by.startsWith("spec.") ? setting(job.spec, by.slice(5)) : VALUES[by] ? VALUES[by](job) : job[by] ?? job.last[by];
  return Array.isArray(value) ? value.join() : value ?? null;
}

/** What a head sorts by and whether the largest come first: of a tag those that have it, of settings with several values their text. */
function sortOf(th) {
  const own = Object.keys(OWN).find((name) => th.classList.contains(name)), extra = th.dataset.key;
  if (own) return OWN[own];
  if (!extra) return null;
  if (extra.startsWith("tag:")) return [extra, true];
  return extra in METRICS ? [extra, METRICS[extra]] : [`spec.${extra}`, false];
}

/** Makes a button of every head that jobs can be sorted by. `choose(sort)` is called with the new order. */
export function drawHeads(row, choose) {
  const now = order();
  for (const th of row.cells) {
    const sort = sortOf(th);
    if (!sort) continue;
    let button = th.querySelector("button");
    if (!button) {
      const label = th.textContent, name = document.createElement("span");
      button = Object.assign(document.createElement("button"), { type: "button", className: "sort" });
      if (th.matches(".c-extra")) { cut(name, label, NARROW); name.title = th.title || label; button.append(name); button.setAttribute("aria-label", label); } else text(button, label);
      button.addEventListener("click", () => choose(button.dataset.next));
      th.replaceChildren(button);
    }
    const [by, largestFirst] = sort, on = now === by ? "ascending" : now === `-${by}` ? "descending" : "";
    button.dataset.next = (on ? on === "ascending" : largestFirst) ? `-${by}` : by;
    if (on) th.setAttribute("aria-sort", on); else th.removeAttribute("aria-sort");
  }
}

/** Which of these numbers stay, so that as few as can be have to move for the others to stand in order. */
function staying(numbers) {
  const ends = [], before = new Array(numbers.length).fill(-1), kept = new Set();
  numbers.forEach((n, i) => {
    let low = 0, high = ends.length;
    while (low < high) { const mid = (low + high) >> 1; if (numbers[ends[mid]] < n) low = mid + 1; else high = mid; }
    if (low > 0) before[i] = ends[low - 1];
    ends[low] = i;
  });
  for (let i = ends.at(-1) ?? -1; i >= 0; i = before[i]) kept.add(i);
  return kept;
}

/** Puts `first` before the other rows, in this order. What is in its place already stays there. */
export function arrange(rows, first) {
  const all = [...rows.children], at = new Map(all.map((row, i) => [row, i])), front = new Set(first);
  const wanted = [...first, ...all.filter((row) => !front.has(row))], stay = staying(wanted.map((row) => at.get(row)));
  for (let i = wanted.length - 1, after = null; i >= 0; after = wanted[i--]) {
    if (stay.has(i)) continue;
    // A row that somebody is in with the keyboard keeps the focus.
    if (rows.moveBefore) rows.moveBefore(wanted[i], after); else rows.insertBefore(wanted[i], after);
  }
}
