// Jobs with the same tag or setting as one line: the mean of their curves, with a band.

import { Series } from "../chart/series.js";
import { fullKey, flatten, formatSetting } from "../settings.js";
import { settings, specOf } from "./names.js";

/** Maximum number of positions along the axis at which a mean is computed. */
const MAX_POINTS = 1000;
/** Keys that are fields of a job, not settings. */
const FIELDS = ["tag", "name", "owner", "project"];

/** Returns the keys by which these jobs can be grouped: keys with several values, `name`, and `tag` if a job has tags. */
export function groupKeys(jobs) {
  const differing = settings(jobs).filter((row) => row.different).map((row) => row.key);
  const hasSeveral = (field) => new Set(jobs.map((job) => labelsOf(job, field)[0])).size > 1;
  const isOffered = (field) => field === "name" || (field === "tag" ? jobs.some((job) => job.tags.length) : hasSeveral(field));
  return [...FIELDS.filter(isOffered), ...differing.filter((key) => !FIELDS.includes(key))];
}

/** Returns the labels of a job's groups. Grouped by tag, a job may have several. */
function labelsOf(job, key) {
  if (key === "tag") return job.tags.length ? job.tags.map((tag) => `#${tag}`) : ["no tag"];
  if (FIELDS.includes(key)) return [job[key] ?? "no owner"];
  const spec = specOf(job), values = new Map(flatten(spec));
  // A run from elsewhere may have the value of `train.lr` as `config.lr`; see `settings`.
  return [`${key} ${formatSetting(values.get(fullKey(spec, key)) ?? (job.external ? values.get(`config.${key.split(".").at(-1)}`) : undefined))}`];
}

/** Returns the groups of these jobs, each with an id by which its colour is stored. */
export function groups(jobs, key) {
  const found = new Map();
  for (const job of jobs) for (const label of labelsOf(job, key)) found.set(label, [...(found.get(label) ?? []), job]);
  return [...found].map(([label, members]) => ({ id: `group:${key}:${label}`, label, jobs: members })).sort((a, b) => a.label.localeCompare(b.label, undefined, { numeric: true }));
}

/** Returns a job's curve over all attempts. Each attempt replaces the points from its first step on. `xs`: positions of a segment on the axis. */
function curve(series, xs) {
  let at = [], values = [];
  for (const segment of series.segments.filter((g) => g.length)) {
    const positions = xs(segment), from = at.findIndex((x) => x >= positions[0]);
    if (from >= 0) { at.length = from; values.length = from; }
    for (let i = 0; i < segment.length; i++) if (Number.isFinite(segment.mean[i])) { at.push(positions[i]); values.push(segment.mean[i]); }
  }
  return { at, values };
}

/**
 * Returns a curve's interpolated value at `x`; NaN outside the curve. `from.i`: index at which the search starts. Each call increases the
 * index, so `x` must ascend.
 */
function interpolate({ at, values }, x, from) {
  let i = from.i;
  while (i < at.length && at[i] < x) i++;
  from.i = i;
  if (at[i] === x) return values[i];
  if (i === 0 || i === at.length) return NaN;
  const share = (x - at[i - 1]) / (at[i] - at[i - 1]);
  return values[i - 1] + share * (values[i] - values[i - 1]);
}

/**
 * Returns mean and band of several curves along the axis. At each position, only curves that reach the position count, and `counts`
 * has the number of these curves. `band`: `std` or `range`.
 */
export function meanSeries(all, xs, band) {
  const curves = all.map((series) => curve(series, (segment) => xs(segment))).filter(({ at }) => at.length), positions = [...new Set(curves.flatMap(({ at }) => at))].sort((a, b) => a - b);
  const stride = Math.max(1, positions.length / MAX_POINTS), series = new Series("mean", null, MAX_POINTS + 2), from = curves.map(() => ({ i: 0 })), segment = series.segment(1);
  series.counts = [];
  for (let k = 0; k < positions.length; k += stride) {
    const x = positions[Math.floor(k)], values = curves.map((c, i) => interpolate(c, x, from[i])).filter(Number.isFinite), n = values.length;
    if (!n) continue;
    const average = values.reduce((a, b) => a + b, 0) / n;
    const std = n > 1 ? Math.sqrt(values.reduce((sum, v) => sum + (v - average) ** 2, 0) / (n - 1)) : 0;
    const [low, high] = band === "std" ? [average - std, average + std] : [Math.min(...values), Math.max(...values)];
    segment.push(x, low, high, average);
    series.counts.push(n);
  }
  return series;
}
