// Comparison of jobs: curves on common axes, settings with marked differences, a sortable table of results, a scatter plot, and parallel
// coordinates of settings that differ. The page's URL contains the jobs and the view.

import { ask, byId, errorText, showLive, setText } from "./page.js";
import { Stream } from "./stream.js";
import { setUpChoices, readUrl, writeUrl } from "./address.js";
import { setUpSmoothing } from "./chart/range.js";
import { assignLooks, COLOURS } from "./compare/colours.js";
import { Curves } from "./compare/curves.js";
import { groupKeys, groups } from "./compare/grouped.js";
import { Parallel } from "./compare/parallel.js";
import { Picker } from "./compare/picker.js";
import { Scatter } from "./compare/scatter.js";
import { Selection } from "./compare/selection.js";
import { Tables } from "./compare/tables.js";
import { ALL, axisTitle, isResult, knownMetrics } from "./job/names.js";
import { isFinal } from "./job/states.js";
import { plural } from "./numbers.js";

/** Maximum number of charts. */
const MAX_CHARTS = 8;
const jobs = new Map();
/** Returns the ids in the URL. */
const ids = () => readUrl("jobs").split(",").filter(Boolean);
/** Returns the jobs of these ids that have been loaded. */
const loadedJobs = () => ids().map((id) => jobs.get(id)).filter(Boolean);

const selection = new Selection(loadedJobs);
const selected = () => selection.ids();
const curves = new Curves(loadedJobs, selected);
const tables = new Tables(loadedJobs, (id) => choose(ids().filter((other) => other !== id)), selected);
const parallel = new Parallel(byId("parallel"), loadedJobs, selection);
const scatter = new Scatter(byId("scatter"), loadedJobs, selection);
const picker = new Picker((id) => choose(ids().includes(id) ? ids().filter((other) => other !== id) : [...ids(), id]), loadedJobs, () => new Set(ids()));

/** Compares these jobs, by their ids. */
async function choose(wanted) {
  writeUrl({ jobs: wanted.join(",") });
  await show();
}

async function show() {
  assignLooks(ids());
  const missing = ids().filter((id) => !jobs.has(id)), errors = [];
  await Promise.all(missing.map(async (id) => {
    try { jobs.set(id, await ask(`/api/v1/jobs/${encodeURIComponent(id)}`)); } catch (error) { errors.push(`${id}: ${errorText(error)}`); }
  }));
  const hasJobs = loadedJobs().length > 0;
  byId("nothing").hidden = hasJobs;
  byId("compared").hidden = !hasJobs;
  setText(byId("compare-about"), errors.join(" ") || (hasJobs ? `${plural(loadedJobs().length, "job")}${loadedJobs().length === 1 ? ": choose a second job to compare" : ""}` : ""));
  picker.draw();
  if (!hasJobs) return;
  showCharts();
  redraw();
  await curves.draw();
}

/** Draws everything that depends only on the jobs and not on their metrics: tables, parallel coordinates and the scatter plot. */
function redraw() {
  applyGrouping();
  tables.draw();
  parallel.draw();
  scatter.draw();
  drawSelection();
}

// --- groups -------------------------------------------------------------------------------------------

/** The band around a group's mean: `std` or `range`. */
let band = "std";

/** Offers the keys by which these jobs can be grouped, and groups the jobs by the key in the URL. */
function applyGrouping() {
  const select = byId("group-by"), wanted = readUrl("group"), keys = [...new Set([...groupKeys(loadedJobs()), ...(wanted ? [wanted] : [])])];
  if ([...select.options].slice(1).map((option) => option.value).join() !== keys.join()) select.replaceChildren(new Option("nothing", ""), ...keys.map((key) => new Option(key, key)));
  select.value = wanted;
  byId("grouped").hidden = !wanted;
  if (wanted) {
    const lines = groups(loadedJobs(), wanted).map(({ id }) => id), all = [...ids(), ...lines];
    // If there are enough colours, groups get other colours than jobs, which the scatter plot shows. Otherwise groups may reuse the colours of
    // jobs, so that their lines are solid.
    assignLooks(all.length <= COLOURS ? all : lines);
  }
  if (curves.groupBy !== wanted || curves.band !== band) curves.setGroups(wanted, band);
}

byId("group-by").addEventListener("change", ({ target }) => { writeUrl({ group: target.value }); applyGrouping(); });
setUpChoices("band", "std", (chosen) => { band = chosen; applyGrouping(); });

// --- the selection ------------------------------------------------------------------------------------

function drawSelection() {
  const kept = selected(), all = loadedJobs().length;
  byId("selection").hidden = !selection.hasBrushes;
  setText(byId("selection-count"), `${kept.size} of ${plural(all, "job")} selected`);
  setText(byId("selection-what"), `by ${[...selection.brushes.keys()].map((key) => key.replace("result:", "")).join(", ")}`);
  byId("selection-keep").disabled = !kept.size || kept.size === all;
}

selection.addEventListener("change", () => { drawSelection(); tables.draw(); curves.invalidate(); });
byId("selection-clear").addEventListener("click", () => { selection.clear(); byId("parallel").querySelector("[data-axis]")?.focus(); });
byId("selection-keep").addEventListener("click", () => { const kept = selected(); selection.brushes.clear(); choose(ids().filter((id) => kept.has(id))).then(() => byId("selection-keep").blur()); });

// --- controls -----------------------------------------------------------------------------------------

/**
 * Returns the default metric: the validation accuracy if a job has it, otherwise the loss if a job has it, otherwise a metric that all jobs
 * have, preferably a loss or an accuracy.
 */
function defaultMetric() {
  const ofJobs = loadedJobs().map(knownMetrics), all = [...new Set(ofJobs.flat())].sort((a, b) => isResult(b) - isResult(a));
  if (!ofJobs.length) return "val_accuracy";
  const isShared = (name) => ofJobs.every((names) => names.includes(name));
  return ["val_accuracy", "loss"].find((name) => all.includes(name)) ?? all.find(isShared) ?? all[0] ?? "loss";
}

/** Returns the metrics in the URL. Each metric has a chart. */
function metrics() {
  const wanted = [...new Set(readUrl("metric").split(","))].filter(Boolean).slice(0, MAX_CHARTS);
  return wanted.length ? wanted : [defaultMetric()];
}

/** Shows the charts for the metrics in the URL. */
function showCharts() {
  const shown = metrics(), buttons = [...document.querySelectorAll("button[data-metric]")], withButton = buttons.map((button) => button.dataset.metric);
  for (const button of buttons) button.setAttribute("aria-pressed", String(shown.includes(button.dataset.metric)));
  const select = byId("more-metrics"), all = [...loadedJobs().filter((job) => job.external).flatMap(knownMetrics), ...Object.keys(ALL)], others = [...new Set(all)].filter((name) => !withButton.includes(name));
  select.replaceChildren(new Option("more …", ""), ...others.map((name) => new Option(`${shown.includes(name) ? "✓ " : ""}${axisTitle(name)}`, name)));
  curves.setMetrics(shown);
}

/** Adds or removes a chart. At least one chart stays. */
function toggle(name) {
  const shown = metrics(), wanted = shown.includes(name) ? shown.filter((other) => other !== name) : [...shown, name].slice(-MAX_CHARTS);
  writeUrl({ metric: wanted.join() === defaultMetric() ? "" : wanted.join(",") });
  showCharts();
  if (loadedJobs().length) curves.draw();
}

for (const button of document.querySelectorAll("button[data-metric]")) button.addEventListener("click", () => toggle(button.dataset.metric));
byId("more-metrics").addEventListener("change", ({ target }) => { if (target.value) toggle(target.value); });
showCharts();
setUpChoices("axis", "step", (v) => curves.setAxis(v));
setUpChoices("scale", "linear", (v) => curves.setScale(v));
setUpSmoothing(byId("smooth"), byId("smooth-value"), (factor) => curves.setSmoothing(factor));
setUpChoices("settings", "different", (v) => tables.showSettings(v));

// --- live ---------------------------------------------------------------------------------------------

/** Interval of requests for the curves of running jobs. */
const CURVES_EVERY_MS = 2000;
let timer = 0, areCurvesOutdated = false;
new Stream({
  path: () => "/api/v1/stream",
  onStatus: showLive,
  onFrame(message) {
    const known = message.type === "job" ? jobs.get(message.job.id) : null;
    if (message.type === "live") reloadJobs().catch(() => {});
    if (!known || known.last_seq > message.job.last_seq) return;
    // Jobs of the stream do not tell whether the initial weights were trained on the validation pictures.
    message.job.trained_validation ??= known.trained_validation;
    jobs.set(known.id, message.job);
    curves.markOutdated(known.id);
    areCurvesOutdated = true;
    timer ||= setTimeout(() => { timer = 0; if (loadedJobs().length) redraw(); }, 500);
  },
});
/** Reads the jobs again after an interruption of the stream, which does not repeat missed frames. */
async function reloadJobs() {
  await Promise.all(loadedJobs().filter((job) => !isFinal(job.state)).map(async ({ id }) => {
    const job = await ask(`/api/v1/jobs/${encodeURIComponent(id)}`).catch(() => null), known = jobs.get(id);
    if (!job || !known || known.last_seq > job.last_seq) return;
    if (known.last_seq < job.last_seq) curves.markOutdated(id);
    jobs.set(id, job);
  }));
  await show();
}
setInterval(() => { if (areCurvesOutdated && !document.hidden) { areCurvesOutdated = false; curves.draw(); } }, CURVES_EVERY_MS);

/** For tests and consoles. */
window.lockstep = { jobs: loadedJobs, selection, get chart() { return curves.chart; }, get charts() { return curves.charts; } };
show().catch((error) => setText(byId("compare-about"), errorText(error)));
