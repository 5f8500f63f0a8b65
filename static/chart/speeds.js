// Step times as speeds. A bucket's speed is its pictures over its time, as the job's own is (protocol/src/throughput.rs): a mean
// of the speeds of its steps would be another, higher number.

function speeds(segment, pictures) {
  const speed = (ms) => pictures * 1000 / ms, column = (name) => segment[name].subarray(0, segment.length).map(speed);
  return Object.assign(Object.create(segment), {
    of: segment,
    mean: column("mean"), min: column("max"), max: column("min"), lastValue: speed(segment.lastValue), smooth: (factor) => segment.smooth(factor).map(speed),
  });
}

export class Speeds {
  /** `base`: a series of `step_ms`. `pictures`: of one step, over all ranks. */
  constructor(base, pictures) { Object.assign(this, { base, pictures, rank: null }); }

  get segments() { return this.base.segments.map((segment) => speeds(segment, this.pictures)); }

  /** The same of another part of the run. */
  over(base) { return new Speeds(base, this.pictures); }
}
