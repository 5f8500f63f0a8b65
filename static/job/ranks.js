// The list of ranks. Each rank has a lane, which shows how its steps divide into computing, waiting and data, and the rank's last report.
// A click on a rank's name emphasises the rank's line in the loss chart.

import { readUrl, writeUrl } from "../address.js";
import { byId, make, setNote, setText } from "../page.js";
import { count, millis, percent } from "../numbers.js";
import { RANK_COLOURS } from "../chart/palette.js";
import { describePosition } from "./mesh.js";
import { metricInfo } from "./names.js";
import { isFinal } from "./states.js";

/** Number of the newest steps over which times are averaged. */
const WINDOW = 50;
/** Factor by which a rank must be slower than the median of the other ranks to be reported in the banner. */
const SLOW_FACTOR = 1.2;
/** Fraction of a step's time. If ranks wait for pictures for a larger fraction, the list says that data loading limits the speed. */
const MAX_DATA_SHARE = 0.2;

export const colourOf = (rank) => `rank-${rank % RANK_COLOURS}`;

export class Ranks {
  /** By rank: the row, the newest report, the agent's name, and for a slow rank, the step since which it has been slow. */
  #rows = new Map();
  #reports = new Map();
  #agents = new Map();
  #slowSince = new Map();
  /** The plan that the ranks have chosen; null if the job's settings are the plan. */
  plan = null;
  /** Ranks whose lines are emphasised in the chart of the loss. */
  chosen = new Set(readUrl("ranks").split(",").filter(Boolean).map(Number));
  /** For each rank, the start of the checkpoint that it is writing (`since`; 0 if none), and the intervals of its recent writes (`spans`). */
  #writing = new Map();

  constructor(metrics, onChoose) {
    this.metrics = metrics;
    this.onChoose = onChoose;
    this.list = byId("ranks");
  }

  /** Sets a rank's agent, and its report if there is one. */
  setAgent({ rank, agent, report }) {
    this.#agents.set(rank, agent);
    if (report) this.#reports.set(rank, report);
  }

  setReport(event) {
    this.#reports.set(event.rank, event);
    const known = this.#writing.get(event.rank) ?? { since: 0, spans: [] }, at = Date.parse(event.at);
    if (event.status === "checkpointing") known.since ||= at;
    else if (known.since) { known.spans.push([known.since, at]); known.since = 0; if (known.spans.length > 20) known.spans.shift(); }
    this.#writing.set(event.rank, known);
  }

  /** Returns the milliseconds in which a rank wrote checkpoints, of the last `windowMs` milliseconds. */
  #checkpointMs(rank, windowMs) {
    const known = this.#writing.get(rank), last = Date.parse(this.#reports.get(rank)?.at);
    if (!known || !Number.isFinite(last)) return 0;
    const spans = known.since ? [...known.spans, [known.since, last]] : known.spans;
    return spans.reduce((sum, [a, b]) => sum + Math.max(0, b - Math.max(a, last - windowMs)), 0);
  }

  reportOf(rank) { return this.#reports.get(rank); }

  /** Removes the reports and machines of an old attempt's ranks. */
  forget() { this.#reports.clear(); this.#slowSince.clear(); this.#agents.clear(); }

  /** Returns the mean of the newest `n` values in the newest attempt; NaN if the rank has no values in that attempt. */
  #recent(name, rank, n = WINDOW) {
    const series = this.metrics.series(name, rank);
    return series.newestSegment?.attempt === this.metrics.attempt ? series.recentMean(n) : NaN;
  }

  /** Whether a rank belongs to this attempt, which may have fewer ranks than the job. */
  #takesPart(rank, attempt) {
    const rankCount = this.metrics.rankCountOf(attempt);
    if (rankCount !== undefined) return rank < rankCount;
    // If the attempt ended before the page was opened, the rank's points decide.
    const newest = this.metrics.series("step_ms", rank).newestSegment;
    return !newest || newest.attempt === this.metrics.attempt || Boolean(this.#reports.get(rank) || this.#agents.get(rank));
  }

  /** Returns the milliseconds of a step and of its parts, as the mean over a rank's newest steps. */
  #stepTimes(rank) {
    const step = this.#recent("step_ms", rank);
    const wait = this.#recent("all_reduce_ms", rank) || 0;
    const data = this.#recent("data_ms", rank) || 0;
    const checkpoint = step ? Math.min(step * 2, this.#checkpointMs(rank, Math.max(5000, step * WINDOW)) / WINDOW) : 0;
    return { step, wait, data, checkpoint, compute: Math.max(0, step - wait - data) };
  }

  /** Returns the fraction of a step that is spent waiting for other ranks; NaN before the first step. */
  waitShare() {
    let step = 0, wait = 0;
    for (let r = 0; r < this.metrics.rankCount; r++) {
      const s = this.#stepTimes(r);
      if (Number.isFinite(s.step)) { step += s.step; wait += s.wait; }
    }
    return step ? wait / step : NaN;
  }

  /** Whether all ranks compute on the CPU cores of one machine, which makes their times depend on each other. */
  #shareCores() {
    const reports = [...this.#reports.values()], agents = new Set(this.#agents.values());
    return reports.length > 1 && reports.every(({ device }) => device.startsWith("CPU")) && agents.size === 1 && !agents.has("");
  }

  /** Describes what limits the job's speed. Empty as long as there are too few steps. */
  #describeLimit(times) {
    const known = times.map((s, rank) => ({ rank, ...s })).filter((s) => s.step > 0 && this.metrics.series("step_ms", s.rank).newestSegment?.newestStep >= WINDOW);
    if (!known.length) return "";
    // All ranks wait for the rank whose pictures arrive last.
    const dataShare = Math.max(...known.map((s) => s.data / s.step));
    // A rank waits for slower ranks and for the transfer of gradients. The slowest rank waits only for the transfer.
    const slowest = known.reduce((a, b) => (b.wait / b.step < a.wait / a.step ? b : a)), transferShare = slowest.wait / slowest.step;
    const cores = this.#shareCores() ? " · limited by the machine's CPU cores, which the ranks share: fewer ranks may be as fast" : "";
    if (slowest.wait > slowest.compute && transferShare > dataShare) return cores || ` · limited by communication (all-reduce takes ${percent(transferShare, 0)} of a step)`;
    if (dataShare > MAX_DATA_SHARE) return ` · limited by data loading (${percent(dataShare, 0)} of a step)`;
    if (known.length > 1 && known.every((s) => s === slowest || s.wait > s.compute)) return cores || ` · limited by rank ${slowest.rank}: the others wait for it`;
    return " · limited by computing";
  }

  /** Returns the rank that delays the other ranks, `{ rank, share, since, cause }`; null if no rank does. */
  findSlowRank() {
    const times = Array.from({ length: this.metrics.rankCount }, (_, r) => ({ rank: r, ...this.#stepTimes(r) }))
      .filter((s) => Number.isFinite(s.step));
    if (times.length < 2 || this.#shareCores()) return null;
    let worst = null;
    for (const s of times) {
      const segment = this.metrics.series("step_ms", s.rank).newestSegment;
      const others = times.filter((o) => o !== s);
      const own = s.compute + s.data, othersMedian = median(others.map((o) => o.compute + o.data));
      const slow = segment.newestStep >= WINDOW && own > othersMedian * SLOW_FACTOR && own - othersMedian > 1;
      if (!slow) { this.#slowSince.delete(s.rank); continue; }
      // Earlier points may arrive after newer points.
      this.#slowSince.set(s.rank, Math.min(this.#slowSince.get(s.rank) ?? Infinity, this.#findSlowStart(s.rank, others.map((o) => o.rank))));
      const share = own / othersMedian - 1;
      if (worst && worst.share > share) continue;
      const data = median(others.map((o) => o.data));
      const cause = s.data - data > (own - othersMedian) / 2
        ? `The rank waits for data for ${millis(s.data)} a step, the other ranks for ${millis(data)}.`
        : `The rank computes for ${millis(s.compute)} a step, the other ranks for ${millis(median(others.map((o) => o.compute)))}: check the rank's machine for other load.`;
      worst = { rank: s.rank, share, since: this.#slowSince.get(s.rank), cause };
    }
    return worst;
  }

  /**
   * Returns the step since which a rank has been slower than the other ranks, as far back as the page's points reach. Metrics may have buckets of
   * different widths, so each step is looked up in each metric.
   */
  #findSlowStart(rank, others) {
    // The bucket that contains a step is the last that begins at or before the step.
    const at = (name, r, step) => { const segment = this.metrics.series(name, r).newestSegment; return segment ? segment.mean[Math.max(0, segment.find(step + 1) - 1)] : NaN; };
    const own = (r, step) => at("step_ms", r, step) - (at("all_reduce_ms", r, step) || 0);
    const all = ["step_ms", "all_reduce_ms"].map((name) => this.metrics.series(name, rank).newestSegment).filter(Boolean);
    const { steps, length, newestStep } = all.reduce((a, b) => (b.length > a.length ? b : a));
    // Goes back in blocks of ten buckets, until the rank was not slower in more than three blocks in a row.
    const BLOCK = 10;
    let since = newestStep, misses = 0;
    for (let end = length; end > 0; end -= BLOCK) {
      const block = steps.slice(Math.max(0, end - BLOCK), end);
      const mean = (r) => block.reduce((sum, step) => sum + own(r, step), 0) / block.length;
      if (mean(rank) > median(others.map(mean)) * SLOW_FACTOR) { since = block[0]; misses = 0; }
      else if (++misses > 3) break;
    }
    return since;
  }

  /** Describes a rank's status, or how the rank ended. `status`: from the rank's last report. `cause` may name the rank that failed first. */
  #describeStatus(rank, status, isLive, cause) {
    if (isLive) return status;
    const first = this.metrics.rankCount > 1 ? cause?.rank : null;
    if (first === rank) return "ended first";
    if (Number.isInteger(first)) return "ended with the others";
    return status === "failed" || status === "finished" ? status : "ended";
  }

  /** Describes each axis of a mesh with several ranks: the fraction of a step that the rank spends in exchanges along the axis. */
  #describeAxes(rank, { pipeline = 1, height = 1, model = 1 }) {
    const { axis_ms: spent, step_ms: step } = this.#reports.get(rank) ?? {};
    if (!spent || !step) return [];
    const data = Math.floor(this.metrics.rankCount / (pipeline * height * model));
    return Object.entries({ pipeline, data, height, model }).filter(([, size]) => size > 1).map(([axis]) => `${axis} ${percent(spent[axis] / step, 0)}`);
  }

  draw({ state, cause, attempt, spec: { parallel } }) {
    const isLive = !isFinal(state), times = Array.from({ length: this.metrics.rankCount }, (_, r) => this.#stepTimes(r));
    const longest = Math.max(...times.map((s) => s.step + s.checkpoint).filter(Number.isFinite), 0);
    setNote(byId("ranks-note"), `last ${WINDOW} steps${this.#describeLimit(times)}`);
    for (let r = 0; r < times.length; r++) {
      const row = this.#rows.get(r) ?? this.#createRow(r), s = times[r], hasTimes = Number.isFinite(s.step) && longest > 0;
      for (const [part, ms] of [["compute", s.compute], ["wait", s.wait], ["data", s.data], ["checkpoint", s.checkpoint]]) {
        row[part].style.width = hasTimes ? `${(100 * ms / longest).toFixed(2)}%` : "0";
      }
      row.item.hidden = !this.#takesPart(r, attempt);
      setText(row.ms, hasTimes ? millis(s.step) : "–");
      const axes = this.#describeAxes(r, this.plan ?? parallel);
      row.line.classList.toggle("with-axes", axes.length > 0);
      if (row.axes.dataset.key !== axes.join()) {
        row.axes.dataset.key = axes.join();
        row.axes.replaceChildren(...axes.map((textContent) => make("span", { textContent })));
      }
      row.lane.title = hasTimes
        ? `compute ${millis(s.compute)}, all-reduce ${millis(s.wait)}, data ${millis(s.data)}${s.checkpoint ? `, checkpoint ${millis(s.checkpoint)}` : ""}, idle ${millis(longest - s.step - s.checkpoint)}`
        : "no step yet";
      row.lane.setAttribute("aria-label", row.lane.title);
      const report = this.#reports.get(r), about = [];
      if (report) {
        const step = Math.max(report.step, this.metrics.series("loss", r).newestSegment?.newestStep ?? 0);
        about.push(report.device, this.#describeStatus(r, report.status, isLive, cause), `step ${count(step)}`);
      } else about.push(isLive ? "no report yet" : "no report kept");
      if (this.#agents.get(r)) about.push(this.#agents.get(r));
      if (this.plan || parallel.mode === "hybrid") about.push(...describePosition(r, this.plan ?? parallel, this.metrics.rankCount));
      about.push(...this.#describeGpu(r));
      const key = about.join("\n");
      if (row.key !== key) {
        row.key = key;
        row.about.replaceChildren(...about.map((textContent) => make("span", { textContent })));
        if (report) row.about.title = `process ${report.pid}`;
      }
    }
  }

  /** Describes utilisation, memory, temperature and power, if the rank's device reports them. */
  #describeGpu(rank) {
    const names = ["gpu_utilization", "gpu_memory_bytes", "gpu_temperature_celsius", "gpu_power_watts"];
    return names.map((name) => [name, this.#recent(name, rank, 1)]).filter(([, v]) => Number.isFinite(v)).map(([name, v]) => metricInfo(name).format(v));
  }

  #createRow(rank) {
    const part = (className, tag = "span") => make(tag, { className }), swatch = make("i");
    swatch.style.backgroundColor = `var(--${colourOf(rank)})`;
    const name = make("button", { type: "button", className: "rank-name", title: "Bring this rank's line forward", "aria-pressed": String(this.chosen.has(rank)) }, swatch, `rank ${rank}`);
    name.addEventListener("click", () => {
      if (!this.chosen.delete(rank)) this.chosen.add(rank);
      name.setAttribute("aria-pressed", String(this.chosen.has(rank)));
      writeUrl({ ranks: [...this.chosen].sort((a, b) => a - b).join(",") });
      this.onChoose();
    });
    const compute = part("k-compute"), wait = part("k-wait"), data = part("k-data"), checkpoint = part("k-checkpoint");
    const lane = make("div", { className: "lane", role: "img" }, compute, wait, data, checkpoint);
    const ms = part("num"), axes = make("div", { className: "rank-axes", title: "Share of a step in exchanges along each axis of the mesh, including waits for other ranks" });
    const line = make("div", { className: "rank-line" }, name, lane, ms, axes), about = part("rank-about", "div"), item = make("li", { "data-rank": rank }, line, about);
    const row = { item, lane, compute, wait, data, checkpoint, line, ms, axes, about, key: "" };
    this.#rows.set(rank, row);
    this.list.append(item);
    return row;
  }
}

function median(values) {
  const sorted = values.toSorted((a, b) => a - b), half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}
