// The job page: history over REST, then the stream from where the history ended.

import { ask, byId, confirmThen, press, Problem, sentence, showLive, text } from "./page.js";
import { bytes, clock, count, percent, plural, rate, value } from "./numbers.js";
import { Stream } from "./stream.js";
import { Chart } from "./chart/chart.js";
import { RANK_COLOURS } from "./chart/palette.js";
import { View } from "./chart/view.js";
import { Checkpoints } from "./job/checkpoints.js";
import { Facts, isFinal } from "./job/facts.js";
import { Log } from "./job/log.js";
import { Metrics } from "./job/metrics.js";
import { colourOf, Ranks } from "./job/ranks.js";

/** Further behind than this, history comes over REST again instead of event by event. */
const FAR_BEHIND = 20_000;
const FACTS_EVERY_MS = 200;

const data = JSON.parse(byId("data").textContent);
/** The server's clock less this one's. */
const skew = Date.parse(data.now) - Date.now();
let job = data.job;

const metrics = new Metrics(job.id, job.ranks);
const view = new View(() => metrics.of("step_ms"));
const ranks = new Ranks(metrics, () => lossChart.invalidate(true));
const facts = new Facts(job, metrics, ranks);
const log = new Log(job.id);
const checkpoints = new Checkpoints(data.checkpoints);
for (const seat of data.ranks) ranks.seat(seat);
log.ranks(job.ranks);

// --- charts ----------------------------------------------------------------------------------------

const describe = (x) => {
  const step = view.stepAt(x), parts = [];
  if (view.axis === "time") parts.push(`${clock(x)} of training`);
  parts.push(`step ${count(step)}`);
  if (job.steps_per_epoch) parts.push(`epoch ${(step / job.steps_per_epoch).toFixed(2)}`);
  return parts.join(" · ");
};
const short = (v) => {
  const size = Math.abs(v);
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return v.toExponential(0).replace("e+", "e");
  return String(Number(v.toPrecision(6))).replace(/\B(?=(\d{3})+$)/g, size >= 1000 ? "," : "");
};
const lossLayers = () => {
  const line = (rank) => ({ label: `rank ${rank}`, colour: colourOf(rank), series: metrics.of("loss", rank) });
  const all = [...Array(metrics.ranks).keys()];
  if (metrics.ranks > RANK_COLOURS) {
    return [{ label: "mean of ranks", colour: "accent", series: metrics.mean("loss"), band: true },
      ...all.filter((r) => ranks.chosen.has(r)).map(line)];
  }
  const front = ranks.chosen;
  return all.sort((a, b) => front.has(a) - front.has(b)).map((r) => ({ ...line(r), alpha: !front.size || front.has(r) ? 1 : 0.18 }));
};
const lossChart = new Chart(byId("loss-chart"), view, {
  label: "Loss of each rank", layers: lossLayers, format: value, tick: short, describe,
  onNote: (note) => text(byId("loss-note"), note && `${note} · ${plural(metrics.ranks, "rank")}`),
});
const accuracyChart = new Chart(byId("accuracy-chart"), view, {
  label: "Accuracy in training and validation", format: percent, tick: (v) => `${short(Number((v * 100).toFixed(3)))} %`, describe, limits: [0, 1],
  layers: () => [
    { label: "train", colour: "accent", series: metrics.mean("accuracy"), smoothing: 0.9 },
    { label: "validation", colour: "accent-2", series: metrics.of("val_accuracy"), rings: true, smoothing: 0 },
  ],
  onNote: () => text(byId("acc-note"), "train (smooth 0.9) · validation"),
});
const speedChart = new Chart(byId("speed-chart"), view, {
  label: "Images a second, of all ranks", format: rate, tick: short, describe, zero: false,
  layers: () => [{ label: "all ranks", colour: "accent", series: metrics.of("images_per_second") }],
  onNote: (note) => text(byId("speed-note"), note),
});
const lrChart = new Chart(byId("lr-chart"), view, {
  label: "Learning rate", format: value, tick: short, describe, zero: true,
  layers: () => [{ label: "learning rate", colour: "accent", series: metrics.of("lr") }],
  onNote: (note) => text(byId("lr-note"), note),
});
const charts = { loss: lossChart, accuracy: accuracyChart, images_per_second: speedChart, lr: lrChart };
/** For tests and consoles: `lockstep.charts.loss.snapshot()`, `lockstep.seq`. */
window.lockstep = { charts, view, get seq() { return stream?.seq ?? 0; }, get job() { return job; } };

function redraw(urgent = false) { for (const chart of Object.values(charts)) chart.invalidate(urgent); }

for (const [attribute, apply] of [
  ["smooth", (v) => { lossChart.smoothing = Number(v); redraw(true); }],
  ["scale", (v) => { lossChart.scale = v; redraw(true); }],
  ["axis", (v) => view.setAxis(v)],
]) {
  const group = [...document.querySelectorAll(`button[data-${attribute}]`)];
  for (const button of group) button.addEventListener("click", () => { press(group, button); apply(button.dataset[attribute]); });
}
byId("reset-zoom").addEventListener("click", () => view.setZoom(null));

let zoomTimer = 0;
view.addEventListener("zoom", () => {
  byId("reset-zoom").hidden = !view.zoom;
  clearTimeout(zoomTimer);
  if (!view.zoom || !metrics.coarse) return;
  const zoom = view.zoom;
  zoomTimer = setTimeout(async () => {
    // Without an answer the coarse points stay, and the note says so.
    const detail = await metrics.zoom(view.stepAt(zoom[0]), view.stepAt(zoom[1]), zoom).catch(() => null);
    if (!detail || view.zoom !== zoom) return;
    for (const chart of Object.values(charts)) chart.detail = detail;
    redraw(true);
  }, 120);
});

// --- the stream ------------------------------------------------------------------------------------

let stream = null;
let behindAt = null;
let factsTimer = 0;
let drawnAt = 0;

function drawFacts() {
  clearTimeout(factsTimer);
  factsTimer = 0;
  drawnAt = performance.now();
  facts.draw();
  ranks.draw(!isFinal(job.state));
}
function factsSoon() {
  factsTimer ||= setTimeout(drawFacts, Math.max(0, FACTS_EVERY_MS - (performance.now() - drawnAt)));
}
// The clock moves on its own, and silence is noticed by nothing arriving.
setInterval(() => { if (!isFinal(job.state)) factsSoon(); }, 1000);

function setJob(next) {
  job = facts.job = next;
  view.stepsPerEpoch = job.steps_per_epoch;
  facts.title();
}

function apply(event) {
  switch (event.type) {
    case "metrics":
      metrics.apply(event);
      redraw();
      break;
    case "log": log.apply(event); break;
    case "rank": ranks.report(event); break;
    case "evaluation":
      metrics.evaluated(event);
      redraw();
      break;
    case "checkpoint": checkpoints.apply(event); break;
    case "checkpoint_removed": checkpoints.remove(event); break;
    case "plan":
      setJob({ ...job, total_steps: event.total_steps, steps_per_epoch: event.steps_per_epoch });
      redraw();
      break;
    case "state":
      if (event.attempt > job.attempt) ranks.forget();
      setJob({ ...job, state: event.state, reason: event.reason, attempt: event.attempt });
      refresh();
      break;
  }
  factsSoon();
}

/** What a `state` event does not tell: which machines, when it started and ended. */
let refreshing = 0;
function refresh() {
  clearTimeout(refreshing);
  refreshing = setTimeout(async () => {
    try {
      const next = await ask(`/api/v1/jobs/${job.id}`);
      if (next.last_seq >= stream.seq || isFinal(next.state)) { setJob(next); factsSoon(); }
    } catch { /* the stream's reconnection will tell */ }
  }, 150);
}

function onFrame(frame) {
  if (frame.type === "hello") {
    setJob(frame.job);
    // A server that lost events, or a page that slept for long, reads history afresh.
    if (frame.last_seq < stream.seq || frame.last_seq - stream.seq > FAR_BEHIND) return void reload();
    behindAt = null;
    factsSoon();
    return;
  }
  if (frame.type === "live") { facts.live = true; return; }
  if (!facts.live && frame.at) {
    const secs = Math.floor((Date.now() + skew - Date.parse(frame.at)) / 1000);
    if (secs !== behindAt) { behindAt = secs; showLive(secs > 1 ? `${clockWords(secs)} behind` : "live"); }
  }
  apply(frame);
}

const clockWords = (s) => (s < 120 ? `${s} s` : s < 7200 ? `${Math.round(s / 60)} min` : `${Math.round(s / 3600)} h`);

async function reload() {
  const seq = await metrics.load();
  redraw(true);
  stream.reconnect(seq);
}

async function start() {
  setJob(job);
  facts.draw();
  ranks.draw(!isFinal(job.state));
  let seq = null, delay = 250;
  while (seq === null) {
    try {
      [seq] = await Promise.all([metrics.load(), log.load()]);
    } catch (error) {
      if (error instanceof Problem && error.status === 404) return gone();
      showLive("reconnecting");
      await new Promise((done) => setTimeout(done, delay));
      delay = Math.min(10_000, delay * 2);
    }
  }
  redraw(true);
  drawFacts();
  follow(seq);
}

function follow(seq) {
  stream = new Stream({
    path: (since) => `/api/v1/jobs/${job.id}/stream?since=${since}`,
    seq, onFrame,
    onStatus: (status) => { if (status !== "live") facts.live = false; showLive(status); },
    onGone: async () => {
      try { await ask(`/api/v1/jobs/${job.id}`); return false; } catch (e) { return e instanceof Problem && e.status === 404 && (gone(), true); }
    },
  });
}

function gone() {
  showLive("deleted");
  const band = byId("verdict");
  band.hidden = false;
  band.dataset.tone = "bad";
  text(byId("verdict-what"), "This job was deleted.");
  text(byId("verdict-why"), "What is shown here is what was left on this page.");
  text(byId("verdict-link"), "Jobs");
  byId("verdict-link").setAttribute("href", "/jobs");
  for (const button of document.querySelectorAll(".title button")) button.hidden = true;
}

// --- actions ---------------------------------------------------------------------------------------

byId("cancel").addEventListener("click", () => {
  const newest = checkpoints.newest;
  const kept = newest ? `Its ${plural(checkpoints.size, "checkpoint")} stay, the newest ${newest.epoch}-${newest.step}.` : "It has no checkpoint yet: what it learned is lost.";
  const at = job.total_steps ? `Training stops at step ${byId("step").textContent} of ${count(job.total_steps)}.` : "It will not start.";
  confirmThen({
    title: `Cancel ${job.name}?`, detail: `${at} ${kept}`, yes: "Cancel the job",
    act: () => ask(`/api/v1/jobs/${job.id}/cancel`, { method: "POST" }),
  });
});
byId("retry").addEventListener("click", async (event) => {
  const button = event.currentTarget;
  button.disabled = true;
  try { setJob(await ask(`/api/v1/jobs/${job.id}/retry`, { method: "POST" })); } catch (error) { text(byId("verdict-why"), sentence(error)); }
  button.disabled = false;
});
byId("delete").addEventListener("click", () => {
  const size = byId("facts-data").dataset.size || bytes(checkpoints.bytes);
  confirmThen({
    title: `Delete ${job.name}?`, yes: "Delete the job",
    detail: `Its metrics, log and ${plural(checkpoints.size, "checkpoint")} (${size}) are deleted for good.`,
    act: async () => {
      // Not to be told that the job is gone by what this very page does.
      stream?.close();
      try { await ask(`/api/v1/jobs/${job.id}`, { method: "DELETE" }); } catch (error) { follow(stream?.seq ?? 0); throw error; }
      location.href = "/jobs";
    },
  });
});

const tabs = [byId("log-title"), byId("spec-title")];
function showTab(chosen) {
  for (const tab of tabs) {
    const on = tab === chosen;
    tab.setAttribute("aria-selected", String(on));
    tab.tabIndex = on ? 0 : -1;
    byId(tab.getAttribute("aria-controls")).hidden = !on;
  }
  byId("log-controls").hidden = chosen !== tabs[0];
}
for (const tab of tabs) {
  tab.addEventListener("click", () => showTab(tab));
  tab.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const next = tabs[(tabs.indexOf(tab) + 1) % tabs.length];
    showTab(next);
    next.focus();
  });
}

start().catch((error) => { showLive("stopped"); text(byId("loss-note"), sentence(error)); throw error; });
