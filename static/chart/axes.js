// The frame around the data: grid, tick labels, and marks at the start of attempts.

import { twoDigits } from "../numbers.js";
import { clockTicks, linearTicks } from "./scale.js";

/**
 * Gives canvases the size of `root`. Returns the size in pixels of the page, and the context of the first canvas, which is cleared; null if
 * `root` is not laid out.
 */
export function prepareCanvas(root, ...canvases) {
  const { width, height } = root.getBoundingClientRect(), ratio = devicePixelRatio || 1, ctx = canvases[0].getContext("2d");
  if (!width || !height) return null;
  for (const canvas of canvases) {
    const w = Math.round(width * ratio), h = Math.round(height * ratio);
    if (canvas.width !== w || canvas.height !== h) { canvas.width = w; canvas.height = h; }
  }
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  ctx.clearRect(0, 0, width, height);
  return { ctx, width, height };
}

/** Draws grid and labels into `plot` ({left, top, right, bottom} in pixels). */
export function drawAxes(ctx, plot, { x, y, xTicks, yTicks, xLabel, yLabel, colours }) {
  ctx.font = colours.font;
  ctx.lineWidth = 1;
  ctx.strokeStyle = colours.grid;
  ctx.fillStyle = colours.muted;
  const crisp = (p) => Math.round(p) + 0.5;
  ctx.beginPath();
  for (const t of yTicks) { const p = crisp(y.to(t)); ctx.moveTo(plot.left, p); ctx.lineTo(plot.right, p); }
  for (const t of xTicks) { const p = crisp(x.to(t)); ctx.moveTo(p, plot.top); ctx.lineTo(p, plot.bottom); }
  ctx.stroke();

  ctx.textBaseline = "middle";
  ctx.textAlign = "right";
  for (const t of yTicks) ctx.fillText(yLabel(t), plot.left - 8, y.to(t));
  drawLabels(ctx, xTicks.map((t) => [x.to(t), xLabel(t)]), 0, plot.right + plot.margin, plot.bottom + 7);
}

/** Draws labels, `[position, text]`, at the height `y` from `left` to `right`. Labels without enough space are left out. */
export function drawLabels(ctx, labels, left, right, y) {
  ctx.textBaseline = "top";
  ctx.textAlign = "center";
  let lastRight = -Infinity;
  for (const [at, text] of labels) {
    const half = ctx.measureText(text).width / 2, p = Math.min(Math.max(at, left + half), right - half);
    if (p - half < lastRight + 10) continue;
    lastRight = p + half;
    ctx.fillText(text, p, y);
  }
}

/** Draws the labels of the right axis; the grid belongs to the left axis. */
export function drawRightLabels(ctx, plot, { y, ticks, label, colours }) {
  ctx.font = colours.font;
  ctx.fillStyle = colours.muted;
  ctx.textBaseline = "middle";
  ctx.textAlign = "left";
  for (const t of ticks) ctx.fillText(label(t), plot.right + 8, y.to(t));
}

/** Draws a thin mark at the first step of every attempt except the first, with the attempt's number and reason. */
export function drawAttempts(ctx, plot, x, starts, colours) {
  ctx.font = colours.font;
  ctx.lineWidth = 1;
  const marks = starts.map((start) => ({ ...start, p: Math.round(x.to(start.at)) + 0.5 })).filter(({ p }) => p >= plot.left && p <= plot.right).sort((a, b) => a.p - b.p);
  marks.forEach(({ attempt, why, label = `attempt ${attempt}`, colour = colours.muted, p }, i) => {
    ctx.strokeStyle = colour;
    ctx.globalAlpha = 0.7;
    ctx.setLineDash([2, 3]);
    ctx.beginPath();
    ctx.moveTo(p, plot.top);
    ctx.lineTo(p, plot.bottom);
    ctx.stroke();
    ctx.setLineDash([]);
    ctx.textBaseline = "top";
    // Labels are to the right of their mark. The last label is to the left if there is more space.
    const left = p - (marks[i - 1]?.p ?? plot.left), right = (marks[i + 1]?.p ?? plot.right) - p, toLeft = i === marks.length - 1 && right < 120 && left > right;
    const room = (toLeft ? left : right) - 10, text = fitLabel(ctx, label, why, room);
    ctx.textAlign = toLeft ? "right" : "left";
    if (!text) return;
    // The words stay readable in front of a line.
    const { width } = ctx.measureText(text);
    ctx.fillStyle = colours.card;
    ctx.globalAlpha = 0.8;
    ctx.fillRect(toLeft ? p - 5 - width : p + 3, plot.top, width + 2, 16);
    ctx.globalAlpha = 1;
    ctx.fillStyle = colour;
    ctx.fillText(text, toLeft ? p - 4 : p + 4, plot.top + 2);
  });
}

/** Returns as much of `label (after why)` as fits into `room` pixels, at least the label's number. Empty if the number does not fit. */
function fitLabel(ctx, label, why, room) {
  const fits = (text) => ctx.measureText(text).width <= room;
  let text = why ? `${label} (after ${why})` : label;
  if (fits(text)) return text;
  for (let keep = Math.min(why?.length ?? 0, 60); keep >= 8; keep -= 4) if (fits(text = `${label} (after ${why.slice(0, keep).trimEnd()}…)`)) return text;
  if (fits(label)) return label;
  const number = label.match(/\d+$/)?.[0] ?? "";
  return fits(number) ? number : "";
}

/** Returns the width of the widest of `labels` in pixels, at least `minimum`. */
export function labelWidth(ctx, labels, colours, minimum) {
  ctx.font = colours.font;
  return Math.ceil(Math.max(minimum, ...labels.map((l) => ctx.measureText(l).width)));
}

/** Calls `draw`, clipped to the range from `left` to `right`. */
export function drawWithin(ctx, left, right, draw) {
  ctx.save();
  ctx.beginPath();
  ctx.rect(left, 0, right - left, ctx.canvas.height);
  ctx.clip();
  draw();
  ctx.restore();
}

/** Returns the ticks of the horizontal axis, about `wanted`, and the function that formats their labels. */
export function xAxis(view, low, high, wanted) {
  const grouped = (v) => String(Number(v.toPrecision(10))).replace(/\B(?=(\d{3})+(?!\d))/g, ",");
  if (view.axis === "time") {
    const label = (s) => {
      if (high - low < wanted) return `${Number(s.toFixed(2))} s`;
      return s >= 3600 ? `${Math.floor(s / 3600)}:${twoDigits(Math.floor(s % 3600 / 60))}:${twoDigits(Math.floor(s % 60))}` : `${Math.floor(s / 60)}:${twoDigits(Math.floor(s % 60))}`;
    };
    return { xTicks: clockTicks(low, high, wanted), xLabel: label };
  }
  if (view.axis === "epoch" && view.stepsPerEpoch) {
    const k = view.stepsPerEpoch;
    return { xTicks: linearTicks(low / k, high / k, wanted).map((e) => e * k), xLabel: (v) => grouped(v / k) };
  }
  return { xTicks: linearTicks(low, high, wanted).filter((v) => Number.isInteger(v)), xLabel: grouped };
}

/** Returns the starts of all attempts except the first. */
function attemptStarts(parts) {
  const starts = new Map();
  for (const { segment, xs } of parts) {
    const before = starts.get(segment.attempt) ?? Infinity;
    starts.set(segment.attempt, Math.min(before, xs[0]));
  }
  const sorted = [...starts].map(([attempt, at]) => ({ attempt, at })).sort((a, b) => a.attempt - b.attempt);
  return sorted.slice(1);
}

/**
 * Returns the starts of a job's attempts, with the texts in `marks`. If layers are jobs, returns the starts of each job's attempts, with
 * the job's name.
 */
export function startsOf(gathered, marks, colours) {
  if (!gathered.some(({ layer }) => layer.marks)) return attemptStarts(gathered.flatMap((g) => g.parts)).map((start) => ({ ...start, why: marks.get(start.attempt) }));
  return gathered.flatMap(({ layer, parts }) => attemptStarts(parts).map(({ attempt, at }) => ({ attempt, at, label: `${layer.marks}: attempt ${attempt}`, colour: colours[layer.colour] ?? layer.colour })));
}
