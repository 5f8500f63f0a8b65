// Scales and their ticks. A scale maps data to pixels; ticks are round numbers inside its domain.

/** Returns about `wanted` round numbers within [low, high], which are 1, 2 or 5 times a power of ten apart. */
export function linearTicks(low, high, wanted) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5].find((m) => m * power >= rough * 0.999) ?? 10);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) {
    ticks.push(Number((i * step).toPrecision(12)));
  }
  return ticks;
}

/** Returns powers of ten, with their doubles and fives if they fit; within one decade, round numbers. */
export function logTicks(low, high, wanted) {
  const decades = Math.log10(high / low);
  if (decades < 1) return linearTicks(low, high, wanted).filter((v) => v > 0);
  const factors = decades * 3 <= wanted * 1.5 ? [1, 2, 5] : [1];
  const stride = Math.max(1, Math.ceil(decades / wanted));
  const ticks = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) {
    if (e % stride) continue;
    for (const f of factors) {
      const v = f * 10 ** e;
      if (v >= low * 0.9999 && v <= high * 1.0001) ticks.push(v);
    }
  }
  return ticks;
}

const CLOCK_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];

/** Returns round durations in seconds. */
export function clockTicks(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted);
  if (rough < 1) return linearTicks(low, high, wanted);
  const step = CLOCK_STEPS.find((s) => s >= rough * 0.999) ?? 86400 * Math.ceil(rough / 86400);
  const ticks = [];
  for (let t = Math.ceil(low / step) * step; t <= high; t += step) ticks.push(t);
  return ticks;
}

/** Returns a linear scale. `to(v)` returns pixels, and `from(p)` is its inverse. */
export function linear([low, high], [start, end]) {
  const k = (end - start) / (high - low || 1);
  return { kind: "linear", low, high, to: (v) => start + (v - low) * k, from: (p) => low + (p - start) / k };
}

/** Returns a logarithmic scale. Values at or below zero have no position (NaN). */
export function log([low, high], [start, end]) {
  const base = Math.log(low);
  const k = (end - start) / (Math.log(high) - base || 1);
  return {
    kind: "log", low, high,
    to: (v) => (v > 0 ? start + (Math.log(v) - base) * k : NaN),
    from: (p) => Math.exp(base + (p - start) / k),
  };
}

/** Extends [low, high] to round numbers, so that the axis does not change with every new point. */
export function niceDomain(low, high, kind, wanted = 5) {
  if (!(low <= high)) return kind === "log" ? [0.1, 1] : [0, 1];
  if (kind === "log") {
    if (low === high) return [low / 2, high * 2];
    const pad = Math.max(1.02, (high / low) ** 0.03);
    return [low / pad, high * pad];
  }
  if (low === high) {
    const half = Math.abs(low) * 0.1 || 0.5;
    [low, high] = [low - half, high + half];
  }
  const ticks = linearTicks(low, high, wanted);
  const step = ticks.length > 1 ? ticks[1] - ticks[0] : high - low;
  const snap = (v, round) => Number((round(v / step) * step).toPrecision(12));
  return [snap(low + step * 1e-6, Math.floor), snap(high - step * 1e-6, Math.ceil)];
}
