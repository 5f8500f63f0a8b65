// The script of a job's page: reads the history over REST, then follows the stream from the end of the history.

import { ask, byId, nextFrame, isFailedRequest, make, notify, fetchPage, Problem, Unreachable, errorText, serverNow, showLive, setText } from "./page.js";
import { duration } from "./numbers.js";
import { Stream } from "./stream.js";
import { Actions } from "./job/actions.js";
import { Charts } from "./job/charts.js";
import { Checkpoints, isBetter } from "./job/checkpoints.js";
import { Classify } from "./job/classify.js";
import { Evaluation } from "./job/evaluation.js";
import { Facts } from "./job/facts.js";
import { History } from "./job/history.js";
import { Log } from "./job/log.js";
import { Metrics } from "./job/metrics.js";
import { Histograms } from "./job/histograms.js";
import { Network } from "./job/network.js";
import { Panels } from "./job/panels.js";
import { Ranks } from "./job/ranks.js";
import { register } from "./job/register.js";
import { isFinal, isWaiting } from "./job/states.js";
import { Tabs } from "./job/tabs.js";

/** Number of events by which the page may lag behind. If the page lags further, it reads the history over REST again instead of each event. */
const MAX_MISSED_EVENTS = 20_000;
const FACTS_EVERY_MS = 200;

const initial = JSON.parse(byId("data").textContent);
let job = initial.job;

const metrics = new Metrics(job.id, job.ranks, (name) => charts.bucketCount(name));
const ranks = new Ranks(metrics, () => charts.redraw());
const charts = new Charts(() => job, metrics, ranks);
const panels = new Panels(() => job, charts, metrics, initial.panels, initial.may_change);
const log = new Log(job.id, () => isFinal(job.state));
const jobHistory = new History(job.id, () => { charts.setMarks(jobHistory.reasons); facts.queue = jobHistory.queue; drawFactsSoon(); });
const checkpoints = new Checkpoints(initial.checkpoints, (action, c) => {
  if (action === "fork") return actions.fork(c.id);
  if (action === "register") return register(c);
  if (action === "evaluate") { evaluation.choose(c.id); tabs.show("evaluation"); } else { classify.choose(c.id); tabs.show("classify"); }
  byId("panels").scrollIntoView({ block: "nearest" });
}, initial.has_object_store ? job.id : null);
checkpoints.draw();
const facts = new Facts(job, metrics, ranks, checkpoints);
checkpoints.changeListeners.add(() => drawFactsSoon());
const evaluation = new Evaluation(job.id, checkpoints);
const classify = new Classify(checkpoints);
const actions = new Actions({
  job: () => job, checkpoints, setJob: (newJob) => { setJob(newJob); drawFactsSoon(); }, showRefusal: (why) => facts.showRefusal(why),
  beforeDelete: () => { refreshRequest?.abort(); clearTimeout(refreshTimer); stream?.close(); }, deleteFailed: () => follow(stream?.seq ?? 0),
});
const histograms = new Histograms(job.id), network = new Network(job.id, (plan) => { ranks.plan = plan; drawFactsSoon(); });
/** Whether the ranks choose the plan. If they do, the plan is part of the network's description. */
const isPlanned = () => job.spec.parallel.mode === "auto";
const weightsFrom = byId("weights-from");
// The link keeps its text if the job was deleted.
if (weightsFrom) ask(`/api/v1${weightsFrom.pathname}`).then(({ name }) => {
  setText(weightsFrom, name);
  for (const value of document.querySelectorAll(".own-settings dd")) if (value.textContent === job.spec.model.pretrained) value.append(` (${name})`);
}).catch(() => {});
const tabs = new Tabs({ evaluation: () => evaluation.update(), notes: () => actions.reloadAnnotations(), histograms: () => histograms.load(), network: () => network.load() });
checkpoints.changeListeners.add(() => actions.show());
byId("predict").addEventListener("click", () => {
  tabs.show("classify");
  byId("panels").scrollIntoView({ block: "start" });
  byId("classify-files").focus({ preventScroll: true });
});
for (const rank of initial.ranks) ranks.setAgent(rank);
/** The attempt for which the ranks' machines are known. */
let agentsAttempt = job.attempt;
log.offerFilters(job.ranks, job.attempt);
/** For tests and consoles: `lockstep.charts.loss.snapshot()`, `lockstep.seq`. */
window.lockstep = { charts: charts.all, panels, view: charts.view, metrics, get seq() { return stream?.seq ?? 0; }, get job() { return job; } };

// --- the stream ------------------------------------------------------------------------------------

let stream = null;
/** The lag behind the server that the page shows, in seconds; null if no lag is shown. */
let shownLagSecs = null;
let factsTimer = 0;
let drawnAt = 0;
let refreshTimer = 0, refreshRequest = null, diagnosisTimer = 0;
/** Number of the newest call of `reload`, which ends all earlier calls. */
let newestReload = 0;

function drawFacts() {
  clearTimeout(factsTimer);
  factsTimer = 0;
  drawnAt = performance.now();
  facts.draw();
  ranks.draw(job);
}
function drawFactsSoon() {
  factsTimer ||= setTimeout(drawFacts, Math.max(0, FACTS_EVERY_MS - (performance.now() - drawnAt)));
}
// The displayed times advance without events, and only a timer notices that a job reports no step.
setInterval(() => { if (!isFinal(job.state)) drawFactsSoon(); }, 1000);
// The job's place in the queue changes when other jobs change, which this job's events do not report.
setInterval(() => { if (isWaiting(job) && !document.hidden) jobHistory.load().catch(() => {}); }, 5000);

function setJob(newJob) {
  if (isFinal(newJob.state) && !isFinal(job.state)) {
    notify(`${newJob.name}: ${newJob.state}`, newJob.reason ?? "", `/jobs/${newJob.id}`);
    refresh();
  }
  job = facts.job = newJob;
  metrics.rememberRankCount(job);
  charts.view.stepsPerEpoch = job.steps_per_epoch;
  log.offerFilters(job.ranks, job.attempt);
  log.drawNote();
  facts.drawTitle();
  actions.show();
}

function apply(event) {
  switch (event.type) {
    case "metrics":
      metrics.apply(event);
      panels.handlePoints(event.name).catch(() => {});
      charts.dataChanged();
      break;
    case "log": log.apply(event); break;
    case "histograms":
      tabs.reveal("histograms");
      histograms.handleStep();
      break;
    case "network":
      tabs.reveal("network");
      if (tabs.isOpen("network") || isPlanned()) network.load();
      break;
    case "rank": ranks.setReport(event); break;
    case "evaluation":
      metrics.applyEvaluation(event);
      job = facts.job = { ...job, last: { ...job.last, val_pictures: event.samples } };
      if (isBetter(event, job.best)) {
        const { accuracy: value, loss, step, epoch } = event;
        job = facts.job = { ...job, best: { value, loss, step, epoch } };
      }
      charts.dataChanged();
      clearTimeout(diagnosisTimer);
      diagnosisTimer = setTimeout(refreshDiagnosis, 150);
      break;
    case "alert": jobHistory.load().catch(() => {}); break;
    case "checkpoint": checkpoints.apply(event); break;
    case "checkpoint_removed": checkpoints.remove(event); break;
    case "plan":
      setJob({ ...job, total_steps: event.total_steps, steps_per_epoch: event.steps_per_epoch });
      charts.dataChanged();
      break;
    case "state":
      if (event.attempt > job.attempt) { ranks.forget(); agentsAttempt = null; }
      setJob({ ...job, state: event.state, reason: event.reason, cause: event.cause ?? null, attempt: event.attempt });
      refresh();
      break;
  }
  drawFactsSoon();
}

/** For each setting that advice may name without a value, a function that returns the value to try next, or a falsy value if there is none. */
const NEXT_VALUE = {
  // Twice a few epochs would still be too few.
  "train.epochs": ({ train }) => train.epochs && Math.max(20, 2 * train.epochs),
  "train.weight_decay": ({ train }) => 2 * train.weight_decay || 5e-4,
};

/**
 * Shows whether the accuracy of a running job improves, or why the accuracy of an ended job is low, then links to clones of the job, each
 * with a setting that the text names: with the text's value (`train.lr = 0.01`), or with the next value. Only `GET /jobs/{id}` and the
 * rendered page have this text, not the stream. The reason of a failed job, which the banner shows, may also name a setting and its value.
 */
function showDiagnosis({ id, spec, state, reason, diagnosis = "", trained_validation: trainedValidation = "" }) {
  const failure = state === "failed" && reason?.match(/\bSet (?:train|data)\.[a-z_]+ = "[a-z_]+"/)?.[0];
  const advice = `${diagnosis} ${failure || ""}`, named = new Map();
  for (const [, key, value] of advice.matchAll(/((?:train|data|model|loss)\.[a-z_]+)(?: = "?([\d.]*\d|[a-z_]+\d*))?/g)) named.set(key, named.get(key) ?? value);
  const links = (document.body.dataset.readsOnly === undefined ? [...named] : []).flatMap(([key, given]) => {
    const value = given ?? NEXT_VALUE[key]?.(spec);
    const link = make("a", { href: `/jobs/new?from=${id}&set=${key}=${value}`, textContent: `try ${key} = ${value}`, title: `Clone the job with ${key} = ${value}` });
    // Whether a machine has downloaded public weights is known only when a job is checked.
    const note = key === "model.pretrained" ? [" (needs ", make("code", { textContent: `lockstep weights get ${value}` }), " on the machine that trains)"] : [];
    return value ? [" · ", link, ...note] : [];
  });
  byId("diagnosis").replaceChildren(...diagnosis ? [diagnosis, ...links] : links.slice(1));
  byId("diagnosis").hidden = !diagnosis && !links.length;
  byId("diagnosis").dataset.trainedValidation = trainedValidation;
}

/** Called after an evaluation: reads and shows whether the accuracy of a running job improves. */
async function refreshDiagnosis() {
  const current = await ask(`/api/v1/jobs/${job.id}`).catch(() => null);
  if (current?.state === job.state) showDiagnosis(current);
}

/** Reads facts that a `state` event lacks: the machines, the start, the end and the diagnosis. */
function refresh() {
  clearTimeout(refreshTimer);
  refreshTimer = setTimeout(async () => {
    refreshRequest = new AbortController();
    try {
      const current = await ask(`/api/v1/jobs/${job.id}`, { signal: refreshRequest.signal });
      if (current.last_seq >= (stream?.seq ?? 0) || isFinal(current.state)) { setJob(current); showDiagnosis(current); drawFactsSoon(); } else refresh();
      await Promise.all([jobHistory.load(), reloadAgents()]);
    } catch { /* If the server is unreachable, the stream ends, too, and its status shows this. */ }
  }, 150);
}

function onFrame(frame) {
  if (frame.type === "hello") {
    setJob(frame.job);
    actions.reloadAnnotations();
    // An earlier request for the history may have failed while the server was unreachable.
    jobHistory.load().catch(() => {});
    // If the server has lost events, or the page has missed many events, the history is read again.
    if (frame.last_seq < stream.seq || frame.last_seq - stream.seq > MAX_MISSED_EVENTS) return void reload();
    shownLagSecs = null;
    drawFactsSoon();
    return;
  }
  if (frame.type === "live") { facts.isLive = true; return; }
  if (frame.type === "progress") {
    const { step, images_per_second, eta_secs } = frame;
    job = facts.job = { ...job, step, images_per_second, eta_secs };
    return drawFactsSoon();
  }
  if (frame.type === "changed") {
    const { project, tags, priority } = frame;
    setJob({ ...job, project, tags, spec: { ...job.spec, project, priority } });
    // The change may be a new fork.
    jobHistory.load().catch(() => {});
    return void actions.reloadAnnotations();
  }
  if (!facts.isLive && frame.at) {
    const secs = Math.floor((serverNow() - Date.parse(frame.at)) / 1000);
    if (secs !== shownLagSecs) { shownLagSecs = secs; showLive(secs > 1 ? `${duration(secs)} behind` : "live"); }
  }
  apply(frame);
}

/** Reads everything again over REST, and continues the stream after the last event that the responses include. */
async function reload() {
  const thisReload = ++newestReload;
  stream.disconnect();
  await repeatIfFailed(async () => {
    if (thisReload !== newestReload) return;
    const seq = await metrics.load(charts.metricsToRead, charts.showsMeanLoss);
    const stored = await ask(`/api/v1/jobs/${job.id}/checkpoints`);
    await Promise.all([log.handleGap(), jobHistory.load(), reloadPage()]);
    if (thisReload !== newestReload) return;
    checkpoints.replace(stored.checkpoints);
    charts.redraw();
    stream.reconnect(seq);
  });
}

/** Calls `read` until its requests succeed, with growing pauses, and returns its result; undefined if the job was deleted. */
async function repeatIfFailed(read) {
  for (let delay = 250; ; delay = Math.min(10_000, delay * 2)) {
    try { return await read(); } catch (error) {
      if (error instanceof Problem && error.status === 404) return showDeleted();
      if (!isFailedRequest(error)) throw error;
      showLive("reconnecting");
      await new Promise((done) => setTimeout(done, delay));
    }
  }
}

/** Returns this page as the server renders it now (`page`), and its embedded data (`data`). */
async function readPage() {
  const page = await fetchPage(`/jobs/${job.id}`);
  if (!page) throw new Unreachable("The server did not render the page.");
  return { page, data: JSON.parse(page.getElementById("data").textContent) };
}

/** Reads which machines have the ranks of the shown attempt. No event reports the machines. */
async function reloadAgents() {
  if (agentsAttempt === job.attempt) return;
  const { data } = await readPage();
  if (data.job.attempt !== job.attempt) return;
  agentsAttempt = job.attempt;
  // Only the machine is taken over, because the stream has newer reports about the rank than the page.
  for (const { rank, agent } of data.ranks) ranks.setAgent({ rank, agent });
  drawFactsSoon();
}

/** Reads again what the page contained when it was loaded: the ranks' reports and machines, and the panels that not every job has. */
async function reloadPage() {
  const { page, data } = await readPage();
  ranks.forget();
  for (const rank of data.ranks) ranks.setAgent(rank);
  agentsAttempt = data.job.attempt;
  for (const name of ["histograms", "network"]) if (!page.querySelector(`[data-tab=${name}]`).hidden) tabs.reveal(name);
  histograms.handleStep();
  if (tabs.isOpen("network") || isPlanned()) network.load();
  drawFactsSoon();
}

async function start() {
  showDiagnosis(job);
  setJob(job);
  if (isPlanned()) network.load();
  facts.draw();
  ranks.draw(job);
  const seq = await repeatIfFailed(async () => {
    let logLoading = null;
    // The first chart is drawn before other history is requested. The log is read in the meantime.
    const drawFirstChart = async () => {
      charts.all.loss.startDrawing();
      await nextFrame();
      logLoading = log.load();
      logLoading.catch(() => {});
    };
    const newestSeq = await metrics.load(charts.metricsToRead, charts.showsMeanLoss, drawFirstChart);
    await logLoading;
    return newestSeq;
  });
  if (seq === undefined) return;
  charts.startDrawing();
  charts.readZoomedPart();
  // Reads checkpoints that were written between the rendering of the page and the event from which the stream continues.
  const stored = await ask(`/api/v1/jobs/${job.id}/checkpoints`).catch(() => null);
  if (stored) checkpoints.replace(stored.checkpoints);
  drawFacts();
  follow(seq);
}

function follow(seq) {
  stream = new Stream({
    path: (since) => `/api/v1/jobs/${job.id}/stream?since=${since}&keep_open=true`,
    seq, onFrame,
    onStatus: (status) => { if (status !== "live") facts.isLive = false; showLive(status); },
    onGone: async () => {
      try { await ask(`/api/v1/jobs/${job.id}`); return false; } catch (e) { return e instanceof Problem && e.status === 404 && (showDeleted(), true); }
    },
  });
}

function showDeleted() {
  showLive("deleted");
  facts.showRefusal(null);
  const banner = byId("banner");
  banner.hidden = false;
  banner.dataset.tone = "bad";
  setText(byId("banner-what"), "This job was deleted.");
  setText(byId("banner-why"), "This page shows only what it had loaded before.");
  setText(byId("banner-link"), "Jobs");
  byId("banner-link").setAttribute("href", "/jobs");
  actions.hide();
}

start().catch((error) => { showLive("stopped"); setText(byId("loss-note"), errorText(error)); throw error; });
