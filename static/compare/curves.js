// One chart for all jobs: the mean over ranks of each.

import { ask, byId, text } from "../page.js";
import { cut, middle } from "../cut.js";
import { clock, count, percent, rate, value } from "../numbers.js";
import { Chart } from "../chart/chart.js";
import { headOf, saveMenu, tools } from "../chart/export.js";
import { rangeMenu } from "../chart/range.js";
import { MeanSeries, Series } from "../chart/series.js";
import { Speeds } from "../chart/speeds.js";
import { View } from "../chart/view.js";
import { pictures } from "../job/facts.js";

const FORMATS = { loss: value, accuracy: percent, val_accuracy: percent, val_loss: value, images_per_second: rate, lr: value };
const NAMES = { loss: "loss (cross-entropy)", accuracy: "accuracy (share)", val_accuracy: "validation accuracy (share)", val_loss: "validation loss (cross-entropy)", images_per_second: "images/s", lr: "learning rate" };
/** These come from every rank. */
const EACH = new Set(["loss", "accuracy"]);

export class Curves {
  metric = "loss";
  axis = "step";
  #known = new Map();
  #asked = 0;

  constructor(jobs, colour) {
    Object.assign(this, { jobs, colour });
    this.view = new View(() => ({ segments: [] }));
    this.view.places = (segment) => this.#places(segment);
    const describe = (x) => (this.axis === "step" ? `step ${count(x)}` : this.axis === "epoch" ? `epoch ${x.toFixed(2)}` : clock(x));
    this.chart = new Chart(byId("compare-chart"), this.view, {
      label: "Curves of the jobs", describe, format: (v) => FORMATS[this.metric](v), tick: (v) => String(Number(v.toPrecision(6))),
      layers: () => this.jobs().map((job) => ({ label: job.name, colour: this.colour(job.id), series: this.#series(job), marks: middle(job.name, 22), rings: this.metric === "val_accuracy" || this.metric === "val_loss" })),
      xName: () => ({ epoch: "epoch", time: "time" }[this.axis] ?? "optimizer step"), yName: () => NAMES[this.metric],
      empty: () => "None of these jobs has a point of it yet.",
      onNote: (note) => text(byId("compare-note"), note),
    });
    headOf(byId("compare-chart")).append(tools(rangeMenu(this.chart, "compare"), saveMenu(this.chart, () => `compare-${this.metric}`, () => `${this.metric}, ${this.jobs().map((j) => j.name).join(", ")}`)));
  }

  #series(job) { return this.#known.get(`${job.id}:${this.metric}`)?.series ?? new Series(this.metric, null, 16); }

  /** There are newer points of a job than those that were read. */
  changed(id) { for (const [key, known] of this.#known) if (key.startsWith(`${id}:`)) known.stale = true; }

  #places(segment) {
    if (this.axis === "step") return segment.steps;
    const job = this.jobs().find((j) => { const series = this.#series(j); return (series.base ?? series).segments.includes(segment.of ?? segment); });
    if (!job) return segment.steps;
    if (this.axis === "epoch") return segment.steps.map((s) => s / (job.steps_per_epoch || 1));
    // Time as the whole run took it: steps are as long as each other, near enough to compare by.
    const secs = job.started_at ? (Date.parse(job.finished_at ?? new Date().toISOString()) - Date.parse(job.started_at)) / 1000 : 0;
    return segment.steps.map((s) => s * secs / Math.max(1, job.step));
  }

  setMetric(metric) { this.metric = metric; this.view.setZoom(null); this.draw(); }
  setAxis(axis) { this.axis = axis; this.view.axis = axis === "time" ? "time" : "step"; this.view.setZoom(null); this.chart.invalidate(true); }
  setScale(scale) { this.chart.scale = scale; this.chart.invalidate(true); }
  setSmoothing(factor) { this.chart.smoothing = factor; this.chart.invalidate(true); }

  async draw() {
    const mine = ++this.#asked, { metric } = this;
    await Promise.all(this.jobs().map(async (job) => {
      const key = `${job.id}:${metric}`;
      if (this.#known.has(key) && !this.#known.get(key).stale) return;
      const speeds = metric === "images_per_second";
      const answer = await ask(`/api/v1/jobs/${job.id}/metrics?name=${speeds ? "step_ms" : metric}${speeds ? "&ranks=0" : ""}&points=${this.chart.pixels}`).catch(() => null);
      if (!answer) return;
      const each = EACH.has(metric), series = each ? new MeanSeries(metric, job.ranks, 8192) : new Series(metric, 0, 8192);
      const attempts = Map.groupBy(answer.series, (s) => s.attempt);
      for (const [attempt, ranks] of [...attempts].sort((a, b) => a[0] - b[0])) {
        if (each) series.loadRanks(attempt, ranks, answer.exact, answer.bucket_steps); else series.load(attempt, ranks[0], answer.exact, answer.bucket_steps);
      }
      this.#known.set(key, { series: speeds ? new Speeds(series, pictures(job)) : series });
    }));
    this.#legend();
    if (mine === this.#asked) this.chart.invalidate(true);
  }

  #legend() {
    byId("compare-legend").replaceChildren(...this.jobs().map((job) => {
      const item = document.createElement("li"), name = document.createElement("a");
      name.href = `/jobs/${job.id}`;
      item.append(Object.assign(document.createElement("i"), { className: `swatch bg-${this.colour(job.id)}` }), name);
      cut(name, job.name);
      return item;
    }));
  }
}
