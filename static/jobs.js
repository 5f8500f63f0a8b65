// The list of jobs: rows change in place as the stream reports them; the filter lives in the address.

import { ask, byId, drawn, notify, showLive, text } from "./page.js";
import { Stream } from "./stream.js";
import { Bulk } from "./jobs/bulk.js";
import { Columns } from "./jobs/columns.js";
import { matches as fits, part as ask_part } from "./jobs/query.js";
import { blank, fill as fillRow, FINAL } from "./jobs/row.js";

/** Jobs read at a time; older ones as the reader scrolls to them. */
const PART = 50;
const rows = byId("rows"), search = byId("search");
const jobs = new Map(), rowOf = new Map([...rows.children].map((row) => [row.dataset.id, row]));
/** What people wrote on jobs, by job: read when somebody searches for a text. */
let notes = {};
const filter = () => {
  const at = new URL(location.href).searchParams;
  const list = (key) => (at.get(key) ?? "").split(",").map((word) => word.trim()).filter(Boolean);
  return { states: list("state"), text: at.get("name") ?? "", owner: at.get("owner") ?? "", tags: list("tag"), project: at.get("project") ?? "" };
};
let asked = 0, next = null, reading = false;
/** The rows that came with the page are shown before any is changed. */
const shown = drawn();
const bulk = new Bulk(rows, jobs);

const matches = (job) => fits(job, filter(), notes[job.id]?.notes);
const fill = (row, job) => { fillRow(row, job); columns.fill(row, job); };
const fillAll = () => { for (const job of jobs.values()) fill(rowOf.get(job.id), job); };
const columns = new Columns({ refill: () => fillAll(), known: () => ({ jobs: [...jobs.values()], tags: new Set([...jobs.values()].flatMap((job) => job.tags)) }) });

async function annotations() {
  notes = (await ask("/api/v1/annotations")).jobs;
  return notes;
}

const part = (cursor) => ask_part(filter(), cursor, PART, annotations);

/** Reads the list again: after a change of the filter, and after a time without the stream. */
async function load() {
  const mine = ++asked, answer = await part(null);
  await shown;
  if (mine !== asked) return;
  const listed = new Set(answer.jobs.map((j) => j.id)), last = answer.jobs.at(-1)?.created_at ?? "";
  // Older ones that the reader has come to stay; what is missing among these is gone.
  for (const [id, row] of rowOf) if (!listed.has(id) && (!answer.next || row.dataset.created >= last || !jobs.has(id))) remove(id);
  for (const job of answer.jobs) show(job);
  if (rowOf.size <= answer.jobs.length) next = answer.next;
  empty();
  bulk.draw();
}

async function more() {
  if (!next || reading) return;
  reading = true;
  const mine = asked, answer = await part(next).catch(() => null);
  reading = false;
  if (!answer || mine !== asked) return;
  next = answer.next;
  for (const job of answer.jobs) show(job);
  empty();
}

function show(job) {
  const known = jobs.get(job.id);
  if (known && known.last_seq > job.last_seq) return;
  if (!matches(job)) return remove(job.id);
  if (known && !FINAL.includes(known.state) && FINAL.includes(job.state)) notify(`${job.name}: ${job.state}`, job.reason ?? "", `/jobs/${job.id}`);
  jobs.set(job.id, job);
  let row = rowOf.get(job.id);
  if (!row) {
    row = blank(job);
    rowOf.set(job.id, row);
    // Most come at one of the ends.
    if (!rows.lastElementChild || rows.lastElementChild.dataset.created >= job.created_at) rows.append(row);
    else rows.insertBefore(row, [...rows.children].find((r) => r.dataset.created < job.created_at) ?? null);
  }
  fill(row, job);
}

function remove(id) {
  jobs.delete(id);
  rowOf.get(id)?.remove();
  rowOf.delete(id);
  bulk.forget(id);
}

function empty() {
  const { states, text: name, owner, tags, project } = filter(), state = states.join(" or "), tag = tags.join(", ");
  // What was shown is gone, and there are older ones: those come into its place.
  const none = !rows.childElementCount && !next;
  if (!rows.childElementCount && next) more();
  byId("jobs").hidden = none;
  const filtered = Boolean(state || name || owner || tag || project);
  byId("none-match").hidden = !none || !filtered;
  byId("no-jobs").hidden = !none || filtered;
  byId("older").hidden = !next;
  text(byId("none-match").querySelector("p"), `No job${state ? ` is ${state}` : ""}${state && name ? " and" : ""}${name ? ` has “${name}” in its name, tags or notes` : ""}${tag ? ` is tagged “${tag}”` : ""}${project ? ` is in project “${project}”` : ""}${owner ? ` is of ${owner}` : ""}.`);
  byId("tag-filter").hidden = !tag;
  text(byId("tag-name"), tag);
  byId("project-filter").hidden = !project;
  text(byId("project-name"), project);
}

function filterBy(change) {
  const url = new URL(location.href);
  for (const [key, v] of Object.entries({ ...change, cursor: "" })) if (v) url.searchParams.set(key, v); else url.searchParams.delete(key);
  history.replaceState(null, "", url);
  mark();
  // What is here and no longer fits goes at once; the answer brings the rest.
  for (const job of [...jobs.values()]) if (!matches(job)) remove(job.id);
  next = null;
  load().catch(() => showLive("reconnecting"));
}

/** The states that a click on this one leads to: it is added to the others, or taken away. */
const toggled = (states, state) => (!state ? [] : states.includes(state) ? states.filter((s) => s !== state) : [...states, state]);

function mark() {
  const { states, text: name, owner, tags, project } = filter();
  for (const a of document.querySelectorAll("#filters [data-state]")) {
    const own = a.dataset.state, on = own ? states.includes(own) : !states.length;
    if (on) a.setAttribute("aria-current", "true"); else a.removeAttribute("aria-current");
    const to = new URLSearchParams(Object.entries({ state: toggled(states, own).join(","), name, project, tag: tags.join(","), owner }).filter(([, v]) => v));
    a.href = `/jobs${to.size ? `?${to}` : ""}`;
  }
}

for (const a of document.querySelectorAll("#filters [data-state]")) {
  a.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    filterBy({ state: toggled(filter().states, a.dataset.state).join(",") });
  });
}
let typing = 0;
search.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(() => filterBy({ name: search.value.trim() }), 150); });
byId("filters").addEventListener("submit", (event) => { event.preventDefault(); filterBy({ name: search.value.trim() }); });
byId("tag-filter").addEventListener("click", (event) => { event.preventDefault(); filterBy({ tag: "" }); });
byId("project-filter").addEventListener("click", (event) => { event.preventDefault(); filterBy({ project: "" }); });
addEventListener("popstate", () => { search.value = filter().text; mark(); columns.fromAddress(); load(); });
setInterval(fillAll, 15_000);
new IntersectionObserver((seen) => { if (seen.some((s) => s.isIntersecting)) more(); }, { rootMargin: "600px" }).observe(byId("older"));
search.value = filter().text;
mark();

let frame = 0;
const waiting = new Map();
new Stream({
  path: () => "/api/v1/stream",
  onStatus: showLive,
  onFrame(message) {
    if (message.type === "job") waiting.set(message.job.id, message.job);
    else if (message.type === "job_deleted") { waiting.delete(message.id); remove(message.id); empty(); }
    // The list is read once the stream is open, so that nothing falls between the two.
    else if (message.type === "hello" || message.type === "live") load().catch(() => {});
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      for (const job of waiting.values()) show(job);
      waiting.clear();
      empty();
      // What can be done with those chosen may have changed.
      bulk.draw();
    });
  },
});
load().then(() => performance.mark("jobs listed"), () => {});
