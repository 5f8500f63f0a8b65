// The order of the list: a click on a column's heading sorts by the column, and another click reverses the order. The order is in the URL.

import { readUrl } from "../address.js";
import { writeShortened, NARROW } from "../cut.js";
import { make, setText } from "../page.js";
import { setting } from "../settings.js";

/** The default order of jobs: the newest job first. By default, groups are ordered by their best jobs instead. */
export const DEFAULT_ORDER = "-created";
export const defaultOrder = () => (readUrl("group_by") ? "-best" : DEFAULT_ORDER);
export const order = () => readUrl("sort") || defaultOrder();
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
 * Turns every heading with a sort key (`data-sort`) into a button. The first click sorts in descending order if the heading has
 * `data-descends`. `choose(order)` receives the new order.
 */
export function drawHeads(row, choose) {
  const current = order();
  for (const th of row.cells) {
    const { sort: by, descends } = th.dataset;
    if (!by) continue;
    let button = th.querySelector("button");
    if (!button) {
      const label = th.textContent, name = make("span");
      button = make("button", { type: "button", className: "sort" });
      if (th.matches(".c-extra")) { writeShortened(name, label, NARROW); name.title = th.title || label; button.append(name); button.setAttribute("aria-label", label); } else setText(button, label);
      button.addEventListener("click", () => choose(button.dataset.order));
      th.replaceChildren(button);
    }
    const direction = current === by ? "ascending" : current === `-${by}` ? "descending" : "";
    button.dataset.order = (direction ? direction === "ascending" : descends !== undefined) ? `-${by}` : by;
    if (direction) th.setAttribute("aria-sort", direction); else th.removeAttribute("aria-sort");
  }
}

/** Inserts the nodes `wanted` into `parent` in this order, before the child `at`. Nodes that are already in place do not move. */
export function arrange(parent, wanted, at = parent.firstElementChild) {
  for (const node of wanted) {
    if (node === at) at = at.nextElementSibling;
    // `moveBefore` keeps the keyboard focus in the node.
    else if (parent.moveBefore) parent.moveBefore(node, at);
    else parent.insertBefore(node, at);
  }
}
