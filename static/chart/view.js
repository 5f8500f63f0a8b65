// State that the charts of a page share: the horizontal axis (step, epoch or training time), the zoomed part, and the
// crosshair's position. Charts redraw when this state changes.

/** Returns the name of the horizontal axis, with its unit. */
export const axisName = (axis) => ({ epoch: "epoch", time: "training time (hours:minutes:seconds)" }[axis] ?? "optimizer step");

export class View extends EventTarget {
  /** The kind of axis: `step`, `epoch` or `time`. */
  axis = "step";
  /** The zoomed part [from, to] in the axis's unit (steps for `step` and `epoch`, seconds for `time`), or null. */
  zoom = null;
  /** The crosshair's position in the same unit, or null. */
  cursor = null;
  stepsPerEpoch = 0;

  /** `clock()`: rank 0's series of `step_ms`, whose sum is the training time. */
  constructor(clock) {
    super();
    this.clock = clock;
  }

  setAxis(axis) {
    // The unit is seconds for `time` and steps for the other kinds.
    const isSameUnit = (this.axis === "time") === (axis === "time");
    this.axis = axis;
    if (!isSameUnit) { this.zoom = null; this.cursor = null; }
    this.dispatchEvent(new Event("zoom"));
  }

  setZoom(zoom) {
    this.zoom = zoom;
    this.dispatchEvent(new Event("zoom"));
  }

  setCursor(cursor) {
    if (cursor === this.cursor) return;
    this.cursor = cursor;
    this.dispatchEvent(new Event("cursor"));
  }

  /** Returns the positions of a segment's buckets on the axis: of the first step of each bucket. */
  positions(segment) {
    return this.axis === "time" ? times(segment, this.clock()) : segment.steps;
  }

  /** Returns the step at a position on the axis, as exactly as the clock allows. */
  stepAt(x) {
    if (this.axis !== "time") return x;
    let at = 0, step = 0;
    for (const c of this.clock().segments) {
      for (let i = 0; i < c.length; i++) {
        const secs = stepCount(c, i) * (c.mean[i] || 0) / 1000;
        step = c.steps[i] - 1;
        if (at + secs >= x) return step + (secs ? (x - at) / secs * stepCount(c, i) : 0);
        at += secs;
        step += stepCount(c, i);
      }
    }
    return step;
  }
}

/** Returns the number of steps from a bucket's first step to the first step of the next bucket. */
const stepCount = ({ length, steps, counts }, i) => i + 1 < length ? steps[i + 1] - steps[i] : counts[i];

/**
 * Returns the seconds of training up to the end of each bucket's first step: the sum of `step_ms`, including earlier attempts. `clock`:
 * rank 0's series of `step_ms`.
 */
export function times(segment, clock) {
  const out = new Float64Array(segment.length);
  let start = 0;
  for (const c of clock.segments) {
    if (c.attempt < segment.attempt) { start += trainingSecs(c); continue; }
    if (c.attempt > segment.attempt) break;
    // `at`: seconds up to the end of `step`, the last step before the clock's bucket. `pace`: the bucket's milliseconds per step.
    let i = 0, at = start, step = c.length ? c.steps[0] - 1 : 0, pace = 0;
    for (let k = 0; k < segment.length; k++) {
      while (i < c.length && c.steps[i] <= segment.steps[k]) {
        at += (c.steps[i] - 1 - step) * pace / 1000;
        if (Number.isFinite(c.mean[i])) pace = c.mean[i];
        step = c.steps[i++] - 1;
      }
      out[k] = at + Math.max(0, segment.steps[k] - step) * pace / 1000;
    }
    return out;
  }
  return out.fill(start);
}

/** Returns the seconds of training in a segment of `step_ms`. */
function trainingSecs(segment) {
  let secs = 0;
  for (let i = 0; i < segment.length; i++) secs += stepCount(segment, i) * (segment.mean[i] || 0) / 1000;
  return secs;
}
