// The metrics of a job: history over REST, then what the stream adds. Every point is here once.

import { ask } from "../page.js";
import { MeanSeries, Series } from "../chart/series.js";

/** What the page shows; `means` are also kept as the mean over ranks. */
const NAMES = ["loss", "accuracy", "lr", "images_per_second", "step_ms", "data_ms", "all_reduce_ms", "val_accuracy"];
const MEANS = ["loss", "accuracy"];
const ZOOMED = ["loss", "accuracy", "lr", "images_per_second"];
const POINTS = 2000;
/** Buckets kept on the page, all ranks of a metric together. */
const CAPACITY = 131_072;

export class Metrics {
  #series = new Map();
  #means = new Map();
  #asOf = new Map();
  /** Events since a request for a zoomed part went out: the answer may lack them. */
  #since = null;

  constructor(job, ranks) {
    this.job = job;
    this.ranks = ranks;
    this.detail = null;
  }

  #capacity() { return Math.max(1024, Math.min(16_384, Math.floor(CAPACITY / this.ranks))); }

  of(name, rank = 0) {
    const key = `${name}:${rank}`;
    let series = this.#series.get(key);
    if (!series) this.#series.set(key, series = new Series(name, rank, this.#capacity()));
    return series;
  }

  mean(name) {
    let series = this.#means.get(name);
    if (!series) this.#means.set(name, series = new MeanSeries(name, this.ranks, 16_384));
    return series;
  }

  #get(name, range = "") {
    return ask(`/api/v1/jobs/${this.job}/metrics?name=${name}&points=${POINTS}${range}`);
  }

  /** Reads all history afresh. Answers the sequence number from which the stream is to go on. */
  async load() {
    const answers = await Promise.all(NAMES.map((name) => this.#get(name)));
    this.#series.clear();
    this.#means.clear();
    this.detail = null;
    answers.forEach((answer, i) => {
      this.#asOf.set(NAMES[i], answer.as_of_seq);
      fill(NAMES[i], answer, (rank) => this.of(NAMES[i], rank), MEANS.includes(NAMES[i]) && (() => this.mean(NAMES[i])));
    });
    return Math.min(...this.#asOf.values());
  }

  /** A `metrics` event. */
  apply({ seq, attempt, rank, name, steps, values }) {
    if (seq <= (this.#asOf.get(name) ?? 0)) return;
    this.of(name, rank).append(attempt, steps, values);
    if (MEANS.includes(name)) this.mean(name).appendRank(attempt, steps, values);
    this.#since?.push({ attempt, rank, name, steps, values });
    if (this.detail) this.#applyDetail(this.detail, { attempt, rank, name, steps, values });
  }

  /** An `evaluation` event: the same value as `val_accuracy`, whichever comes first. */
  evaluated({ attempt, step, accuracy }) { this.of("val_accuracy").append(attempt, [step], [accuracy]); }

  #applyDetail(detail, { attempt, rank, name, steps, values }) {
    if (!ZOOMED.includes(name)) return;
    const until = steps.findIndex((s) => s > detail.to);
    const s = until < 0 ? steps : steps.slice(0, until), v = until < 0 ? values : values.slice(0, until);
    const base = this.of(name, rank);
    detail.series.get(base)?.append(attempt, s, v);
    if (MEANS.includes(name)) detail.series.get(this.mean(name))?.appendRank(attempt, s, v);
  }

  /** Whether the charts lack points that the server has. */
  get coarse() {
    return [...this.#series.values()].some((s) => ZOOMED.includes(s.name) && !s.exact);
  }

  /** Reads steps `from` to `to` as finely as the screen can show. Answers null when it was overtaken. */
  async zoom(from, to, zoom) {
    const since = this.#since = [];
    const answers = await Promise.all(ZOOMED.map((name) => this.#get(name, `&from=${Math.floor(from)}&to=${Math.ceil(to)}`)));
    if (since !== this.#since) return null;
    const series = new Map();
    const make = (base, Type, who) => { const s = series.get(base) ?? new Type(base.name, who, 16_384); series.set(base, s); return s; };
    answers.forEach((answer, i) => {
      const name = ZOOMED[i];
      fill(name, answer, (rank) => make(this.of(name, rank), Series, rank),
        MEANS.includes(name) && (() => make(this.mean(name), MeanSeries, this.ranks)));
    });
    this.detail = { zoom, from, to, series };
    for (const event of since) this.#applyDetail(this.detail, event);
    this.#since = null;
    return this.detail;
  }
}

function fill(name, answer, of, mean) {
  for (const s of answer.series) of(s.rank).load(s.attempt, s, answer.exact);
  if (!mean) return;
  const attempts = Map.groupBy(answer.series, (s) => s.attempt);
  for (const [attempt, ranks] of [...attempts].sort((a, b) => a[0] - b[0])) mean().loadRanks(attempt, ranks, answer.exact);
}
