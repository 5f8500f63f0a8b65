// The metrics of a job: the history, read over REST, and then points from the stream. No point is stored twice.

import { ask } from "../page.js";
import { MeanSeries, Series } from "../chart/series.js";
import { rankCountNow, isRankCountKnown } from "./facts.js";
import { isActive } from "./states.js";

/** Metrics that the page always reads, besides `GPU`, with the first chart's metric first. For `MEANS`, the mean over ranks is kept, too. */
const NAMES = ["loss", "accuracy", "step_ms", "data_ms", "all_reduce_ms", "val_accuracy"];
const GPU = ["gpu_utilization", "gpu_memory_bytes", "gpu_power_watts", "gpu_temperature_celsius"];
const MEANS = new Set(["loss", "accuracy", "step_ms", "data_ms", "all_reduce_ms", ...GPU]);
/** Maximum number of buckets that the page keeps for a metric, over all ranks. */
const CAPACITY = 65_536;

export class Metrics {
  /** Series by metric and rank, and series of means over ranks by metric. */
  #series = new Map();
  #means = new Map();
  /** For each metric that has been read: the sequence number of the newest event that the response includes. */
  #asOf = new Map();
  /** For each metric that is being read: the events that arrived meanwhile (`events`), and a promise of the end (`done`). */
  #reading = new Map();
  /** The number of ranks of each attempt that was active while this page was open. After a loss of machines, it is below the job's `ranks`. */
  #rankCounts = new Map();
  /** The newest attempt with a point. */
  attempt = 0;
  /** Events since the newest request for a zoomed part, which the response may lack; null if no request is open. */
  #newEvents = null;

  /** `bucketCount(name)`: the number of buckets to request. */
  constructor(job, rankCount, bucketCount) {
    Object.assign(this, { job, rankCount, bucketCount, detail: null });
  }

  #capacity() { return Math.max(1024, Math.min(16_384, Math.floor(CAPACITY / this.rankCount))); }

  series(name, rank = 0) {
    const key = `${name}:${rank}`;
    let series = this.#series.get(key);
    if (!series) this.#series.set(key, series = new Series(name, rank, this.#capacity()));
    return series;
  }

  /** Returns the ranks with a point of a metric, in any attempt or in the given attempt. */
  ranksOf(name, attempt = null) {
    const has = (s) => s.name === name && s.segments.some((g) => attempt === null || g.attempt === attempt);
    return [...this.#series.values()].filter(has).map((s) => s.rank).sort((a, b) => a - b);
  }

  /** Returns the names of all metrics that have been read and have a point. */
  get reportedNames() { return new Set([...this.#series.values()].filter((s) => s.segments.length).map((s) => s.name)); }

  /** Stores the number of ranks of the active attempt. Later, the job's reason may no longer contain the number. */
  rememberRankCount(job) {
    if (isActive(job.state) && isRankCountKnown(job)) this.#rankCounts.set(job.attempt, Math.min(this.#rankCounts.get(job.attempt) ?? Infinity, rankCountNow(job)));
  }

  /** Returns the number of ranks of an attempt that was active while this page was open, otherwise undefined. */
  rankCountOf(attempt) { return this.#rankCounts.get(attempt); }

  /** Creates a series of means over ranks. For an attempt that had ended earlier, the number of ranks with points is used. */
  #createMean(name, capacity) { return new MeanSeries(name, (attempt) => this.rankCountOf(attempt) ?? this.ranksOf(name, attempt).length, capacity); }

  /** Returns the series of a metric's means over ranks. */
  mean(name) {
    let series = this.#means.get(name);
    if (!series) this.#means.set(name, series = this.#createMean(name, 8192));
    return series;
  }

  #get(name, range = "") {
    return ask(`/api/v1/jobs/${this.job}/metrics?name=${encodeURIComponent(name)}&points=${this.bucketCount(name)}${range}`);
  }

  /** Reads a metric's history unless it has been read. Waits for `beforeMean()` before the mean over ranks is computed. */
  async ensureRead(name, beforeMean) {
    if (this.#asOf.has(name)) return;
    let reading = this.#reading.get(name);
    if (!reading) {
      this.#reading.set(name, reading = { events: [] });
      const isCurrent = () => this.#reading.get(name) === reading;
      reading.done = this.#read(name, beforeMean, isCurrent, reading.events).finally(() => { if (isCurrent()) this.#reading.delete(name); });
    }
    await reading.done;
  }

  /** `isCurrent()`: whether no newer request for the whole history was made in the meantime. */
  async #read(name, beforeMean, isCurrent, events) {
    const early = name === NAMES[0] ? window.earlyLoss : null;
    window.earlyLoss = null;
    const response = (early && await early) || await this.#get(name);
    if (!isCurrent()) return;
    for (const key of [...this.#series.keys()]) if (key.startsWith(`${name}:`)) this.#series.delete(key);
    this.#means.delete(name);
    this.#asOf.set(name, response.as_of_seq);
    fill(response, (rank) => this.series(name, rank));
    this.attempt = response.series.reduce((newest, s) => Math.max(newest, s.attempt), this.attempt);
    await beforeMean?.();
    if (MEANS.has(name)) fillMean(response, this.mean(name));
    for (const event of events) this.apply(event);
  }

  /**
   * Reads the whole history again: the history of the first chart, then calls `drawFirstChart()`, then all other history. `others`: metrics
   * to read besides those of every page. `showsMean`: whether the first chart shows the mean over ranks, which is otherwise computed after
   * the drawing. Returns the sequence number from which the stream continues.
   */
  async load(others, showsMean, drawFirstChart) {
    const names = new Set([...NAMES, ...others, ...GPU]);
    this.#series.clear();
    this.#means.clear();
    this.#asOf.clear();
    this.#reading.clear();
    this.attempt = 0;
    this.detail = null;
    await this.ensureRead(NAMES[0], showsMean ? null : drawFirstChart);
    if (showsMean) await drawFirstChart?.();
    await Promise.all([...names].map((name) => this.ensureRead(name)));
    return Math.min(...this.#asOf.values());
  }

  /** Handles a `metrics` event. */
  apply(event) {
    const { seq, attempt, rank, name, steps, values } = event;
    // A hidden metric is read when it is shown. While it is being read, the response may lack the event.
    if (!this.#asOf.has(name)) return void this.#reading.get(name)?.events.push(event);
    if (seq <= this.#asOf.get(name)) return;
    this.attempt = Math.max(this.attempt, attempt);
    this.series(name, rank).append(attempt, steps, values);
    if (MEANS.has(name)) this.mean(name).appendRank(attempt, steps, values);
    this.#newEvents?.push({ attempt, rank, name, steps, values });
    if (this.detail) this.#applyDetail(this.detail, { attempt, rank, name, steps, values });
  }

  /** Handles an `evaluation` event, which has the same value as the point of `val_accuracy`. Either may arrive first. */
  applyEvaluation({ attempt, step, accuracy }) { this.series("val_accuracy").append(attempt, [step], [accuracy]); }

  #applyDetail(detail, { attempt, rank, name, steps, values }) {
    if (!detail.names.has(name)) return;
    const until = steps.findIndex((s) => s > detail.to);
    const s = until < 0 ? steps : steps.slice(0, until), v = until < 0 ? values : values.slice(0, until);
    detail.series.get(this.series(name, rank))?.append(attempt, s, v);
    if (MEANS.has(name)) detail.series.get(this.mean(name))?.appendRank(attempt, s, v);
  }

  /** Whether the server has points that the charts lack, because a series has buckets of several steps. */
  get isCoarse() { return [...this.#series.values()].some((s) => !s.exact); }

  /** Reads the steps `from` to `to`, which `zoom` shows, in the resolution of the screen. Calls `onDetail(detail)` for each of `names`. */
  async readZoomedPart(names, from, to, zoom, onDetail) {
    const since = this.#newEvents = [];
    const detail = { zoom, from, to, series: new Map(), names: new Set() };
    const detailSeries = (base, make) => { const s = detail.series.get(base) ?? make(); detail.series.set(base, s); return s; };
    await Promise.all(names.map(async (name) => {
      const response = await this.#get(name, `&from=${Math.max(0, Math.floor(from))}&to=${Math.ceil(to)}`);
      if (since !== this.#newEvents) return;
      fill(response, (rank) => detailSeries(this.series(name, rank), () => new Series(name, rank, 16_384)));
      if (MEANS.has(name)) fillMean(response, detailSeries(this.mean(name), () => this.#createMean(name, 16_384)));
      detail.names.add(name);
      for (const event of since) if (event.name === name) this.#applyDetail(detail, event);
      this.detail = detail;
      onDetail(detail);
    }));
    if (since === this.#newEvents) this.#newEvents = null;
  }
}

function fill(response, seriesOf) {
  for (const s of response.series) seriesOf(s.rank).load(s.attempt, s, response.exact, response.bucket_steps);
}

function fillMean(response, mean) {
  const attempts = Map.groupBy(response.series, (s) => s.attempt);
  for (const [attempt, ranks] of [...attempts].sort((a, b) => a[0] - b[0])) mean.loadRanks(attempt, ranks, response.exact, response.bucket_steps);
}
