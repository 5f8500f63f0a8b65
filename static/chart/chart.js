// A chart: layers of series on a canvas, with a crosshair and a zoom, which pointers and the keyboard control.
//
// A layer is `{ label, labelAt, colour, dash, series, band, rings, smoothing, alpha, side, marks }` and draws every attempt of one series as
// a line. `labelAt(k)`: the label at bucket `k`, if it varies. `dash`: `dashed` or `dotted`. `band`: shades from the lowest to the highest
// value even if every bucket is one step. `rings`: a ring at every value, for metrics with few values. `smoothing` overrides the chart's
// smoothing. `side`: 1 for the right axis. `marks`: the job's name at the starts of its attempts, if layers are jobs.
//
// The reader's actions are drawn at once. New data is drawn at most ten times a second, one chart per frame (the chart that has waited
// longest), because drawing all charts in one frame would delay visible movements.

import { make } from "../page.js";
import { drawAttempts, drawAxes, drawRightLabels, labelWidth, prepareCanvas, startsOf, drawWithin, xAxis } from "./axes.js";
import { Gestures } from "./gestures.js";
import { drawDot, drawSegment, MAX_BUCKETS_PER_PIXEL, visibleRange } from "./lines.js";
import { onThemeChange, palette } from "./palette.js";
import { linear } from "./scale.js";
import { countVisible, dataRange, verticalAxis } from "./vertical.js";

const DATA_FRAME_MS = 100;
const charts = new Set();
let frame = 0;

function scheduleDrawing() {
  frame ||= requestAnimationFrame((now) => {
    frame = 0;
    const outdated = [...charts].filter((chart) => chart.isOutdated && !chart.isHeld);
    const due = outdated.filter((chart) => !chart.isUrgent && now - chart.drawnAt >= DATA_FRAME_MS);
    const oldest = due.reduce((first, chart) => (first && first.drawnAt <= chart.drawnAt ? first : chart), null);
    for (const chart of outdated) if (chart.isUrgent || chart === oldest) { chart.drawnAt = now; chart.draw(); }
    if (outdated.some((chart) => chart.isOutdated)) scheduleDrawing();
  });
}

onThemeChange(() => { for (const chart of charts) chart.invalidate(); });

/** Returns the range that is shown without a zoom: the positions with data, extended to 0 if data then covers more than half of it. */
function fullRange(parts) {
  const [low, high] = dataRange(parts);
  return [low > 0 && low < high / 2 ? 0 : low, high];
}

export class Chart {
  isOutdated = true;
  /** Whether the chart is drawn in the next frame, because the reader's action has changed it. */
  isUrgent = true;
  drawnAt = 0;
  scale = "linear";
  smoothing = 0;
  /** Fixed lower and upper end of the vertical axis; null for an end that follows from the data. */
  ends = [null, null];
  /** Whether the vertical axis ignores outliers. */
  robust = false;
  /** For each attempt, the reason that follows the attempt's number at the mark of its start. */
  marks = new Map();
  /** Finer series of the zoomed part, by the series that they replace: `{ zoom, series }`. Used while `zoom` is the current zoom. */
  detail = null;
  #gestures;
  #gone = new AbortController();

  /**
   * `label`: name for screen readers. `layers()`: the layers to draw. `format(v)`: a value with its unit. `tick(v)`: an axis label.
   * `describe(x)`: the tip's first line. `onNote(text)`: called with a note on the resolution. `empty()`: the text of a chart without
   * points. `xName()`, `yName()`: names of the axes with units, for saved pictures. `column()`: name of the column of steps in CSV.
   * `startsAtZero`: whether the axis starts at 0. `limits`: range that the axis never exceeds. `rightAxis`: options of the right axis.
   * `isHeld`: whether the chart draws nothing until `startDrawing`.
   */
  constructor(root, view, { label, layers, format, tick = format, describe, onNote, empty = () => "No point yet.", xName = () => "step", yName = () => label, column = () => "step", startsAtZero = false, limits, rightAxis = null, isHeld = false }) {
    Object.assign(this, { root, view, label, layers, format, tick, describe, onNote, empty, xName, yName, column, startsAtZero, limits, isHeld });
    this.rightAxis = rightAxis && { ends: [null, null], robust: false, ...rightAxis };
    this.canvas = make("canvas", { role: "img", "aria-label": label });
    this.overlay = make("canvas", { "aria-hidden": "true" });
    this.tip = make("div", { className: "tip", hidden: true });
    this.status = make("p", { className: "sr", role: "status" });
    root.append(this.canvas, this.overlay, this.tip, this.status);
    root.tabIndex = 0;
    root.setAttribute("role", "group");
    root.setAttribute("aria-label", `${label}. Arrow keys move the crosshair, plus and minus zoom, 0 shows all.`);
    charts.add(this);
    const { signal } = this.#gone, size = new ResizeObserver(() => this.invalidate());
    size.observe(root);
    signal.addEventListener("abort", () => { size.disconnect(); charts.delete(this); });
    view.addEventListener("zoom", () => this.invalidate(), { signal });
    view.addEventListener("cursor", () => this.#drawOverlay(), { signal });
    this.#listen();
    scheduleDrawing();
  }

  /** Starts drawing. */
  startDrawing() {
    this.isHeld = false;
    this.invalidate();
  }

  /** Stops drawing, for a chart that is removed from the page. */
  remove() { this.#gone.abort(); }

  /** Signal that is aborted when the chart is removed, for event listeners. */
  get gone() { return this.#gone.signal; }

  /** Draws the chart in the next frame, after an action of the reader. */
  invalidate() {
    this.isUrgent = true;
    this.dataChanged();
  }

  /** Draws the chart soon, because its data has changed. */
  dataChanged() {
    this.isOutdated = true;
    scheduleDrawing();
  }

  /** Returns the series to draw for `series`: the finer series of the zoomed part, if it is loaded. */
  drawnSeries(series) {
    const finer = this.detail && this.view.zoom && this.detail.zoom === this.view.zoom && this.detail.series.get(series.base ?? series);
    return finer ? series.withBase?.(finer) ?? finer : series;
  }

  /**
   * Returns the drawn content, for tests and consoles: for each line the label, attempt, number of buckets, newest step and newest value.
   * `lockstep.charts.loss.snapshot()`
   */
  snapshot() {
    return this.layers().flatMap(({ label, series }) => series.segments.map((g) => ({
      label, rank: series.rank, attempt: g.attempt, buckets: g.length, exact: g.exact,
      points: g.counts.subarray(0, g.length).reduce((a, b) => a + b, 0),
      step: g.newestStep, value: g.newestValue,
    })));
  }

  /** Returns segments with their positions on the axis, by layer. */
  #gather() {
    return this.layers().map((layer) => ({
      layer,
      parts: this.drawnSeries(layer.series).segments
        .filter((g) => g.length).map((segment) => ({ segment, xs: this.view.positions(segment) })),
    }));
  }

  draw() {
    this.isOutdated = this.isUrgent = false;
    const prepared = prepareCanvas(this.root, this.canvas, this.overlay);
    if (!prepared) return;
    this.paint(prepared.ctx, prepared.width, prepared.height);
    this.#drawOverlay();
  }

  /** The width of the plot in pixels of the screen, which is the number of buckets to request from the server. */
  get pixels() {
    const css = this.plot ? this.plot.right - this.plot.left : this.root.clientWidth - 60;
    return Math.min(10000, Math.round(Math.max(100, css) * Math.min(2, devicePixelRatio || 1)));
  }

  /** Draws into any context that has a canvas's methods. */
  paint(ctx, width, height) {
    const colours = palette(), view = this.view;
    const gathered = this.#gather(), parts = gathered.flatMap((g) => g.parts);

    if (!parts.length) return this.#drawEmptyText(ctx, width, height, colours);

    const [first, last] = fullRange(parts), [low, high] = view.zoom ?? [first, last > first ? last : first + 1];

    const { shown, buckets, exact } = countVisible(gathered, low, high);
    // A tick about every 52 pixels of the vertical axes, and below about every 90 pixels of the horizontal axis.
    const rows = Math.max(2, Math.floor(height / 52)), sides = this.rightAxis ? [this, this.rightAxis] : [this];
    const [left, right] = sides.map((side, n) => verticalAxis(side, this.scale, gathered.filter(({ layer }) => (layer.side ?? 0) === n), low, high, rows));
    const rightWidth = right ? labelWidth(ctx, right.labels, colours, 24) + 8 : 0;
    const plot = { top: 8, bottom: height - 26, left: labelWidth(ctx, left.labels, colours, 24) + 10, right: width - 10 - rightWidth, margin: 10 };
    if (plot.right - plot.left < 20) return;
    const x = linear([low, high], [plot.left, plot.right]);
    const y = left.scale(plot);
    this.plot = plot;
    this.x = x;
    this.y = y;
    this.y2 = right?.scale(plot) ?? null;
    this.gathered = gathered;
    this.lines = gathered.filter((g) => g.parts.length).map(({ layer }) => ({ label: layer.label, colour: colours[layer.colour] ?? layer.colour, dash: layer.dash }));

    const axis = xAxis(view, low, high, Math.max(2, Math.floor((plot.right - plot.left) / 90)));
    drawAxes(ctx, plot, { x, y, yTicks: left.ticks, yLabel: this.tick, colours, ...axis });
    if (right) drawRightLabels(ctx, plot, { y: this.y2, ticks: right.ticks, label: right.label, colours });
    ctx.save();
    ctx.beginPath();
    ctx.rect(plot.left - 1, plot.top - 4, plot.right - plot.left + 6, plot.bottom - plot.top + 8);
    ctx.clip();
    for (const { layer, parts } of gathered) this.#drawLayer(ctx, layer, parts, colours);
    drawAttempts(ctx, plot, x, startsOf(gathered, this.marks, colours), colours);
    ctx.restore();

    const pixels = plot.right - plot.left, perPixel = shown / Math.min(pixels, buckets || 1);
    const isEveryPoint = exact && buckets / pixels <= MAX_BUCKETS_PER_PIXEL;
    this.onNote?.(!shown ? "" : isEveryPoint ? "every point" : `min to max of ${Math.max(2, Math.round(perPixel))} points a pixel`, { every: isEveryPoint, exact });
    this.root.dataset.drawn = String(shown);
    delete this.root.dataset.empty;
    this.canvas.setAttribute("aria-label", this.label);
    if (shown && !this.firstDrawnAt) { this.firstDrawnAt = performance.now(); performance.mark(`drawn ${this.label}`); }
    // Time of the drawing, for measurements of zooms: the picture appears in the next frame.
    this.paintedAt = performance.now();
  }

  /** Draws a text in place of empty axes. */
  #drawEmptyText(ctx, width, height, colours) {
    Object.assign(this, { plot: null, gathered: [] });
    ctx.font = colours.font;
    ctx.fillStyle = colours.muted;
    ctx.textAlign = "center";
    ctx.textBaseline = "middle";
    const text = this.empty();
    ctx.fillText(text, width / 2, height / 2);
    this.canvas.setAttribute("aria-label", `${this.label}. ${text}`);
    this.onNote?.("", { every: true, exact: true });
    this.root.dataset.drawn = "0";
    this.root.dataset.empty = text;
    this.paintedAt = performance.now();
  }

  /** Returns the vertical axis of a layer. */
  #axis(layer) { return layer.side && this.y2 ? this.y2 : this.y; }

  #drawLayer(ctx, layer, parts, colours) {
    const { plot, x } = this, y = this.#axis(layer);
    const colour = colours[layer.colour] ?? layer.colour;
    for (const { segment, xs } of parts) {
      const smoothing = layer.smoothing ?? this.smoothing;
      const style = { colour, smoothing, alpha: layer.alpha ?? 1, band: layer.band, dash: layer.dash };
      // Steps that a later attempt has repeated are drawn faintly, because only the later values count.
      const repeatedFrom = Math.min(...parts.filter((p) => p.segment.attempt > segment.attempt).map((p) => x.to(p.xs[0])));
      if (x.to(xs[segment.length - 1]) <= repeatedFrom) drawSegment(ctx, segment, xs, x, y, plot, style);
      else {
        drawWithin(ctx, plot.left - 1, repeatedFrom, () => drawSegment(ctx, segment, xs, x, y, plot, style));
        drawWithin(ctx, repeatedFrom, plot.right + 6, () => drawSegment(ctx, segment, xs, x, y, plot, { ...style, alpha: style.alpha * 0.3 }));
      }
      if (!layer.rings) continue;
      const [from, to] = visibleRange(segment, xs, x.low, x.high);
      for (let i = from; i < to; i++) {
        if (!Number.isFinite(segment.mean[i])) continue;
        ctx.fillStyle = colour;
        drawDot(ctx, x.to(xs[i]), y.to(segment.mean[i]), 3.5);
        ctx.fillStyle = colours.card;
        drawDot(ctx, x.to(xs[i]), y.to(segment.mean[i]), 2);
      }
    }
  }

  // --- crosshair and selection -------------------------------------------------------------------

  #drawOverlay() {
    if (!this.plot) { this.tip.hidden = true; return; }
    const ratio = devicePixelRatio || 1, ctx = this.overlay.getContext("2d"), { plot, x, view } = this;
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    ctx.clearRect(0, 0, this.overlay.width, this.overlay.height);
    const colours = palette();
    const brush = this.#gestures.brush;
    if (brush?.held || brush?.to !== undefined) {
      const [from, to] = [brush.from, brush.to ?? brush.from].sort((a, b) => a - b);
      ctx.fillStyle = colours.accent;
      ctx.globalAlpha = 0.15;
      ctx.fillRect(from - 1, plot.top, to - from + 2, plot.bottom - plot.top);
      ctx.globalAlpha = 1;
    }
    const at = view.cursor;
    if (at === null || at < x.low || at > x.high) { this.tip.hidden = true; return; }
    const rows = this.#values(at);
    const p = Math.round(x.to(rows.length ? rows[0].x : at)) + 0.5;
    ctx.strokeStyle = colours.muted;
    ctx.globalAlpha = 0.8;
    ctx.beginPath();
    ctx.moveTo(p, plot.top);
    ctx.lineTo(p, plot.bottom);
    ctx.stroke();
    ctx.globalAlpha = 1;
    for (const row of rows) {
      const py = row.y.to(row.value);
      if (!Number.isFinite(py)) continue;
      ctx.fillStyle = colours[row.colour] ?? row.colour;
      drawDot(ctx, x.to(row.x), py, 3.5);
    }
    if (this.#gestures.isPointerOver || this.root === document.activeElement) this.#showTip(rows, p, colours);
    else this.tip.hidden = true;
  }

  /** Returns, for each layer, the value nearest to `at`, from the newest attempt that has a value near `at`. */
  #values(at) {
    const reach = (this.x.high - this.x.low) / 40;
    const rows = [];
    for (const { layer, parts } of this.gathered) {
      const near = [];
      for (const { segment, xs } of parts) {
        const i = segment.find(at, xs);
        const k = i >= segment.length || (i > 0 && at - xs[i - 1] < xs[i] - at) ? i - 1 : i;
        const distance = Math.abs(xs[k] - at);
        const isInside = at >= xs[0] && at <= xs[segment.length - 1];
        if (k >= 0 && (isInside || distance <= reach)) near.push({ segment, k, x: xs[k], value: segment.mean[k] });
      }
      if (!near.length) continue;
      const newest = near.reduce((a, b) => (b.segment.attempt > a.segment.attempt ? b : a));
      const { segment, k } = newest;
      const format = layer.side && this.rightAxis ? this.rightAxis.format : this.format;
      rows.push({ label: layer.labelAt?.(k) ?? layer.label, colour: layer.colour, dash: layer.dash, value: newest.value, x: newest.x, range: [segment.min[k], segment.max[k]], y: this.#axis(layer), format });
    }
    return rows;
  }

  #showTip(rows, p, colours) {
    const list = rows.map((row) => {
      const swatch = make("i", { className: row.dash ?? "" }), text = Number.isFinite(row.value) ? row.format(row.value) : "not finite";
      swatch.style.background = colours[row.colour] ?? row.colour;
      const line = make("p", {}, swatch, make("span", { textContent: row.label }), make("b", { textContent: text, title: String(row.value) }));
      if (row.range[0] < row.range[1]) line.append(make("small", { textContent: `${row.format(row.range[0])} to ${row.format(row.range[1])}` }));
      return line;
    });
    this.tip.replaceChildren(make("p", { textContent: this.describe(rows.length ? rows[0].x : this.view.cursor) }), ...list);
    this.tip.hidden = false;
    const width = this.tip.offsetWidth;
    const left = p + 14 + width > this.plot.right ? p - 14 - width : p + 14;
    this.tip.style.transform = `translate(${Math.max(0, left)}px, ${this.plot.top + 6}px)`;
  }

  #listen() {
    const { root, view } = this;
    this.#gestures = new Gestures(this, {
      onBrush: (low, high) => this.#zoomTo(low, high), onChange: () => this.#drawOverlay(),
      fullRange: () => fullRange(this.gathered.flatMap((g) => g.parts)),
    });
    root.addEventListener("blur", () => { if (!this.#gestures.isPointerOver) view.setCursor(null); });
    root.addEventListener("keydown", (event) => this.#key(event));
  }

  #zoomTo(low, high) {
    // A range of less than 4 steps or 0.05 s would show no line.
    const least = this.view.axis === "time" ? 0.05 : 4;
    if (high - low >= least) this.view.setZoom([low, high]);
  }

  #key(event) {
    if (!this.plot || event.ctrlKey || event.metaKey || event.altKey) return;
    const { view, x } = this, reach = x.high - x.low;
    const at = view.cursor ?? (x.low + x.high) / 2;
    const hop = this.#hop(at) * (event.shiftKey ? 10 : 1);
    const move = (to) => view.setCursor(Math.min(x.high, Math.max(x.low, to)));
    const keys = {
      ArrowLeft: () => move(at - hop), ArrowRight: () => move(at + hop),
      Home: () => move(x.low), End: () => move(x.high),
      "+": () => this.#zoomTo(at - reach / 4, at + reach / 4), "=": () => this.#zoomTo(at - reach / 4, at + reach / 4),
      "-": () => view.zoom && this.#zoomOut(at, reach),
      0: () => view.setZoom(null), Escape: () => { view.setZoom(null); view.setCursor(null); },
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
    if (view.cursor !== null) {
      const rows = this.#values(view.cursor);
      this.status.textContent = [this.describe(view.cursor), ...rows.map((r) => `${r.label} ${r.format(r.value)}`)].join(", ");
    }
  }

  #zoomOut(at, reach) {
    const [low, high] = dataRange(this.gathered.flatMap((g) => g.parts));
    const [a, b] = [at - reach, at + reach];
    if (a <= low && b >= high) this.view.setZoom(null);
    else this.view.setZoom([Math.max(a, Math.min(low, 0)), Math.min(b, high)]);
  }

  /** Returns the distance by which an arrow key moves the crosshair: to the next bucket, at least a pixel. */
  #hop(at) {
    const pixel = (this.x.high - this.x.low) / (this.plot.right - this.plot.left);
    const part = this.gathered.flatMap((g) => g.parts)[0];
    if (!part) return pixel;
    const i = Math.max(1, Math.min(part.segment.length - 1, part.segment.find(at, part.xs)));
    return Math.max(pixel, part.segment.length > 1 ? part.xs[i] - part.xs[i - 1] : pixel);
  }
}
