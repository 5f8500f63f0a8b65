// The points of one metric of one rank. Each attempt has a segment with typed arrays.
//
// A point is a bucket of `count` steps, named by its first step, with minimum, maximum and mean. A raw point is a bucket of one step. When
// a segment exceeds its capacity, neighbouring buckets are merged in pairs, and new points are gathered in buckets of the same width. So
// memory and drawing time are bounded, the whole run has the same resolution, and no peak is lost.

class Segment {
  constructor(attempt, capacity) {
    this.attempt = attempt;
    /** The segment of the attempt before; null for the first attempt. */
    this.previous = null;
    this.capacity = capacity;
    this.length = 0;
    /** Whether every bucket is one raw point. */
    this.exact = true;
    /** Number of steps in a full bucket. */
    this.width = 1;
    /** The first step of the newest bucket that was pushed; -1 before the first. */
    this.newestStep = -1;
    /** The newest value; NaN if the newest bucket has several steps. */
    this.newestValue = NaN;
    this.#allocate(Math.min(capacity, 256));
  }

  #allocate(size) {
    const grow = (Type, old) => { const a = new Type(size); if (old) a.set(old.subarray(0, this.length)); return a; };
    this.steps = grow(Float64Array, this.steps);
    this.min = grow(Float32Array, this.min);
    this.max = grow(Float32Array, this.max);
    this.mean = grow(Float32Array, this.mean);
    this.counts = grow(Float64Array, this.counts);
  }

  /** Appends a bucket. A bucket that does not begin after the newest bucket is a repetition and is ignored. */
  push(step, min, max, mean, count = 1) {
    if (step <= this.newestStep) return false;
    this.newestStep = step;
    this.newestValue = count === 1 ? mean : NaN;
    if (count > 1) this.exact = false;
    const last = this.length - 1;
    if (last >= 0 && this.counts[last] + count <= this.width && this.#mayMerge(this.mean[last], mean)) {
      this.#mergeInto(last, min, max, mean, count);
      return true;
    }
    if (this.length === this.steps.length) {
      if (this.length >= this.capacity) this.#halve();
      else this.#allocate(Math.min(this.capacity, this.length * 2));
    }
    this.#set(this.length++, step, min, max, mean, count);
    return true;
  }

  /** Whether two buckets may be merged: a gap (NaN) only with a gap, so gaps stay visible. */
  #mayMerge(a, b) { return Number.isNaN(a) === Number.isNaN(b); }

  #set(i, step, min, max, mean, count) {
    this.steps[i] = step;
    this.min[i] = min;
    this.max[i] = max;
    this.mean[i] = mean;
    this.counts[i] = count;
  }

  #mergeInto(i, min, max, mean, count) {
    const n = this.counts[i];
    this.min[i] = Math.min(this.min[i], min);
    this.max[i] = Math.max(this.max[i], max);
    this.mean[i] = (this.mean[i] * n + mean * count) / (n + count);
    this.counts[i] = n + count;
    this.exact = false;
  }

  /** Halves the number of buckets. */
  #halve() {
    let to = 0;
    for (let i = 0; i < this.length; i++, to++) {
      this.#set(to, this.steps[i], this.min[i], this.max[i], this.mean[i], this.counts[i]);
      const j = i + 1;
      if (j < this.length && this.#mayMerge(this.mean[i], this.mean[j])) {
        this.#mergeInto(to, this.min[j], this.max[j], this.mean[j], this.counts[j]);
        i++;
      }
    }
    // If no buckets could be merged, because every second point is a gap, the oldest half is dropped.
    if (to >= this.capacity) {
      for (const column of [this.steps, this.min, this.max, this.mean, this.counts]) column.copyWithin(0, to >> 1, to);
      to -= to >> 1;
    }
    this.length = to;
    this.width *= 2;
    this.exact = false;
  }

  /** Returns the index of the first bucket at or after `x`. `xs`: this segment's positions on the axis. */
  find(x, xs = this.steps) {
    let low = 0, high = this.length;
    while (low < high) {
      const mid = (low + high) >> 1;
      if (xs[mid] < x) low = mid + 1; else high = mid;
    }
    return low;
  }

  /** Returns the smoothed means of all buckets. */
  smooth(factor) { return smoothed(this, factor, (segment, i) => segment.mean[i]); }
}

/** Share of an average below which older points do not count. */
const NEGLIGIBLE = 1e-4;

/**
 * Returns `valueAt(segment, i)` of a segment's buckets, exponentially smoothed with bias correction. The average continues that of the
 * earlier attempts, up to the segment's first step. A gap in a segment does not change the average.
 */
export function smoothed(segment, factor, valueAt) {
  let sum = 0, weight = 0, share = 1, end = segment.steps[0];
  for (let before = segment.previous; before && share > NEGLIGIBLE; before = before.previous) {
    for (let i = before.find(end) - 1; i >= 0 && share > NEGLIGIBLE; i--) {
      if (!Number.isFinite(before.mean[i])) continue;
      const keep = factor ** before.counts[i];
      sum += share * (1 - keep) * valueAt(before, i);
      weight += share * (1 - keep);
      share *= keep;
    }
    if (before.length) end = Math.min(end, before.steps[0]);
  }
  return segment.mean.subarray(0, segment.length).map((v, i) => {
    if (!Number.isFinite(v)) return NaN;
    const keep = factor ** segment.counts[i];
    sum = sum * keep + valueAt(segment, i) * (1 - keep);
    weight = weight * keep + (1 - keep);
    return sum / weight;
  });
}

export class Series {
  /** `capacity`: maximum number of buckets per attempt. */
  constructor(name, rank, capacity = 16384) {
    this.name = name;
    this.rank = rank;
    this.capacity = capacity;
    this.segments = [];
  }

  segment(attempt) {
    let segment = this.segments.findLast((s) => s.attempt === attempt);
    if (!segment) {
      segment = new Segment(attempt, this.capacity);
      this.segments.push(segment);
      this.segments.sort((a, b) => a.attempt - b.attempt).forEach((s, i, all) => { s.previous = all[i - 1] ?? null; });
    }
    return segment;
  }

  /** Appends raw points from the stream. null means that a value was not finite, and becomes a gap. */
  append(attempt, steps, values) {
    const segment = this.segment(attempt);
    let added = 0;
    for (let i = 0; i < steps.length; i++) {
      const v = values[i] ?? NaN;
      if (segment.push(steps[i], v, v, v)) added++;
    }
    return added;
  }

  /** Loads buckets from `GET /metrics`, each named by its first step. `exact`: each bucket is one point. */
  load(attempt, { steps, min, max, mean }, exact, width) {
    const segment = this.segment(attempt);
    // Live points are gathered in buckets of the same width.
    if (!exact) Object.assign(segment, { exact, width: Math.max(segment.width, width) });
    for (let i = 0, count = 1; i < steps.length; i++) {
      const value = mean[i] ?? NaN;
      // The last bucket is assumed to be as wide as the bucket before it.
      if (!exact && i + 1 < steps.length) count = Math.min(width, steps[i + 1] - steps[i]);
      segment.push(steps[i], min?.[i] ?? value, max?.[i] ?? value, value, count);
    }
  }

  get exact() { return this.segments.every((s) => s.exact); }
  /** The segment of the newest attempt; undefined without a point. */
  get newestSegment() { return this.segments.at(-1); }

  /** Returns the mean over at least the newest `n` steps of the newest attempt, in whole buckets without gaps; NaN without a value. */
  recentMean(n) {
    const segment = this.newestSegment;
    if (!segment) return NaN;
    let sum = 0, count = 0;
    for (let i = segment.length - 1; i >= 0 && count < n; i--) {
      if (Number.isFinite(segment.mean[i])) { sum += segment.mean[i] * segment.counts[i]; count += segment.counts[i]; }
    }
    return count ? sum / count : NaN;
  }
}

/** The mean of one metric over ranks. A step counts when every rank of its attempt has reported a value. */
export class MeanSeries extends Series {
  #waiting = new Map();

  /** `rankCountOf(attempt)`: the number of ranks of an attempt, which may be fewer than the job's. */
  constructor(name, rankCountOf, capacity) {
    super(name, null, capacity);
    this.rankCountOf = rankCountOf;
  }

  /** Like `append`, for one rank's points. */
  appendRank(attempt, steps, values) {
    const rankCount = this.rankCountOf(attempt);
    for (let i = 0; i < steps.length; i++) {
      const key = `${attempt}:${steps[i]}`, v = values[i] ?? NaN;
      const sum = this.#waiting.get(key) ?? { n: 0, total: 0, min: Infinity, max: -Infinity };
      sum.n++;
      sum.total += v;
      sum.min = Math.min(sum.min, v);
      sum.max = Math.max(sum.max, v);
      if (sum.n < rankCount) { this.#waiting.set(key, sum); continue; }
      this.#waiting.delete(key);
      this.segment(attempt).push(steps[i], sum.min, sum.max, sum.total / sum.n);
    }
    // Limits memory if a dead rank never reports its steps. Steps still in progress are dropped, too.
    if (this.#waiting.size > 20_000) this.#waiting.clear();
  }

  /** Like `load`, for the buckets of all ranks of an attempt. Buckets of the same step are joined. */
  loadRanks(attempt, ranks, exact, width) {
    const rankCount = this.rankCountOf(attempt), joined = new Map();
    for (const { steps, min, max, mean } of ranks) {
      for (let i = 0; i < steps.length; i++) {
        // A mean, a minimum or a maximum that is not finite is null, and becomes a gap.
        const value = mean[i] ?? NaN, at = joined.get(steps[i]);
        const low = min?.[i] ?? value, high = max?.[i] ?? value;
        if (!at) joined.set(steps[i], { n: 1, sum: value, low, high });
        else { at.n++; at.sum += value; at.low = Math.min(at.low, low); at.high = Math.max(at.high, high); }
      }
    }
    const complete = [...joined].filter(([, b]) => b.n === rankCount).sort((a, b) => a[0] - b[0]);
    this.load(attempt, {
      steps: complete.map(([step]) => step), min: complete.map(([, b]) => b.low),
      max: complete.map(([, b]) => b.high), mean: complete.map(([, b]) => b.sum / b.n),
    }, exact, width);
    // The stream completes steps that only some ranks have reported.
    if (!exact) return;
    for (const { steps, mean } of ranks) {
      const firstMissing = steps.findIndex((step) => (joined.get(step)?.n ?? 0) < rankCount);
      if (firstMissing >= 0) this.appendRank(attempt, steps.slice(firstMissing), mean.slice(firstMissing));
    }
  }
}
