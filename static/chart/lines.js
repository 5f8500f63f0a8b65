// Draws series into a plot: every point if the points fit, otherwise minimum, maximum and mean of each column of pixels. A value that was
// not finite is a gap.

/** Number of buckets per pixel above which columns are drawn. */
export const MAX_BUCKETS_PER_PIXEL = 2;

/** Returns the indices [from, to) of a segment's buckets between `low` and `high`, with one neighbour on each side. */
export function visibleRange(segment, xs, low, high) {
  return [Math.max(0, segment.find(low, xs) - 1), Math.min(segment.length, segment.find(high, xs) + 1)];
}

/** Columns of pixels, each with minimum, maximum and mean of the values that are in the column. */
export class Columns {
  constructor(width) {
    const size = Math.max(1, Math.ceil(width) + 2);
    this.min = new Float64Array(size).fill(Infinity);
    this.max = new Float64Array(size).fill(-Infinity);
    this.sum = new Float64Array(size);
    this.weight = new Float64Array(size);
    this.gap = new Uint8Array(size);
  }

  add(segment, xs, [from, to], x, left, values = segment.mean) {
    for (let i = from; i < to; i++) {
      const column = Math.round(x.to(xs[i]) - left);
      if (column < 0 || column >= this.sum.length) continue;
      const v = values[i];
      if (!Number.isFinite(v)) { this.gap[column] = 1; continue; }
      const n = segment.counts[i];
      if (segment.min[i] < this.min[column]) this.min[column] = segment.min[i];
      if (segment.max[i] > this.max[column]) this.max[column] = segment.max[i];
      this.sum[column] += v * n;
      this.weight[column] += n;
    }
  }

  /** Draws the band and the mean line. */
  draw(ctx, y, left, { colour, alpha, width, band, dash }) {
    if (band) {
      ctx.fillStyle = colour;
      ctx.globalAlpha = alpha * band;
      // Rectangles are drawn ten times as fast as one path in a browser without a GPU.
      for (let c = 0, at = Math.round(left); c < this.sum.length; c++) {
        if (!this.weight[c]) continue;
        const top = y.to(this.max[c]), bottom = y.to(this.min[c]);
        if (Number.isFinite(top) && Number.isFinite(bottom)) ctx.fillRect(at + c, top, 1, Math.max(1, bottom - top));
      }
    }
    const points = [];
    for (let c = 0; c < this.sum.length; c++) {
      if (this.weight[c]) points.push(left + c, y.to(this.sum[c] / this.weight[c]));
      else if (this.gap[c]) points.push(NaN, NaN);
    }
    stroke(ctx, points, { colour, alpha, width, dash });
  }
}

/** Vertical pixels per horizontal pixel, on average over a line, above which a line of more than 200 points is drawn as bars. */
const MAX_STEEPNESS = 4;

/** Lengths of dashes and gaps, in pixels. */
const DASHES = { dashed: [7, 4], dotted: [2, 3] };

/** Draws a line through [x0, y0, x1, y1, ...]. NaN breaks the line, and a single point between breaks is a dot. */
function stroke(ctx, points, { colour, alpha, width, dash }) {
  const length = points.length;
  let travel = 0;
  for (let i = 3; i < length; i += 2) { const d = points[i] - points[i - 2]; if (!Number.isNaN(d)) travel += Math.abs(d); }
  if (length > 400 && travel > MAX_STEEPNESS * (points[length - 2] - points[0])) return drawBars(ctx, points, { colour, alpha, width, dash });
  ctx.strokeStyle = ctx.fillStyle = colour;
  ctx.globalAlpha = alpha;
  ctx.lineWidth = width;
  ctx.lineJoin = "round";
  ctx.beginPath();
  const dots = [];
  let run = 0;
  for (let i = 0; i <= points.length; i += 2) {
    if (i < points.length && Number.isFinite(points[i + 1])) {
      if (run++) ctx.lineTo(points[i], points[i + 1]); else ctx.moveTo(points[i], points[i + 1]);
    } else {
      if (run === 1) dots.push(points[i - 2], points[i - 1]);
      run = 0;
    }
  }
  ctx.setLineDash(DASHES[dash] ?? []);
  ctx.stroke();
  ctx.setLineDash([]);
  for (let i = 0; i < dots.length; i += 2) drawDot(ctx, dots[i], dots[i + 1], Math.max(1.5, width));
  ctx.globalAlpha = 1;
}

/**
 * Draws the line as bars: in each column of pixels, the range that the line covers. A noisy line looks the same, but is drawn faster: the time
 * to draw a path grows with its length. Eight noisy ranks as paths took a second in a browser without a GPU.
 */
function drawBars(ctx, points, { colour, alpha, width, dash }) {
  const first = Math.round(points.find(Number.isFinite)), columns = Math.max(1, Math.ceil(points[points.length - 2] - first) + 2);
  const top = new Float64Array(columns).fill(Infinity), bottom = new Float64Array(columns).fill(-Infinity);
  const cover = (column, y) => {
    if (y < top[column]) top[column] = y;
    if (y > bottom[column]) bottom[column] = y;
  };
  for (let i = 0; i < points.length; i += 2) {
    const x1 = points[i] - first, y1 = points[i + 1], c1 = Math.min(columns - 1, Math.max(0, Math.floor(x1)));
    if (!Number.isFinite(y1)) continue;
    cover(c1, y1);
    const x0 = points[i - 2] - first, y0 = points[i - 1], c0 = Math.max(0, Math.floor(x0));
    if (i < 2 || !Number.isFinite(y0)) continue;
    // A line that crosses from one column to the next belongs to both columns.
    for (let c = c0; c < c1; c++) {
      const y = y0 + (y1 - y0) * (c + 1 - x0) / (x1 - x0);
      cover(c, y);
      cover(c + 1, y);
    }
  }
  ctx.fillStyle = colour;
  ctx.globalAlpha = alpha;
  const [on, off] = DASHES[dash] ?? [1, 0];
  for (let c = 0; c < columns; c++) if (top[c] <= bottom[c] && c % (on + off) < on) ctx.fillRect(first + c, top[c] - width / 2, 1, bottom[c] - top[c] + width);
  ctx.globalAlpha = 1;
}

export function drawDot(ctx, x, y, radius) {
  ctx.beginPath();
  ctx.arc(x, y, radius, 0, 2 * Math.PI);
  ctx.fill();
}

/** Draws a point as a square, a ring or (any other `shape`) a disc; `inside`: the colour within a ring. */
export function drawPoint(ctx, x, y, radius, shape, inside) {
  if (shape === "square") return ctx.fillRect(x - radius, y - radius, 2 * radius, 2 * radius);
  drawDot(ctx, x, y, radius);
  if (shape !== "ring") return;
  ctx.fillStyle = inside;
  drawDot(ctx, x, y, radius - 2);
}

/** Draws the symbol of a line, or of points, in a legend. */
export function drawKey(ctx, x, y, { colour, dash, shape }, inside) {
  ctx.fillStyle = colour;
  if (shape) return drawPoint(ctx, x + 4.5, y, 4.5, shape, inside);
  const parts = { dashed: [0, 5], dotted: [0, 3.5, 7] }[dash] ?? [0], width = { dashed: 4, dotted: 2 }[dash] ?? 9;
  for (const at of parts) ctx.fillRect(x + at, y - 4.5, width, 9);
}

/** Draws one segment of a series. */
export function drawSegment(ctx, segment, xs, x, y, plot, { colour, smoothing, alpha, band, dash }) {
  const range = visibleRange(segment, xs, x.low, x.high);
  const isCrowded = (range[1] - range[0]) / (plot.right - plot.left) > MAX_BUCKETS_PER_PIXEL;
  const drawLine = (values, style) => {
    if (isCrowded) {
      const columns = new Columns(plot.right - plot.left);
      columns.add(segment, xs, range, x, plot.left, values);
      return columns.draw(ctx, y, plot.left, style);
    }
    if ((band || !segment.exact) && style.band) drawBand(ctx, segment, xs, range, x, y, style);
    const points = new Float64Array(2 * (range[1] - range[0]));
    for (let i = range[0], k = 0; i < range[1]; i++) {
      points[k++] = x.to(xs[i]);
      points[k++] = y.to(values[i]);
    }
    stroke(ctx, points, style);
  };
  if (smoothing > 0) {
    drawLine(segment.mean, { colour, alpha: alpha * 0.28, width: 1, band: 0.4 });
    drawLine(segment.smooth(smoothing), { colour, alpha, width: 1.75, band: 0, dash });
  } else {
    drawLine(segment.mean, { colour, alpha, width: 1.4, band: 0.22, dash });
  }
}

function drawBand(ctx, segment, xs, [from, to], x, y, { colour, alpha, band }) {
  ctx.fillStyle = colour;
  ctx.globalAlpha = alpha * band;
  ctx.beginPath();
  let run = from;
  for (let i = from; i <= to; i++) {
    const fits = i < to && Number.isFinite(y.to(segment.min[i])) && Number.isFinite(y.to(segment.max[i]));
    if (fits) continue;
    for (let k = run; k < i; k++) ctx[k === run ? "moveTo" : "lineTo"](x.to(xs[k]), y.to(segment.max[k]));
    for (let k = i - 1; k >= run; k--) ctx.lineTo(x.to(xs[k]), y.to(segment.min[k]));
    run = i + 1;
  }
  ctx.fill();
  ctx.globalAlpha = 1;
}
