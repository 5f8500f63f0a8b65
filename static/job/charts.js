// The charts of a job: their content and resolution, and the controls, whose choices are in the page's URL.

import { byId, make, setNote } from "../page.js";
import { clock, count, percent, plural, rate, value } from "../numbers.js";
import { setUpChoices, readUrl, writeUrl } from "../address.js";
import { Chart } from "../chart/chart.js";
import { headOf, saveMenu, tools } from "../chart/export.js";
import { rangeMenu, setUpSmoothing } from "../chart/range.js";
import { RANK_COLOURS } from "../chart/palette.js";
import { Speeds } from "../chart/speeds.js";
import { axisName, View } from "../chart/view.js";
import { picturesUntil } from "./facts.js";
import { metricInfo, axesTitle, axisTitle, GROUPS, MACHINE, quantity, SELECTABLE, formatTick, formatPercentTick } from "./names.js";
import { colourOf } from "./ranks.js";
import { isFinal } from "./states.js";

/** Minimum time between requests while the reader zooms. The first request is sent at once. */
const ZOOM_INTERVAL_MS = 80;

export class Charts {
  otherMetric = SELECTABLE[readUrl("metric")] ? readUrl("metric") : "lr";

  /** `job()`: the job's current state. */
  constructor(job, metrics, ranks) {
    // `Panels` replaces `panelMetrics`, the metrics of all panels, and `panelPixels`, the width in pixels of the widest panel of a metric.
    Object.assign(this, { job, metrics, ranks, isDrawing: false, panelMetrics: () => [], panelPixels: () => 0 });
    const view = this.view = new View(() => metrics.series("step_ms"));
    view.stepsPerEpoch = job().steps_per_epoch;
    const describe = (x) => this.#describe(x);
    const xName = () => axisName(view.axis), empty = () => this.#emptyText();
    // Charts are held until the history has been read, so that they are not drawn twice.
    this.createChart = (root, options) => new Chart(root, view, { tick: formatTick, describe, xName, empty, isHeld: !this.isDrawing, ...options });
    const chart = (id, options) => this.createChart(byId(`${id}-chart`), options);
    const withRanks = (shown) => (shown && metrics.rankCount > 1 ? `${shown} · ${plural(metrics.rankCount, "rank")}` : shown);
    this.all = {
      loss: chart("loss", { label: "Loss of each rank", yName: () => axisTitle("loss"), format: value, layers: () => this.#perRank("loss"), onNote: (shown) => setNote(byId("loss-note"), withRanks(shown)) }),
      accuracy: chart("accuracy", {
        label: "Accuracy in training and validation", yName: () => axesTitle(["accuracy", "val_accuracy"]), format: percent, limits: [0, 1], tick: formatPercentTick,
        layers: () => [
          { label: "train", labelAt: () => "train (not smoothed)", colour: "accent", series: metrics.mean("accuracy"), smoothing: 0.9 },
          { label: "validation", colour: "accent-2", series: metrics.series("val_accuracy"), rings: true, smoothing: 0 },
        ],
      }),
      images_per_second: chart("speed", {
        label: "Images per second, of all ranks", yName: () => axisTitle("images_per_second"), format: rate, layers: () => [{ label: "all ranks", colour: "accent", series: new Speeds(metrics.series("step_ms"), picturesUntil(job())) }],
        onNote: (shown) => setNote(byId("speed-note"), [job().images_per_second ? `${rate(job().images_per_second)} in all` : "", shown].filter(Boolean).join(" · ")),
      }),
      lr: chart("lr", { label: "Another metric", yName: () => axisTitle(this.otherMetric), format: (v) => SELECTABLE[this.otherMetric].format(v), tick: (v) => (SELECTABLE[this.otherMetric].format === value ? formatTick(v) : SELECTABLE[this.otherMetric].format(v)), layers: () => this.#otherLayers(), startsAtZero: true, onNote: (shown) => setNote(byId("lr-note"), shown) }),
    };
    for (const name of this.rareMetrics) {
      const { label, format } = SELECTABLE[name];
      this.all[name] = chart(name, { label, yName: () => axisTitle(name), format, startsAtZero: true, layers: () => [{ label: label.toLowerCase(), colour: "accent", series: metrics.series(name) }] });
    }
    this.#setUpControls();
    view.addEventListener("zoom", () => this.#handleZoom());
  }

  /** Whether the chart of the loss shows the mean over ranks. */
  get showsMeanLoss() { return this.lines === "mean" || this.metrics.rankCount > RANK_COLOURS; }

  /** Marks the starts of attempts, with the reason why the previous attempt ended. */
  setMarks(reasons) {
    for (const chart of Object.values(this.all)) chart.marks = reasons;
    this.redraw();
  }

  /** Starts drawing all charts, after their history has been read. */
  startDrawing() {
    this.isDrawing = true;
    for (const chart of Object.values(this.all)) chart.startDrawing();
  }

  /** Metrics that few jobs have. The card of such a metric appears with the first point. */
  get rareMetrics() {
    const { train, parallel } = this.job().spec;
    return ["auto", "fp16"].includes(train.precision) && parallel.device !== "cpu" ? ["loss_scale", "skipped_steps"] : [];
  }

  /** Metrics to read at the start, besides those of every page. */
  get metricsToRead() { return [this.otherMetric, ...this.rareMetrics, ...this.panelMetrics()]; }

  /** Draws all charts in the next frame, after an action of the reader. */
  redraw() {
    for (const chart of Object.values(this.all)) chart.invalidate();
    this.dataChanged();
  }

  /** Draws all charts soon, because their data has changed. */
  dataChanged() {
    for (const name of this.rareMetrics) byId(`${name}-card`).hidden = !this.metrics.series(name).segments.length;
    this.#hideAbsentGroups();
    for (const chart of Object.values(this.all)) chart.dataChanged();
  }

  /** The number of buckets to request for a metric. */
  bucketCount(name) { return Math.max((Object.hasOwn(this.all, name) ? this.all[name] : this.all.lr).pixels, this.panelPixels(name)); }

  /** The metrics of all charts, the most important first. */
  get visibleMetrics() { return [...new Set(["loss", "accuracy", "step_ms", ...this.metricsToRead])]; }

  /** Whether this job can have a metric: only some jobs have metrics of float16 and of GPUs. */
  offers(name) {
    if (["loss_scale", "skipped_steps"].includes(name)) return this.rareMetrics.includes(name) || name === this.otherMetric;
    if (!name.startsWith("gpu_") || name === this.otherMetric) return true;
    return this.job().spec.parallel.device === "cuda" || this.metrics.series("gpu_utilization").segments.length > 0;
  }

  /** Hides, in the list of metrics, the groups that this job does not have. */
  #hideAbsentGroups() {
    for (const group of byId("other-metric").querySelectorAll("optgroup")) {
      const hidden = ![...group.children].some((option) => this.offers(option.value));
      if (group.hidden !== hidden) group.hidden = group.disabled = hidden;
    }
  }

  /** Returns the text in a chart without a point. */
  #emptyText() {
    return isFinal(this.job().state) ? "This job has no value of this metric." : "No point yet.";
  }

  #describe(x) {
    const step = this.view.stepAt(x), parts = [], epoch = this.job().steps_per_epoch;
    if (this.view.axis === "time") parts.push(`${clock(x)} of training`);
    parts.push(`step ${count(step)}`);
    if (epoch) parts.push(`epoch ${(step / epoch).toFixed(2)}`);
    return parts.join(" · ");
  }

  #perRank(name) {
    const { metrics, ranks } = this;
    const line = (rank) => ({ label: `rank ${rank}`, colour: colourOf(rank), series: metrics.series(name, rank) });
    const all = [...Array(metrics.rankCount).keys()], front = ranks.chosen;
    if (this.lines === "mean" || metrics.rankCount > RANK_COLOURS) {
      return [{ label: "mean of ranks", colour: "accent", series: metrics.mean(name), band: true }, ...all.filter((r) => front.has(r)).map(line)];
    }
    return all.sort((a, b) => front.has(a) - front.has(b)).map((r) => ({ ...line(r), alpha: !front.size || front.has(r) ? 1 : 0.18 }));
  }

  /** Returns a line for each machine, from the rank that reports the machine's metrics. */
  #perMachine(name) {
    const { metrics } = this, { agents } = this.job(), reporting = metrics.ranksOf(name);
    // Machines are named in the order of their ranks. If earlier attempts ran on other machines, names cannot be matched to ranks.
    const machine = (i, rank) => (agents.length === reporting.length ? agents[i] : reporting.length > 1 ? `machine of rank ${rank}` : "machine");
    return reporting.map((rank, i) => ({ label: machine(i, rank), colour: colourOf(rank), series: metrics.series(name, rank) }));
  }

  /** Returns the layers of a panel. `lines`: `mean` or `ranks`. */
  panelLayers({ metrics: names, lines }) {
    const { metrics } = this, hasSeveral = names.length > 1, sides = [...new Set(names.map(quantity))];
    return names.flatMap((name, i) => {
      const side = sides.indexOf(quantity(name)), label = metricInfo(name).label === name ? name : metricInfo(name).label.toLowerCase(), colour = hasSeveral ? `rank-${i}` : "accent";
      let layers;
      if (name === "images_per_second" && !this.job().external) layers = [{ label, series: new Speeds(metrics.series("step_ms"), picturesUntil(this.job())) }];
      else if (Object.hasOwn(MACHINE, name)) layers = this.#perMachine(name).map((layer) => ({ ...layer, label: hasSeveral ? `${label}, ${layer.label}` : layer.label }));
      else if (!metricInfo(name).isPerRank) layers = [{ label, series: metrics.series(name), rings: name.startsWith("val_"), smoothing: name.startsWith("val_") ? 0 : undefined }];
      else if (lines === "mean" || metrics.rankCount > RANK_COLOURS) layers = [{ label: hasSeveral ? label : "mean of ranks", series: metrics.mean(name), band: true }];
      else layers = [...Array(metrics.rankCount).keys()].map((rank) => ({ label: hasSeveral ? `${label}, rank ${rank}` : `rank ${rank}`, colour: colourOf(rank), series: metrics.series(name, rank) }));
      return layers.map((layer) => ({ ...layer, side, colour: hasSeveral ? colour : layer.colour ?? colour }));
    });
  }

  #otherLayers() {
    const { label, isPerRank } = SELECTABLE[this.otherMetric];
    if (this.otherMetric in MACHINE) return this.#perMachine(this.otherMetric);
    return isPerRank ? this.#perRank(this.otherMetric) : [{ label: label.toLowerCase(), colour: "accent", series: this.metrics.series(this.otherMetric) }];
  }

  #setUpControls() {
    const { loss } = this.all, { view } = this;
    setUpChoices("scale", "linear", (v) => { loss.scale = v; this.redraw(); });
    setUpChoices("axis", "step", (v) => { view.setAxis(v); this.redraw(); });
    setUpChoices("lines", "ranks", (v) => { this.lines = v; this.redraw(); });
    setUpSmoothing(byId("smooth"), byId("smooth-value"), (factor) => { loss.smoothing = factor; loss.invalidate(); });
    const metric = byId("other-metric");
    let group = metric;
    for (const [name, { label }] of Object.entries(SELECTABLE)) {
      const [title] = GROUPS.find(([, first]) => first === name) ?? [];
      if (title) metric.append(group = make("optgroup", { label: title }));
      group.append(new Option(label, name, false, name === this.otherMetric));
    }
    metric.addEventListener("change", async () => {
      this.otherMetric = metric.value;
      writeUrl({ metric: metric.value === "lr" ? "" : metric.value });
      await this.metrics.ensureRead(this.otherMetric).catch(() => {});
      if (view.zoom) this.#handleZoom();
      this.redraw();
    });
    const zoom = readUrl("zoom").split("~").map(Number);
    if (zoom.length === 2 && zoom.every(Number.isFinite) && zoom[0] < zoom[1]) view.zoom = zoom;
    byId("reset-zoom").hidden = !view.zoom;
    byId("reset-zoom").addEventListener("click", () => view.setZoom(null));
    for (const [name, chart] of Object.entries(this.all)) {
      const title = () => `${this.job().name} · ${chart === this.all.lr ? SELECTABLE[this.otherMetric].label : chart.label}`;
      const metricOf = () => (chart === this.all.lr ? this.otherMetric : name);
      headOf(chart.root).append(tools(rangeMenu(chart, name, name === "accuracy" ? 0.01 : 1), saveMenu(chart, () => `${this.job().name}-${metricOf()}`, title,
        `/api/v1/jobs/${this.job().id}/metrics.csv${name === "lr" ? "" : `?name=${name}`}`)));
    }
  }

  #timer = 0;
  #askedAt = -Infinity;
  #handleZoom() {
    const { view } = this;
    byId("reset-zoom").hidden = !view.zoom;
    writeUrl({ zoom: view.zoom ? view.zoom.map((v) => Number(v.toPrecision(9))).join("~") : "" });
    clearTimeout(this.#timer);
    if (!view.zoom || !this.metrics.isCoarse) return;
    const now = performance.now(), waitMs = this.#askedAt + ZOOM_INTERVAL_MS - now;
    if (waitMs > 0) this.#timer = setTimeout(() => this.#handleZoom(), waitMs);
    else { this.#askedAt = now; this.readZoomedPart(); }
  }

  /** Reads the zoomed part in the resolution of the screen. Each chart is drawn when its part arrives. */
  async readZoomedPart() {
    const { view, metrics } = this, zoom = view.zoom;
    if (!zoom) return;
    // If the request fails, the coarse points stay, and the chart's note shows the resolution.
    await metrics.readZoomedPart(this.visibleMetrics, view.stepAt(zoom[0]), view.stepAt(zoom[1]), zoom, (detail) => {
      if (view.zoom !== zoom) return;
      for (const chart of Object.values(this.all)) chart.detail = detail;
      this.redraw();
    }).catch(() => {});
  }
}
