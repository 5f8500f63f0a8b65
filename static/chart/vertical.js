// The ranges of a chart's axes, and the ticks of its vertical axes. A chart has a left axis, and a right axis for
// layers of another quantity.

import { visibleRange } from "./lines.js";
import { withoutOutliers } from "./range.js";
import { linear, linearTicks, log, logTicks, niceDomain } from "./scale.js";

/** Returns the range of positions that have data. */
export function dataRange(parts) {
  let low = Infinity, high = -Infinity;
  for (const { segment, xs } of parts) { low = Math.min(low, xs[0]); high = Math.max(high, xs[segment.length - 1]); }
  return high > -Infinity ? [low, high] : [0, 1];
}

/** Returns the largest numbers of points and of buckets that a layer has between `low` and `high`, and whether every bucket is a point. */
export function countVisible(gathered, low, high) {
  let shown = 0, buckets = 0, exact = true;
  for (const { parts } of gathered) {
    let points = 0, bucketCount = 0;
    for (const { segment, xs } of parts) {
      const [from, to] = visibleRange(segment, xs, low, high);
      bucketCount += to - from;
      for (let i = from; i < to; i++) points += segment.counts[i];
      exact &&= segment.exact;
    }
    shown = Math.max(shown, points);
    buckets = Math.max(buckets, bucketCount);
  }
  return { shown, buckets, exact };
}

/**
 * Returns an axis of `kind` (linear, log) for these layers. `side`: fixed `ends`; `robust` to ignore outliers; `startsAtZero`;
 * `limits` that the axis never exceeds; `tick(v)` for labels.
 */
export function verticalAxis(side, kind, gathered, low, high, rows) {
  let bottom = Infinity, top = -Infinity;
  for (const { segment, xs } of gathered.flatMap((g) => g.parts)) {
    const [from, to] = visibleRange(segment, xs, low, high);
    for (let i = from; i < to; i++) {
      const a = segment.min[i], b = segment.max[i];
      if (Number.isFinite(b) && b > top) top = b;
      if (Number.isFinite(a) && a < bottom && (kind === "linear" || a > 0)) bottom = a;
    }
  }
  if (side.startsAtZero && kind === "linear" && bottom > 0) bottom = 0;
  if (side.robust) [bottom, top] = rangeWithoutOutliers(gathered, kind, low, high) ?? [bottom, top];
  const fixed = (v) => (v === null || (kind === "log" && v <= 0) ? null : v);
  let [y0, y1] = niceDomain(bottom, top, kind);
  [y0, y1] = [fixed(side.ends[0]) ?? y0, fixed(side.ends[1]) ?? y1];
  if (y1 <= y0) y1 = y0 + (Math.abs(y0) || 1);
  if (side.limits && side.ends.every((v) => v === null)) [y0, y1] = [Math.max(y0, side.limits[0]), Math.min(y1, side.limits[1])];
  const ticks = kind === "log" ? logTicks(y0, y1, rows) : linearTicks(y0, y1, rows);
  return { ticks, label: side.tick, labels: ticks.map(side.tick), scale: (plot) => (kind === "log" ? log : linear)([y0, y1], [plot.bottom, plot.top]) };
}

/** Returns the range of the visible values without outliers, or null for too few values. */
function rangeWithoutOutliers(gathered, kind, low, high) {
  const values = [];
  for (const { segment, xs } of gathered.flatMap((g) => g.parts)) {
    const [from, to] = visibleRange(segment, xs, low, high), stride = Math.max(1, Math.ceil((to - from) / 2000));
    for (let i = from; i < to; i += stride) { const v = segment.mean[i]; if (Number.isFinite(v) && (kind === "linear" || v > 0)) values.push(v); }
  }
  return values.length < 20 ? null : withoutOutliers(Float64Array.from(values));
}
