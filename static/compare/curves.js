// One chart for all jobs: the mean over ranks of each.

import { ask, byId, text } from "../page.js";
import { clock, count, percent, rate, value } from "../numbers.js";
import { Chart } from "../chart/chart.js";
import { saveMenu } from "../chart/export.js";
import { MeanSeries, Series } from "../chart/series.js";
import { View } from "../chart/view.js";

const FORMATS = { loss: value, accuracy: percent, val_accuracy: percent, val_loss: value, images_per_second: rate, lr: value };
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
      layers: () => this.jobs().map((job) => ({ label: job.name, colour: this.colour(job.id), series: this.#series(job), rings: this.metric === "val_accuracy" || this.metric === "val_loss" })),
      onNote: (note) => text(byId("compare-note"), note),
    });
    byId("compare-chart").closest(".card").querySelector(".card-head").append(saveMenu(this.chart, () => `compare-${this.metric}`, () => `${this.metric}, ${this.jobs().map((j) => j.name).join(", ")}`));
  }

  #series(job) { return this.#known.get(`${job.id}:${this.metric}`)?.series ?? new Series(this.metric, null, 16); }

  #places(segment) {
    if (this.axis === "step") return segment.steps;
    const job = this.jobs().find((j) => this.#series(j).segments.includes(segment));
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
      if (this.#known.has(key)) return;
      const answer = await ask(`/api/v1/jobs/${job.id}/metrics?name=${metric}&points=${this.chart.pixels}`).catch(() => null);
      if (!answer) return;
      const each = EACH.has(metric), series = each ? new MeanSeries(metric, job.ranks, 8192) : new Series(metric, 0, 8192);
      const attempts = Map.groupBy(answer.series, (s) => s.attempt);
      for (const [attempt, ranks] of [...attempts].sort((a, b) => a[0] - b[0])) {
        if (each) series.loadRanks(attempt, ranks, answer.exact, answer.bucket_steps); else series.load(attempt, ranks[0], answer.exact, answer.bucket_steps);
      }
      this.#known.set(key, { series });
    }));
    if (mine === this.#asked) this.chart.invalidate(true);
  }
}
