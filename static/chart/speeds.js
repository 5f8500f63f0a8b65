// Converts step times to speeds. A bucket's speed is its pictures divided by its time, like the job's own speed
// (protocol/src/throughput.rs). The mean of the speeds of the bucket's steps would be higher.

import { smoothed } from "./series.js";

/** Returns a segment of step times as speeds. `picturesUntil(n)`: the number of pictures in steps 1 to n, over all ranks. */
function toSpeeds(segment, picturesUntil) {
  // Mean number of pictures in a step of a bucket: the last step of an epoch may have fewer pictures.
  const pictures = ({ steps, counts }, i) => (picturesUntil(steps[i] + counts[i] - 1) - picturesUntil(steps[i] - 1)) / counts[i];
  const own = segment.steps.subarray(0, segment.length).map((_, i) => pictures(segment, i));
  const column = (name) => segment[name].subarray(0, segment.length).map((ms, i) => own[i] * 1000 / ms);
  return Object.assign(Object.create(segment), {
    source: segment, // the segment of step times
    // The longest step time is the lowest speed.
    mean: column("mean"), min: column("max"), max: column("min"), newestValue: (picturesUntil(segment.newestStep) - picturesUntil(segment.newestStep - 1)) * 1000 / segment.newestValue,
    // The numbers of pictures are smoothed like step times, so that the last step of an epoch does not look too slow.
    smooth: (factor) => { const smoothPictures = smoothed(segment, factor, pictures); return segment.smooth(factor).map((ms, i) => smoothPictures[i] * 1000 / ms); },
  });
}

export class Speeds {
  /** `base`: a series of `step_ms`. `picturesUntil`: as for `toSpeeds`. `rank`, for `Chart.snapshot`, is null: speeds are of all ranks. */
  constructor(base, picturesUntil) { Object.assign(this, { base, picturesUntil, rank: null }); }

  get segments() { return this.base.segments.map((segment) => toSpeeds(segment, this.picturesUntil)); }

  /** Returns the speeds of `base`, a finer series of `step_ms` for the zoomed part. */
  withBase(base) { return new Speeds(base, this.picturesUntil); }
}
