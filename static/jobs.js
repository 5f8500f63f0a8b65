// The list of jobs: rows change in place as the stream tells of them; the filter lives in the address.

import { ask, byId, showLive, text } from "./page.js";
import { age, clock, percent, plural, rate, value } from "./numbers.js";
import { Stream } from "./stream.js";

const FINAL = ["succeeded", "failed", "cancelled"];
const rows = byId("rows"), search = byId("search");
const jobs = new Map();
const filter = () => {
  const at = new URL(location.href).searchParams;
  return { state: at.get("state") ?? "", name: at.get("name") ?? "", cursor: at.get("cursor") ?? "" };
};
let asked = 0;

const matches = (job, { state, name }) =>
  (!state || job.state === state) && (!name || job.name.toLowerCase().includes(name.toLowerCase()));

/** Reads the list again: after a change of the filter, and after a time without the stream. */
async function load() {
  const mine = ++asked, { state, name, cursor } = filter();
  const query = new URLSearchParams(Object.entries({ state, name, cursor }).filter(([, v]) => v));
  const answer = await ask(`/api/v1/jobs?${query}`);
  if (mine !== asked) return;
  const listed = new Set(answer.jobs.map((j) => j.id));
  for (const id of jobs.keys()) if (!listed.has(id)) remove(id);
  for (const row of rows.querySelectorAll("tr")) if (!listed.has(row.dataset.id)) row.remove();
  for (const job of answer.jobs) show(job);
  empty();
}

function show(job) {
  const known = jobs.get(job.id);
  if (known && known.last_seq > job.last_seq) return;
  if (!matches(job, filter())) return remove(job.id);
  jobs.set(job.id, job);
  let row = rows.querySelector(`tr[data-id="${CSS.escape(job.id)}"]`);
  if (!row) {
    row = byId("row").content.firstElementChild.cloneNode(true);
    row.dataset.id = job.id;
    row.dataset.created = job.created_at;
    const after = [...rows.children].find((r) => r.dataset.created < job.created_at);
    rows.insertBefore(row, after ?? null);
  }
  fill(row, job);
}

function fill(row, job) {
  const at = (name) => row.querySelector(`[data-f="${name}"]`);
  row.dataset.state = job.state;
  at("state").dataset.state = job.state;
  at("bar").dataset.state = job.state;
  text(at("state"), job.state);
  text(at("name"), job.name);
  at("name").href = `/jobs/${job.id}`;
  text(at("about"), `${job.spec.model.arch} · ${job.spec.data.dataset} · ${plural(job.ranks, "rank")}`);
  text(at("reason"), job.reason ?? "");
  at("reason").title = job.reason ?? "";
  at("bar").max = job.total_steps || 1;
  at("bar").value = Math.min(job.step, job.total_steps);
  text(at("progress"), progress(job));
  const points = sparkline(job.sparkline);
  if (at("spark").getAttribute("points") !== points) at("spark").setAttribute("points", points);
  text(at("loss"), job.last.loss == null ? "" : value(job.last.loss));
  text(at("best"), job.best ? percent(job.best.value) : "");
  text(at("speed"), job.images_per_second ? rate(job.images_per_second) : "");
  text(at("age"), age(Date.parse(job.created_at), Date.now()));
  at("age").title = job.created_at;
}

function progress(job) {
  if (FINAL.includes(job.state)) {
    return job.started_at && job.finished_at
      ? `took ${clock((Date.parse(job.finished_at) - Date.parse(job.started_at)) / 1000)}` : "never started";
  }
  if (!job.total_steps) return "";
  const epoch = `epoch ${job.epoch} of ${Math.ceil(job.total_steps / (job.steps_per_epoch || 1))}`;
  return job.eta_secs != null && job.state === "running" ? `${epoch} · ${clock(job.eta_secs)} left` : epoch;
}

/** As `sparkline` in web/src/jobs.rs. */
function sparkline(values) {
  const finite = values.filter(Number.isFinite);
  if (finite.length < 2) return "";
  const low = Math.min(...finite), high = Math.max(...finite), span = Math.max(high - low, 1.2e-7), dx = 118 / (values.length - 1);
  return values.map((v, i) => (Number.isFinite(v) ? `${(1 + i * dx).toFixed(1)},${(2 + (high - v) / span * 24).toFixed(1)}` : "")).filter(Boolean).join(" ");
}

function remove(id) {
  jobs.delete(id);
  rows.querySelector(`tr[data-id="${CSS.escape(id)}"]`)?.remove();
}

function empty() {
  const { state, name } = filter(), none = !rows.childElementCount;
  byId("jobs").hidden = none;
  const narrowed = Boolean(state || name);
  byId("none-match").hidden = !none || !narrowed;
  byId("no-jobs").hidden = !none || narrowed;
  text(byId("none-match").querySelector("p"), `No job${state ? ` is ${state}` : ""}${state && name ? " and" : ""}${name ? ` has “${name}” in its name` : ""}.`);
}

function narrow(change) {
  const url = new URL(location.href);
  for (const [key, v] of Object.entries({ ...change, cursor: "" })) if (v) url.searchParams.set(key, v); else url.searchParams.delete(key);
  history.replaceState(null, "", url);
  mark();
  // What is here and no longer fits goes at once; the answer brings the rest.
  for (const job of [...jobs.values()]) if (!matches(job, filter())) remove(job.id);
  load().catch(() => showLive("reconnecting"));
}

function mark() {
  const { state, name } = filter();
  for (const a of document.querySelectorAll("#filters [data-state]")) {
    if (a.dataset.state === state) a.setAttribute("aria-current", "true"); else a.removeAttribute("aria-current");
    const to = new URLSearchParams(Object.entries({ state: a.dataset.state, name }).filter(([, v]) => v));
    a.href = `/jobs${to.size ? `?${to}` : ""}`;
  }
}

for (const a of document.querySelectorAll("#filters [data-state]")) {
  a.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    narrow({ state: a.dataset.state });
  });
}
let typing = 0;
search.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(() => narrow({ name: search.value.trim() }), 150); });
byId("filters").addEventListener("submit", (event) => { event.preventDefault(); narrow({ name: search.value.trim() }); });
addEventListener("popstate", () => { search.value = filter().name; mark(); load(); });
setInterval(() => { for (const job of jobs.values()) fill(rows.querySelector(`tr[data-id="${CSS.escape(job.id)}"]`), job); }, 15_000);
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
    });
  },
});
load().catch(() => {});
