// The order of the list: a click on a column's heading sorts by the column, and another click reverses the order. The order is in the URL.

import { read } from "../address.js";
import { writeShortened, NARROW } from "../cut.js";
import { ALL } from "../job/names.js";
import { make, text } from "../page.js";
import { setting } from "../settings.js";

/** The default order of jobs. Groups start with the group of the best job by default. */
export const DEFAULT_ORDER = "-created";
export const defaultOrder = () => (read("group_by") ? "-best" : DEFAULT_ORDER);
/** Added columns whose name is the sort key, and whether the first click sorts in descending order. Keys of settings begin with `spec.`. */
const METRICS = {
  ...Object.fromEntries(Object.keys(ALL).map((name) => [name, !/(^|_)loss$/.test(name)])), step: true, epoch: true, attempt: true, ranks: true, owner: false, project: false,
};

export const order = () => read("sort") || defaultOrder();
const VALUES = {
  created: (j) => j.created_at, started: (j) => j.started_at, finished: (j) => j.finished_at, best: (j) => j.best?.value,
  speed: (j) => j.images_per_second, images_per_second: (j) => j.images_per_second, priority: (j) => j.spec.priority,
};

/** Returns a job's sort value. If the value changes, the job's place may change. */
export function sortValue(job) {
  const by = order().replace(/^-/, "");
  if (by.startsWith("tag:")) return job.tags.includes(by.slice(4));
  const value = by.startsWith("spec.") ? setting(job.spec, by.slice(5)) : VALUES[by] ? VALUES[by](job) : job[by] ?? job.last[by];
  return Array.isArray(value) ? value.join() : value ?? null;
}

/**
 * Returns a heading's sort key, and whether the first click sorts in descending order. For a tag, jobs with the tag come first. A setting
 * with several values is sorted as text.
 */
function sortOf(th) {
  const { sort, descends, key: extra } = th.dataset;
  if (sort) return [sort, descends !== undefined];
  if (!extra) return null;
  if (extra.startsWith("tag:")) return [extra, true];
  return extra in METRICS ? [extra, METRICS[extra]] : [`spec.${extra}`, false];
}

/** Turns every heading by which jobs can be sorted into a button. `choose(sort)` receives the new order. */
export function drawHeads(row, choose) {
  const now = order();
  for (const th of row.cells) {
    const sort = sortOf(th);
    if (!sort) continue;
    let button = th.querySelector("button");
    if (!button) {
      const label = th.textContent, name = make("span");
      button = make("button", { type: "button", className: "sort" });
      if (th.matches(".c-extra")) { writeShortened(name, label, NARROW); name.title = th.title || label; button.append(name); button.setAttribute("aria-label", label); } else text(button, label);
      button.addEventListener("click", () => choose(button.dataset.next));
      th.replaceChildren(button);
    }
    const [by, largestFirst] = sort, direction = now === by ? "ascending" : now === `-${by}` ? "descending" : "";
    button.dataset.next = (direction ? direction === "ascending" : largestFirst) ? `-${by}` : by;
    if (direction) th.setAttribute("aria-sort", direction); else th.removeAttribute("aria-sort");
  }
}

/** Returns the indices of a longest ascending subsequence: if these numbers stay, sorting moves the fewest numbers. */
function longestAscending(numbers) {
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

/** Moves `first` before the other rows, in the order of `first`. Rows that are already in place do not move. */
export function arrange(rows, first) {
  const all = [...rows.children], at = new Map(all.map((row, i) => [row, i])), front = new Set(first);
  const wanted = [...first, ...all.filter((row) => !front.has(row))], stay = longestAscending(wanted.map((row) => at.get(row)));
  for (let i = wanted.length - 1, after = null; i >= 0; after = wanted[i--]) {
    if (stay.has(i)) continue;
    // `moveBefore` keeps the keyboard focus of the row.
    if (rows.moveBefore) rows.moveBefore(wanted[i], after); else rows.insertBefore(wanted[i], after);
  }
}
