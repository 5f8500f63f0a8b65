// A chart for each chosen metric, with a line for each job (the mean over its ranks), or a line and a band for each group.

import { colour, dash, swatch } from "./colours.js";
import { titleOf } from "./names.js";
import { ask, byId, make, setText } from "../page.js";
import { writeShortened, shortenMiddle } from "../cut.js";
import { clock, count } from "../numbers.js";
import { Chart } from "../chart/chart.js";
import { saveMenu, tools } from "../chart/export.js";
import { rangeMenu } from "../chart/range.js";
import { MeanSeries, Series } from "../chart/series.js";
import { Speeds } from "../chart/speeds.js";
import { axisName, times, View } from "../chart/view.js";
import { picturesUntil, rankCountNow, isRankCountKnown } from "../job/facts.js";
import { metricInfo, ALL, axisOf, axisTitle, MACHINE, unitOf } from "../job/names.js";
import { isActive } from "../job/states.js";
import { groups, meanSeries } from "./grouped.js";

/** Whether every rank reports the metric. Metrics of machines are read from the first rank. */
const isOfEachRank = (metric) => Object.hasOwn(ALL, metric) && ALL[metric].isPerRank && !(metric in MACHINE);
/** Metrics with few values, which have a ring at every value. */
const RINGS = /^val_/;
/** Key of the clock series: rank 0's `step_ms`, as on a job's own page. */
const CLOCK = "clock";
/** Names of columns in files, by the kind of axis. */
const COLUMNS = { step: "step", epoch: "epoch", time: "time_secs" };

export class Curves {
  metrics = [];
  axis = "step";
  /** The key by which jobs are grouped, and the band around a group's mean. */
  groupBy = "";
  band = "std";
  /** The loaded curves, by job and metric: `{ job, news, readCount, series }`. */
  #loaded = new Map();
  #charts = new Map();
  #means = new Map();
  /** For each job, how often the stream has reported newer points. */
  #news = new Map();
  #requests = 0;
  #scale = "linear";
  #smoothing = 0;

  /** `jobs()`: the compared jobs. `selected()`: ids of the selected jobs. */
  constructor(jobs, selected) {
    Object.assign(this, { jobs, selected });
    this.view = new View(() => ({ segments: [] }));
    this.view.positions = (segment) => this.#positions(segment);
  }

  /** The chart that was added last. */
  get chart() { return this.#charts.get(this.metrics.at(-1)); }

  /** Charts by metric. */
  get charts() { return Object.fromEntries(this.#charts); }

  #createChart(metric) {
    const label = axisTitle(metric), { format, tick, limits } = axisOf(metric);
    const note = make("span", { className: "small" }), head = make("header", { className: "card-head" }, make("h3", { textContent: label }), note);
    const chartRoot = make("div", { className: "chart tall" }), root = make("div", { className: "curve", "data-metric": metric }, head, chartRoot);
    const describe = (x) => (this.axis === "step" ? `step ${count(Math.round(x))}` : this.axis === "epoch" ? `epoch ${x.toFixed(2)}` : clock(x));
    const chart = new Chart(chartRoot, this.view, {
      label: `${label} of the jobs`, describe, format, tick, limits,
      layers: () => this.#layers(metric), xName: () => axisName(this.axis), yName: () => label,
      // In the CSV file of groups, positions are in the axis's unit. In the CSV file of jobs, positions are steps.
      column: () => (this.groupBy ? COLUMNS[this.axis] : "step"),
      empty: () => "None of these jobs has a value of this metric yet.",
      onNote: (text) => setText(note, text && this.groupBy ? "means of groups" : text),
    });
    chart.scale = this.#scale;
    chart.smoothing = this.#smoothing;
    const lineNames = () => (this.groupBy ? `by ${this.groupBy}` : this.jobs().map((j) => titleOf(j, this.jobs())).join(", "));
    head.append(tools(rangeMenu(chart, metric === "loss" ? "compare" : `compare-${metric}`, unitOf(metric)), saveMenu(chart, () => `compare-${metric}`, () => `${metricInfo(metric).label}, ${lineNames()}`)));
    byId("curves").append(root);
    return chart;
  }

  #layers(metric) {
    const selected = this.selected(), isSelective = selected.size > 0 && selected.size < this.jobs().length, alpha = (isSelected) => (isSelective && !isSelected ? 0.15 : 1);
    if (!this.groupBy) {
      return this.jobs().map((job) => ({ label: titleOf(job, this.jobs()), colour: colour(job.id), dash: dash(job.id), series: this.#series(job, metric), marks: shortenMiddle(titleOf(job, this.jobs()), 22), rings: RINGS.test(metric), alpha: alpha(selected.has(job.id)) }));
    }
    return groups(this.jobs(), this.groupBy).map(({ id, label, jobs }) => {
      const series = this.#groupMean(id, metric, jobs), jobCount = (k) => (series.counts[k] < jobs.length ? `${series.counts[k]} of ${jobs.length}` : jobs.length);
      return { label: `${label} (n = ${jobs.length})`, labelAt: (k) => `${label} (n = ${jobCount(k)})`, colour: colour(id), dash: dash(id), series, band: 0.22, rings: RINGS.test(metric), alpha: alpha(jobs.some((job) => selected.has(job.id))) };
    });
  }

  #series(job, metric) { return this.#loaded.get(`${job.id}:${metric}`)?.series ?? new Series(metric, null, 16); }

  /** Returns the mean of a group, which is computed again when one of its curves has changed. */
  #groupMean(id, metric, jobs) {
    const parts = jobs.map((job) => this.#series(job, metric)), key = `${id}:${metric}`, known = this.#means.get(key);
    const version = `${this.axis}:${this.band}:${jobs.map((job) => [metric, CLOCK].map((name) => this.#loaded.get(`${job.id}:${name}`)?.readCount ?? 0))}`;
    if (known?.version === version) return known.series;
    const series = meanSeries(parts, (segment) => this.#positions(segment), this.band);
    this.#means.set(key, { version, series });
    return series;
  }

  /** Called when a job has newer points than the page has read. */
  markOutdated(id) { this.#news.set(id, (this.#news.get(id) ?? 0) + 1); }

  /** Returns the positions of a segment's buckets on the axis. */
  #positions(segment) {
    if (this.axis === "step") return segment.steps;
    const known = [...this.#loaded.values()].find(({ series }) => (series.base ?? series).segments.includes(segment.source ?? segment)), job = known && this.jobs().find((j) => j.id === known.job);
    // Means of groups already have positions on the axis.
    if (!job) return segment.steps;
    if (this.axis === "epoch") return segment.steps.map((s) => s / (job.steps_per_epoch || 1));
    // Only the job's own attempts count: pauses and the steps of a fork's parent take no time.
    return times(segment, this.#series(job, CLOCK));
  }

  setMetrics(metrics) {
    this.metrics = metrics;
    for (const [metric, chart] of this.#charts) if (!metrics.includes(metric)) { chart.remove(); chart.root.parentElement.remove(); this.#charts.delete(metric); }
    for (const metric of metrics) if (!this.#charts.has(metric)) this.#charts.set(metric, this.#createChart(metric));
    byId("curves").dataset.charts = String(metrics.length);
  }

  setAxis(axis) { this.axis = axis; this.view.axis = axis === "time" ? "time" : "step"; this.view.setZoom(null); this.invalidate(); if (axis === "time" && this.jobs().length) this.draw(); }
  setScale(scale) { this.#scale = scale; for (const chart of this.#charts.values()) chart.scale = scale; this.invalidate(); }
  setSmoothing(factor) { this.#smoothing = factor; for (const chart of this.#charts.values()) chart.smoothing = factor; this.invalidate(); }
  setGroups(by, band) { Object.assign(this, { groupBy: by, band }); this.#means.clear(); this.#drawLegend(); this.invalidate(); }
  invalidate() { for (const chart of this.#charts.values()) chart.invalidate(); }

  async draw() {
    const thisRequest = ++this.#requests;
    this.#drawLegend();
    const wanted = this.axis === "time" ? [...this.metrics, CLOCK] : this.metrics;
    await Promise.all(wanted.flatMap((metric) => this.jobs().map((job) => this.#read(job, metric))));
    this.#drawLegend();
    if (thisRequest === this.#requests) this.invalidate();
  }

  async #read(job, metric) {
    const key = `${job.id}:${metric}`, known = this.#loaded.get(key), chart = metric === CLOCK ? this.chart : this.#charts.get(metric);
    // The response may lack points that arrive while it is read.
    const news = this.#news.get(job.id) ?? 0;
    if (known?.news === news || !chart) return;
    const isSpeed = metric === "images_per_second" && !job.external, needsStepTimes = isSpeed || metric === CLOCK;
    const response = await ask(`/api/v1/jobs/${job.id}/metrics?name=${needsStepTimes ? "step_ms" : encodeURIComponent(metric)}${needsStepTimes ? "&ranks=0" : ""}&points=${chart.pixels}`).catch(() => null);
    if (!response || this.#loaded.get(key)?.news > news) return;
    const attempts = Map.groupBy(response.series, (s) => s.attempt);
    // For an attempt that has ended, the number of ranks with points is used.
    const rankCountOf = (attempt) => (isActive(job.state) && isRankCountKnown(job) && attempt === job.attempt ? rankCountNow(job) : attempts.get(attempt).length);
    const isPerRank = isOfEachRank(metric), series = isPerRank ? new MeanSeries(metric, rankCountOf, 8192) : new Series(metric, 0, 8192);
    for (const [attempt, ranks] of [...attempts].sort((a, b) => a[0] - b[0])) {
      if (isPerRank) series.loadRanks(attempt, ranks, response.exact, response.bucket_steps); else series.load(attempt, ranks[0], response.exact, response.bucket_steps);
    }
    this.#loaded.set(key, { job: job.id, news, readCount: (known?.readCount ?? 0) + 1, series: isSpeed ? new Speeds(series, picturesUntil(job)) : series });
  }

  #drawLegend() {
    const item = (id, label, href) => {
      const name = href ? make("a", { href }) : make("span");
      writeShortened(name, label);
      return make("li", {}, swatch(id), name);
    };
    const lines = this.groupBy ? groups(this.jobs(), this.groupBy).map(({ id, label, jobs }) => item(id, `${label} (n = ${jobs.length})`)) : this.jobs().map((job) => item(job.id, titleOf(job, this.jobs()), `/jobs/${job.id}`));
    byId("compare-legend").replaceChildren(...lines);
    const band = this.band === "std" ? "one standard deviation (of a sample) to either side" : "the lowest to the highest value";
    setText(byId("group-note"), this.groupBy ? `Line: mean over the n jobs of a group. Band: ${band}.` : "");
  }
}
