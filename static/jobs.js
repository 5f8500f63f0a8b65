// The list of jobs: rows change in place as the stream reports them; the filter lives in the address.

import { byId, drawn, notify, Problem, sentence, showLive, text } from "./page.js";
import { write } from "./address.js";
import { Stream } from "./stream.js";
import { Bulk } from "./jobs/bulk.js";
import { Columns } from "./jobs/columns.js";
import { groupedBy, Grouping } from "./jobs/grouping.js";
import { Groups } from "./jobs/groups.js";
import { Narrow } from "./jobs/narrow.js";
import { filter, fits, mentions, parameters, part } from "./jobs/query.js";
import { Queue } from "./jobs/queue.js";
import { blank, fill as fillRow, FINAL } from "./jobs/row.js";
import { arrange, drawHeads, key, order, USUAL } from "./jobs/sort.js";
import { Views } from "./jobs/views.js";
import { Window } from "./jobs/window.js";

/** Jobs read at a time; older ones as the reader scrolls to them, more at a time the further that is. */
const PART = 50, LARGEST_PART = 250;
/** Jobs that are read again when the order or the search may have changed, and how often: at most, and at least. */
const AGAIN = 200, AGAIN_MS = 3000, LONGEST_AGAIN_MS = 30_000;
const rows = byId("rows"), search = byId("search");
const jobs = new Map(), rowOf = new Map([...rows.children].map((row) => [row.dataset.id, row]));
/** What jobs of the stream were sorted by when the list was read again for them: the server alone knows their places, and reads notes. */
const asked = new Map();
/** The last known state of every job, also of those that are no longer listed: a job may leave the list before the stream tells of its end. */
const stateOf = new Map([...rowOf].map(([id, row]) => [id, row.dataset.state]));
/** Ends that were told: each comes with the stream, and again with what is read after a time without it. */
const told = new Set();
/** `anew`: the filter or the order has changed since the list was read. `missed`: there was a time without the stream; `catching`: the load that reads what was missed. */
let loads = 0, next = null, reading = false, again = 0, anew = true, missed = false, catching = 0, pause = AGAIN_MS;
/** The rows that came with the page are shown before any is changed. */
const shown = drawn();
let groups = null;
const bulk = new Bulk(rows.parentElement, { find: (id) => jobs.get(id) ?? groups.jobs.get(id), listed: () => (groups?.on ? groups.listed : rows.childElementCount) });
/** When a row was last written: those that are not laid out are written again as they come into sight. */
let round = 0;
const written = new WeakMap();
const viewed = new Window(rows, (row) => { const job = jobs.get(row.dataset.id); if (job && written.get(row) !== round) fill(row, job); });
const queue = new Queue(() => [...jobs.values(), ...(groups?.jobs.values() ?? [])], (job) => { const row = rowOf.get(job.id); if (row) fill(row, job); groups?.again(job); });

const isSorted = () => order() !== USUAL;
const fill = (row, job) => { written.set(row, round); fillRow(row, job); columns.fill(row, job); };
const heads = () => drawHeads(document.querySelector("#jobs thead tr"), (sort) => change({ sort: sort === USUAL ? "" : sort }));
const fillAll = () => { round++; for (const row of viewed.shown) { const job = jobs.get(row.dataset.id); if (job) fill(row, job); } groups?.fillAll(); };
const known = () => [...jobs.values(), ...(groups?.jobs.values() ?? [])];
const tagsOf = () => new Set(known().flatMap((job) => job.tags));
const columns = new Columns({ refill: (more) => { fillAll(); heads(); if (groups?.on || more) read(); }, known: () => ({ jobs: known(), tags: tagsOf() }) });
groups = new Groups(rows.parentElement, { fill, extra: () => columns.extra, changed: () => { empty(); bulk.forgetUnshown(); }, ended: tellEnd });
const narrow = new Narrow((values) => change(values), () => columns.settings());
const grouping = new Grouping((values) => change(values), () => columns.settings());
new Views(() => columns.words());

/** Reads the list again: after a change of the filter or the order, and after a time without the stream. */
async function load() {
  if (groups.on) {
    loads++;
    next = null;
    await Promise.all([groups.load(), shown]);
    // The groups stand where the jobs stood.
    if (groups.on) for (const id of [...rowOf.keys()]) remove(id);
    return empty();
  }
  groups.clear();
  const mine = ++loads, sorted = isSorted(), whole = anew;
  if (missed && !whole && rowOf.size > PART) return loadShown(mine);
  const answer = await part(filter(), null, sorted && !whole ? Math.min(AGAIN, Math.max(PART, rowOf.size)) : PART);
  await shown;
  if (mine !== loads) return;
  anew = missed = false;
  const listed = new Set(answer.jobs.map((j) => j.id)), last = answer.jobs.at(-1)?.created_at ?? "";
  // Those further down that the reader has come to stay; what is missing among these is gone.
  const stays = (id, row) => !whole && answer.next_cursor && jobs.has(id) && (sorted || row.dataset.created < last);
  for (const [id, row] of rowOf) if (!listed.has(id) && !stays(id, row)) remove(id);
  for (const job of answer.jobs) show(job);
  if (sorted || whole) arrange(rows, answer.jobs.map((job) => rowOf.get(job.id)).filter(Boolean));
  if (rowOf.size <= answer.jobs.length) next = answer.next_cursor;
  heads();
  empty();
  bulk.forgetUnshown();
}

/** Reads every row that is shown, in parts: what happened to jobs while nobody heard, the stream does not say again. */
async function loadShown(mine) {
  const before = new Map(jobs), shownBefore = [...rowOf.keys()], listed = [];
  let cursor = null;
  catching = mine;
  try {
    do {
      const answer = await part(filter(), cursor, LARGEST_PART);
      await shown;
      if (mine !== loads) return;
      for (const job of answer.jobs) { listed.push(job.id); show(job); }
      cursor = answer.next_cursor;
    } while (cursor && listed.length < shownBefore.length);
  } finally { if (catching === mine) catching = 0; }
  const there = new Set(listed);
  // Those that the stream told of meanwhile are there, wherever they stand now; others come again with what follows.
  for (const id of shownBefore) if (!there.has(id) && jobs.get(id) === before.get(id)) remove(id);
  if (isSorted()) arrange(rows, listed.map((id) => rowOf.get(id)).filter(Boolean));
  next = cursor;
  missed = false;
  heads();
  empty();
  bulk.forgetUnshown();
}

const read = () => load().then(() => narrow.refused(""), (error) => {
  if (!(error instanceof Problem) || error.status >= 500) return showLive("reconnecting");
  // Nothing is listed under a filter or an order that is none.
  next = null;
  for (const id of [...rowOf.keys()]) remove(id);
  groups.clear();
  groups.none = true;
  empty();
  bulk.forgetUnshown();
  narrow.refused(sentence(error));
});

/** Soon, and not for every frame: the places of jobs may have changed. */
function readSoon() {
  again ||= setTimeout(async () => {
    again = 0;
    // What the reader scrolls to comes first.
    if (catching || reading) return readSoon();
    const began = performance.now();
    // A server that takes long for them is asked less often; one that does not answer says nothing of that.
    await load().then(() => { pause = Math.min(LONGEST_AGAIN_MS, Math.max(AGAIN_MS, 4 * (performance.now() - began))); }, () => {});
  }, pause);
}

async function more() {
  if (!next || reading) return;
  reading = true;
  const mine = loads, answer = await part(filter(), next, Math.max(PART, Math.min(LARGEST_PART, rowOf.size))).catch(() => null);
  reading = false;
  if (!answer) return;
  // The list was read again meanwhile: what comes next may be something else.
  if (mine !== loads) return nearEnd() ? more() : undefined;
  next = answer.next_cursor;
  for (const job of answer.jobs) show(job);
  empty();
  if (next && nearEnd()) requestAnimationFrame(more);
}

const nearEnd = () => !byId("older").hidden && byId("older").getBoundingClientRect().top < innerHeight + 600;

/** A job of the stream: new ones come in by their place in the order, which the server knows. */
function hear(job) {
  if (groups.on) return groups.hear(job);
  const known = jobs.get(job.id), { text: words } = filter();
  if (known) {
    if (known.last_seq <= job.last_seq && key(known) !== key(job)) readSoon();
    return show(job);
  }
  if (!fits(job, filter())) return;
  if (!isSorted() && mentions(job, words)) return show(job);
  if (asked.get(job.id) === key(job)) return;
  asked.set(job.id, key(job));
  readSoon();
}

function tellEnd(job) {
  const before = stateOf.get(job.id), end = `${job.id} ${job.finished_at}`;
  stateOf.set(job.id, job.state);
  if (!before || FINAL.includes(before) || !FINAL.includes(job.state) || told.has(end)) return;
  told.add(end);
  notify(`${job.name}: ${job.state}`, job.reason ?? "", `/jobs/${job.id}`);
}

/** A job of the stream waits for the next frame, which a hidden page has none of. Its end is told at once, if it belongs into the list. */
function receive(job) {
  const before = { ...job, state: stateOf.get(job.id) };
  if (jobs.has(job.id) || groups.jobs.has(job.id) || (fits(before, filter()) && mentions(before, filter().text))) tellEnd(job);
  else stateOf.set(job.id, job.state);
  waiting.set(job.id, job);
}

function show(job) {
  const known = jobs.get(job.id);
  if (known && known.last_seq > job.last_seq) return;
  if (!fits(job, filter())) return remove(job.id);
  tellEnd(job);
  queue.keep(known, job);
  jobs.set(job.id, job);
  let row = rowOf.get(job.id);
  if (!row) {
    row = blank(job);
    rowOf.set(job.id, row);
    // Most come at one of the ends.
    if (isSorted() || !rows.lastElementChild || rows.lastElementChild.dataset.created >= job.created_at) rows.append(row);
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

function empty() {
  const now = filter(), { states, text: words, owner, tags, project, conditions, after, before } = now, state = states.join(" or "), tag = tags.join(", ");
  // What was shown is gone, and there are older ones: those come into its place.
  const none = groups.on ? groups.none : !rows.childElementCount && !next;
  if (!rows.childElementCount && next) more();
  byId("jobs").hidden = none;
  const filtered = parameters(now).length > 0;
  byId("none-match").hidden = !none || !filtered;
  byId("no-jobs").hidden = !none || filtered;
  byId("older").hidden = !next;
  const parts = [state && `is ${state}`, words && `has “${words}” in its name, tags or notes`, tag && `is tagged “${tag}”`, project && `is in project “${project}”`,
    owner && `is of ${owner}`, conditions.length && `has ${conditions.join(" and ")}`, (after || before) && "was submitted in these days"].filter(Boolean);
  text(byId("none-match").querySelector("p"), `No job ${parts.join(" and ")}.`);
  viewed.draw();
}

/** Writes a change of the filter or the order into the address and reads the list again. */
function change(values) {
  write({ ...values, cursor: "" });
  marked();
  // What is here and no longer fits goes at once; the answer brings the rest.
  for (const job of [...jobs.values()]) if (!fits(job, filter())) remove(job.id);
  next = null;
  anew = true;
  read();
}

const searchFor = (words) => change({ q: words, name: "" });

function marked() {
  asked.clear();
  mark();
  narrow.draw();
  grouping.draw();
  heads();
}

/** The states that a click on this one leads to: it is added to the others, or taken away. */
const toggled = (states, state) => (!state ? [] : states.includes(state) ? states.filter((s) => s !== state) : [...states, state]);

function mark() {
  const now = filter();
  for (const a of document.querySelectorAll("#filters [data-state]")) {
    const own = a.dataset.state, on = own ? now.states.includes(own) : !now.states.length;
    if (on) a.setAttribute("aria-current", "true"); else a.removeAttribute("aria-current");
    const to = new URLSearchParams([...parameters({ ...now, states: toggled(now.states, own) }), ...(isSorted() ? [["sort", order()]] : []), ...(groups.on ? [["group_by", groupedBy().join(",")]] : [])]);
    a.href = `/jobs${to.size ? `?${to}` : ""}`;
  }
}

for (const a of document.querySelectorAll("#filters [data-state]")) {
  a.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    change({ state: toggled(filter().states, a.dataset.state).join(",") });
  });
}
let typing = 0;
search.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(() => searchFor(search.value.trim()), 150); });
byId("filters").addEventListener("submit", (event) => { event.preventDefault(); clearTimeout(typing); searchFor(search.value.trim()); });
// A row's tag is added to the filter; what else narrows the list stays. Elsewhere, and in a new tab, it leads to all jobs with it.
byId("jobs").addEventListener("click", (event) => {
  const tag = event.target.closest("a.tag");
  if (!tag || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  narrow.addTag(tag.title);
});
addEventListener("popstate", () => { search.value = filter().text; columns.fromAddress(); marked(); anew = true; read(); });
setInterval(fillAll, 15_000);
// The observer tells changes alone: rows that come, and a reader who scrolls to their end, may be one frame and no change.
addEventListener("scroll", () => { if (nearEnd()) more(); }, { passive: true });
new IntersectionObserver((seen) => { if (seen.some((s) => s.isIntersecting)) more(); }, { rootMargin: "600px" }).observe(byId("older"));
search.value = filter().text;
// They are chips here.
for (const id of ["tag-filter", "project-filter"]) byId(id).hidden = true;
mark();

let frame = 0;
const waiting = new Map();
new Stream({
  path: () => "/api/v1/stream",
  onStatus: showLive,
  onFrame(message) {
    if (message.type === "job") receive(message.job);
    else if (message.type === "job_deleted") { waiting.delete(message.id); remove(message.id); if (groups.on) groups.readSoon(); empty(); }
    // The list is read once the stream is open, so that nothing falls between the two.
    else if (message.type === "hello" || message.type === "live") { missed = true; read(); }
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      for (const job of waiting.values()) hear(job);
      waiting.clear();
      empty();
      // What can be done with those chosen may have changed.
      bulk.draw();
    });
  },
});
read().then(() => performance.mark("jobs listed"));
