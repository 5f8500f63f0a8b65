// The list of jobs: rows change in place when the stream reports changes. The URL contains the filter.

import { ask, byId, nextFrame, notify, Problem, Unreachable, errorText, showLive, setText } from "./page.js";
import { writeUrl } from "./address.js";
import { count } from "./numbers.js";
import { Stream } from "./stream.js";
import { isFinal } from "./job/states.js";
import { Bulk } from "./jobs/bulk.js";
import { Columns } from "./jobs/columns.js";
import { groupedBy, Grouping } from "./jobs/grouping.js";
import { Groups } from "./jobs/groups.js";
import { FilterMenu } from "./jobs/filter-menu.js";
import { filter, fits, mentions, MIN_PAUSE_MS, parameters, readPage, pauseAfter } from "./jobs/query.js";
import { Queue } from "./jobs/queue.js";
import { createRow, fillRow } from "./jobs/row.js";
import { arrange, drawHeads, sortValue, order, DEFAULT_ORDER, defaultOrder } from "./jobs/sort.js";
import { Views } from "./jobs/views.js";
import { Window } from "./jobs/window.js";

// The links that MLflow's client prints: `/#/experiments/PROJECT` and `/#/experiments/PROJECT/runs/JOB`. Experiment 0 is MLflow's default.
const [, experiment, run] = /^#\/experiments\/([^/]+)(?:\/runs\/([^/]+))?$/.exec(location.hash) ?? [];
if (experiment) location.replace(run ? `/jobs/${run}` : `/jobs?project=${experiment === "0" ? "default" : experiment}`);

/** Number of jobs in the first request. Older jobs are read when the reader scrolls to them, in larger requests further down. */
const PAGE_SIZE = 50;
/** Maximum number of jobs that are read when the reader scrolls. */
const MAX_PAGE_SIZE = 250;
/** Maximum number of jobs that are read again when the order or search results may have changed. */
const MAX_RELOAD = 200;
/** Maximum number of jobs that are read again after an interruption. Rows of other jobs are removed, until the reader scrolls to them. */
const MAX_CATCH_UP = 1000;
const rows = byId("rows"), search = byId("search");
const jobs = new Map(), rowOf = new Map([...rows.children].map((row) => [row.dataset.id, row]));
/** For jobs from the stream that are not listed: the sort value with which the list was read again. Only the server knows their places. */
const requestedSortValue = new Map();
/** The last known state of every job, including jobs outside the list: a job may leave the list before the stream reports its end. */
const stateOf = new Map([...rowOf].map(([id, row]) => [id, row.dataset.state]));
/** Ends of jobs of which the reader was notified: after an interruption, both a request and the stream may report the same end. */
const notified = new Set();
/** Number of the newest call of `load`, which earlier calls compare with `thisLoad`. */
let loads = 0;
/** Cursor of the next jobs, and whether these jobs are being read. */
let nextCursor = null, isReadingMore = false;
/** Timer of `reloadSoon`, and its pause. */
let reloadTimer = 0, reloadPauseMs = MIN_PAUSE_MS;
/** Whether the filter or the order has changed since the list was read. */
let isFilterChanged = true;
/** Whether the stream was interrupted. */
let wasInterrupted = false;
/** Resolves after the first rows are painted. No row is changed before. */
const firstPaint = nextFrame();
let groups = null;
const bulk = new Bulk(rows.parentElement, { find: (id) => jobs.get(id) ?? groups.jobs.get(id), rowCount: () => (groups?.isGrouped ? groups.rowCount : rows.childElementCount) });
/** Number of the newest call of `fillAll`, and the call in which each row was written. A row that is not laid out is written when it comes into view. */
let round = 0;
const written = new WeakMap();
const rowWindow = new Window(rows, (row) => { const job = jobs.get(row.dataset.id); if (job && written.get(row) !== round) fill(row, job); });
const queue = new Queue(() => loadedJobs(), (job) => { const row = rowOf.get(job.id); if (row) fill(row, job); groups?.refill(job); });

/** Whether the list has another order than the newest jobs first. */
const hasOtherOrder = () => order() !== DEFAULT_ORDER;
const fill = (row, job) => { written.set(row, round); fillRow(row, job); columns.fill(row, job); };
const drawHeadings = () => drawHeads(document.querySelector("#jobs thead tr"), (sort) => change({ sort: sort === defaultOrder() ? "" : sort }));
const fillAll = () => { round++; for (const row of rowWindow.shown) { const job = jobs.get(row.dataset.id); if (job) fill(row, job); } groups?.fillAll(); };
const loadedJobs = () => [...jobs.values(), ...(groups?.jobs.values() ?? [])];
const knownTags = () => new Set(loadedJobs().flatMap((job) => job.tags));
const columns = new Columns({ refill: (needsRead) => { fillAll(); drawHeadings(); if (groups?.isGrouped || needsRead) reload(); }, known: () => ({ jobs: loadedJobs(), tags: knownTags() }) });
groups = new Groups(rows.parentElement, { fill, extra: () => columns.extra, onChange: () => { showEmpty(); bulk.forgetUnshown(); }, onRead: notifyOfEnd });
const filterMenu = new FilterMenu((values) => change(values), () => columns.settings());
const grouping = new Grouping((values) => change(values), () => columns.settings());
new Views(() => columns.choice());

/** Reads the list again, after a change of the filter or the order, or after an interruption of the stream. */
async function load() {
  if (groups.isGrouped) {
    loads++;
    nextCursor = null;
    await Promise.all([groups.load(), firstPaint]);
    // Groups replace the list of jobs.
    if (groups.isGrouped) for (const id of [...rowOf.keys()]) remove(id);
    return showEmpty();
  }
  groups.clear();
  // The stream does not repeat the events during an interruption, so all rows are read again.
  const thisLoad = ++loads, isReordered = hasOtherOrder(), isNewList = isFilterChanged, isCatchUp = wasInterrupted && !isNewList, before = new Map(jobs);
  const maxReloaded = isNewList ? 0 : isCatchUp ? MAX_CATCH_UP : isReordered ? MAX_RELOAD : 0;
  const response = await readPage(filter(), null, Math.max(PAGE_SIZE, Math.min(maxReloaded, rowOf.size)));
  await firstPaint;
  if (thisLoad !== loads) return;
  isFilterChanged = wasInterrupted = false;
  const listed = new Set(response.jobs.map((j) => j.id)), last = response.jobs.at(-1)?.created_at ?? "";
  // A job that the response lacks is removed, unless it is on a later page that was loaded before, or the stream has reported it meanwhile.
  const isFurtherDown = (id, row) => !isCatchUp && response.next_cursor && jobs.has(id) && (isReordered || row.dataset.created < last);
  const stays = (id, row) => !isNewList && (jobs.get(id) !== before.get(id) || isFurtherDown(id, row));
  for (const [id, row] of rowOf) if (!listed.has(id) && !stays(id, row)) remove(id);
  for (const job of response.jobs) show(job);
  if (isReordered || isNewList) arrange(rows, response.jobs.map((job) => rowOf.get(job.id)).filter(Boolean));
  if (isCatchUp || rowOf.size <= response.jobs.length) nextCursor = response.next_cursor;
  drawHeadings();
  showEmpty();
  bulk.forgetUnshown();
}

/** Like `load`, and shows errors. */
const reload = () => load().then(() => filterMenu.showProblem(""), (error) => {
  if (error instanceof Unreachable || error.status >= 500) return showLive("reconnecting");
  if (!(error instanceof Problem)) return filterMenu.showProblem(errorText(error));
  // For an invalid filter or order, no jobs are listed.
  nextCursor = null;
  for (const id of [...rowOf.keys()]) remove(id);
  groups.clear();
  groups.isEmpty = true;
  showEmpty();
  bulk.forgetUnshown();
  filterMenu.showProblem(errorText(error));
});

/** Reads the list again after a pause, because the places of jobs may have changed. */
function reloadSoon() {
  reloadTimer ||= setTimeout(async () => {
    reloadTimer = 0;
    // Rows to which the reader scrolls come first.
    if (isReadingMore) return reloadSoon();
    const began = performance.now();
    // A failed request does not change the pause.
    await load().then(() => { reloadPauseMs = pauseAfter(began); }, () => {});
  }, reloadPauseMs);
}

async function loadMore() {
  if (!nextCursor || isReadingMore) return;
  isReadingMore = true;
  const thisLoad = loads, response = await readPage(filter(), nextCursor, Math.max(PAGE_SIZE, Math.min(MAX_PAGE_SIZE, rowOf.size))).catch(() => null);
  isReadingMore = false;
  if (!response) return;
  // The list was read again in the meantime, so other jobs may follow.
  if (thisLoad !== loads) return isNearEnd() ? loadMore() : undefined;
  nextCursor = response.next_cursor;
  for (const job of response.jobs) show(job);
  showEmpty();
  if (nextCursor && isNearEnd()) requestAnimationFrame(loadMore);
}

const isNearEnd = () => !byId("older").hidden && byId("older").getBoundingClientRect().top < innerHeight + 600;

/** Handles a job from the stream. The place of a new job in the order is known only to the server, unless the newest jobs come first. */
function handleJob(job) {
  if (groups.isGrouped) return groups.handleJob(job);
  const known = jobs.get(job.id), { text } = filter();
  if (known) {
    // After the first validation, the server knows whether the initial weights were trained on the validation pictures.
    if (known.last_seq <= job.last_seq && (sortValue(known) !== sortValue(job) || (job.best && !known.best))) reloadSoon();
    return show(job);
  }
  if (!fits(job, filter())) return;
  if (!hasOtherOrder() && mentions(job, text)) return show(job);
  if (requestedSortValue.get(job.id) === sortValue(job)) return;
  requestedSortValue.set(job.id, sortValue(job));
  reloadSoon();
}

/** Timer of `countSoon`, and its pause. */
let countTimer = 0, countPauseMs = 0;
/**
 * Shows how many of the jobs that match the other filters are in each state. The server reads all of these jobs, so the pause between
 * requests grows with its response time.
 */
function countSoon() {
  countTimer ||= setTimeout(async () => {
    countTimer = 0;
    if (document.hidden) return document.addEventListener("visibilitychange", countSoon, { once: true });
    const began = performance.now();
    countPauseMs = MIN_PAUSE_MS;
    const found = await ask(`/api/v1/jobs/groups?${new URLSearchParams([...parameters({ ...filter(), states: [] }), ["by", "state"]])}`).catch(() => null);
    countPauseMs = pauseAfter(began);
    if (!found) return;
    const jobsIn = new Map(found.groups.map((group) => [group.values[0], group.jobs])), all = [...jobsIn.values()].reduce((sum, n) => sum + n, 0);
    for (const a of document.querySelectorAll("#filters [data-state]")) {
      const jobCount = a.dataset.state ? jobsIn.get(a.dataset.state) : all;
      setText(a.querySelector("small"), jobCount ? count(jobCount) : "");
    }
  }, countPauseMs);
}

function notifyOfEnd(job) {
  const before = stateOf.get(job.id), end = `${job.id} ${job.finished_at}`;
  stateOf.set(job.id, job.state);
  if (!before || isFinal(before) || !isFinal(job.state) || notified.has(end)) return;
  notified.add(end);
  notify(`${job.name}: ${job.state}`, job.reason ?? "", `/jobs/${job.id}`);
}

/** Keeps a job from the stream for the next frame. A hidden page has no frames, so the reader is notified of a job's end at once. */
function receive(job) {
  const before = { ...job, state: stateOf.get(job.id) };
  if (before.state !== job.state) countSoon();
  if (jobs.has(job.id) || groups.jobs.has(job.id) || (fits(before, filter()) && mentions(before, filter().text))) notifyOfEnd(job);
  else stateOf.set(job.id, job.state);
  received.set(job.id, job);
}

function show(job) {
  const known = jobs.get(job.id);
  // Only lists tell whether the initial weights were trained on the validation pictures.
  if (known) known.trained_validation = job.trained_validation ??= known.trained_validation;
  if (known && known.last_seq > job.last_seq) return;
  if (!fits(job, filter())) return remove(job.id);
  notifyOfEnd(job);
  queue.keepPlace(known, job);
  jobs.set(job.id, job);
  let row = rowOf.get(job.id);
  if (!row) {
    row = createRow(job);
    rowOf.set(job.id, row);
    // Most new rows belong at the start or at the end.
    if (hasOtherOrder() || !rows.lastElementChild || rows.lastElementChild.dataset.created >= job.created_at) rows.append(row);
    else rows.insertBefore(row, [...rows.children].find((r) => r.dataset.created < job.created_at) ?? null);
  }
  if (!row.hidden) fill(row, job); else written.delete(row);
}

function remove(id) {
  jobs.delete(id);
  rowOf.get(id)?.remove();
  rowOf.delete(id);
  bulk.forget(id);
}

function showEmpty() {
  const current = filter(), { states, text, owner, tags, project, conditions, after, before } = current, state = states.join(" or "), tag = tags.join(", ");
  // If all visible jobs are removed, older jobs take their place.
  const isEmpty = groups.isGrouped ? groups.isEmpty : !rows.childElementCount && !nextCursor;
  if (!rows.childElementCount && nextCursor) loadMore();
  byId("jobs").hidden = isEmpty;
  const isFiltered = parameters(current).length > 0;
  byId("none-match").hidden = !isEmpty || !isFiltered;
  byId("no-jobs").hidden = !isEmpty || isFiltered;
  byId("older").hidden = !nextCursor;
  const parts = [state && `is ${state}`, text && `has “${text}” in its name, tags or notes`, tag && `is tagged “${tag}”`, project && `is in project “${project}”`,
    owner && `belongs to ${owner}`, conditions.length && `has ${conditions.join(" and ")}`, (after || before) && "was submitted on these days"].filter(Boolean);
  setText(byId("none-match").querySelector("p"), `No job ${parts.join(" and ")}.`);
  rowWindow.draw();
}

/** Writes a change of the filter or the order into the URL, and reads the list again. */
function change(values) {
  writeUrl({ ...values, cursor: "" });
  drawFilter();
  // Jobs that no longer match are removed at once. The response adds other jobs.
  for (const job of [...jobs.values()]) if (!fits(job, filter())) remove(job.id);
  nextCursor = null;
  isFilterChanged = true;
  reload();
  countPauseMs = 0;
  countSoon();
}

const searchFor = (text) => change({ q: text, name: "" });

/** Draws everything that shows the filter and the order. */
function drawFilter() {
  requestedSortValue.clear();
  markStates();
  filterMenu.draw();
  grouping.draw();
  drawHeadings();
}

/** Returns the chosen states after a click on this state, which adds or removes the state. */
const toggleState = (states, state) => (!state ? [] : states.includes(state) ? states.filter((s) => s !== state) : [...states, state]);

function markStates() {
  const current = filter();
  for (const a of document.querySelectorAll("#filters [data-state]")) {
    const { state } = a.dataset, isChosen = state ? current.states.includes(state) : !current.states.length;
    if (isChosen) a.setAttribute("aria-current", "true"); else a.removeAttribute("aria-current");
    const query = new URLSearchParams([...parameters({ ...current, states: toggleState(current.states, state) }), ...(order() === defaultOrder() ? [] : [["sort", order()]]), ...(groups.isGrouped ? [["group_by", groupedBy().join(",")]] : [])]);
    a.href = `/jobs${query.size ? `?${query}` : ""}`;
  }
}

for (const a of document.querySelectorAll("#filters [data-state]")) {
  a.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    change({ state: toggleState(filter().states, a.dataset.state).join(",") });
  });
}
let typing = 0;
search.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(() => searchFor(search.value.trim()), 150); });
byId("filters").addEventListener("submit", (event) => { event.preventDefault(); clearTimeout(typing); searchFor(search.value.trim()); });
// A click on a row's tag adds the tag to the filter, and other filters stay. In a new tab, the link leads to all jobs with the tag.
byId("jobs").addEventListener("click", (event) => {
  const tag = event.target.closest("a.tag");
  if (!tag || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  filterMenu.addTag(tag.title);
});
addEventListener("popstate", () => { search.value = filter().text; columns.loadChoice(); drawFilter(); isFilterChanged = true; reload(); });
setInterval(fillAll, 15_000);
// The observer below reports only changes. If rows are added and the reader scrolls to the end within one frame, the observer reports nothing.
addEventListener("scroll", () => { if (isNearEnd()) loadMore(); }, { passive: true });
new IntersectionObserver((seen) => { if (seen.some((s) => s.isIntersecting)) loadMore(); }, { rootMargin: "600px" }).observe(byId("older"));
search.value = filter().text;
// The script shows these filters as chips.
for (const id of ["tag-filter", "project-filter"]) byId(id).hidden = true;
markStates();

let frame = 0;
/** Jobs from the stream, by id, which are handled in the next frame. */
const received = new Map();
new Stream({
  path: () => "/api/v1/stream",
  onStatus: showLive,
  onFrame(message) {
    if (message.type === "job") receive(message.job);
    else if (message.type === "job_deleted") { received.delete(message.id); remove(message.id); countSoon(); if (groups.isGrouped) groups.reloadSoon(); showEmpty(); }
    // The list is read after the stream has opened, so that no change is lost between the two.
    else if (message.type === "hello" || message.type === "live") { wasInterrupted = true; reload(); countSoon(); }
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      for (const job of received.values()) handleJob(job);
      received.clear();
      showEmpty();
      // The possible actions for the selected jobs may have changed.
      bulk.draw();
    });
  },
});
reload().then(() => performance.mark("jobs listed"));
