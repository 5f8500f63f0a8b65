// A job's facts: the row of numbers, the line under the title, and the banner.

import { byId, make, announce, setText } from "../page.js";
import { bestWords } from "./checkpoints.js";
import { isResult, knownMetrics } from "./names.js";
import { writeSentence } from "../cut.js";
import { isActive, isFinal, stateWords, isWaiting } from "./states.js";
import { clock, count, percent, plural, rate, timeAndDay, uncertainty, value } from "../numbers.js";

/** Time without a new step after which the banner reports a running job (or the time of 20 steps, if longer). */
const NO_STEP_MS = 15_000;
/** Maximum number of results of a run from elsewhere in the row of numbers. */
const MAX_RESULTS = 4;
/** Time for which a refused action stays in the banner. */
const REFUSED_MS = 10_000;

/** Whether there is nothing to chart. The same as `is_bare` in web/src/job.rs. */
const isBare = (job, metrics) => !job.external && !job.step && !job.sparkline?.length && !metrics.series("loss").newestSegment && (isWaiting(job) || ["paused", "failed", "cancelled"].includes(job.state));

/** The same as `Job::rank_count_now` in protocol/src/job.rs. */
export const rankCountNow = (job) => (isActive(job.state) && job.cause?.code === "fewer_ranks" ? job.cause.ranks : job.ranks);

/** Whether `rankCountNow` is exact for an active job: a job without a cause has all ranks, and the cause `fewer_ranks` has their number. */
export const isRankCountKnown = (job) => !job.cause || job.cause.code === "fewer_ranks";

/**
 * Returns a function that returns the number of pictures in steps 1 to `n`, over all ranks; NaN if the job has no `batch`. The same as
 * `pictures_until` in protocol/src/throughput.rs.
 */
export function picturesUntil({ batch }) {
  const { global_batch_size: globalBatch, epoch_samples: epochPictures } = batch ?? {};
  if (!epochPictures || !globalBatch) return (n) => n * globalBatch;
  // The last step of an epoch has the remaining pictures.
  const steps = Math.ceil(epochPictures / globalBatch);
  return (n) => Math.floor(n / steps) * epochPictures + (n % steps) * globalBatch;
}

export class Facts {
  /** Time at which the newest step was received. */
  #lastStepAt = Date.now();
  #step = 0;
  /** Whether the page has all events of the job. */
  isLive = false;
  /** The job's place in the queue and its reason for waiting, `{ place, reason }`; null if the job does not wait. */
  queue = null;
  /** The reason why the last action was refused, and the job's state at that time; null after a while. */
  #refusal = null;
  #refusalTimer = 0;
  /** The banner of a job that this version of the server cannot read, as rendered. */
  #unreadable = { tone: "warn", what: byId("banner-what").textContent, why: byId("banner-why").title || byId("banner-why").textContent };

  constructor(job, metrics, ranks, checkpoints) {
    Object.assign(this, { job, metrics, ranks, checkpoints });
    this.#step = job.step;
    this.queue = job.queue ?? null;
  }

  draw(now = Date.now()) {
    const { job, metrics } = this, total = job.total_steps;
    const loss = metrics.mean("loss").newestSegment;
    const newest = metrics.series("loss").newestSegment;
    // A new attempt returns to its checkpoint, so the job's own step is used. Points in buckets are named by their first step, so the
    // server's step may be ahead.
    const reported = newest && !job.external && newest.attempt >= job.attempt ? newest.newestStep : job.step;
    const step = newest?.exact ? reported : Math.max(reported, job.step);
    if (step !== this.#step) { this.#step = step; this.#lastStepAt = now; }
    const epochs = Math.ceil(total / (job.steps_per_epoch || 1));
    const epoch = job.steps_per_epoch ? Math.min(epochs, Math.floor(Math.max(0, step - 1) / job.steps_per_epoch) + 1) : job.epoch;
    const isOver = isFinal(job.state);

    setFact("epoch", total ? count(epoch) : "–", total ? `of ${count(epochs)}` : "");
    setFact("step", total || job.external ? count(step) : "–", total ? `of ${count(total)}` : "");
    const bar = byId("progress");
    bar.max = total || 1;
    bar.value = Math.min(step, total);
    bar.dataset.state = job.state;

    const secs = isOver ? job.ran_secs : job.state === "running" ? job.eta_secs : null;
    setText(byId("left").closest("div").querySelector("dt"), isOver ? "Ran for" : "Left");
    setFact("left", secs == null ? "–" : clock(secs), !isOver && secs > 60 ? `until ${timeAndDay(now + 1000 * secs, 5, now)}` : "");
    const speed = job.images_per_second;
    setFact("speed", speed ? rate(speed) : "–", speed && this.#rankCount > 1 ? `${rate(speed / this.#rankCount)} per rank` : "");
    const newestLoss = loss?.attempt >= job.attempt && Number.isFinite(loss.newestValue) ? loss.newestValue : job.last.loss;
    setFact("loss", newestLoss == null ? "–" : value(newestLoss), newestLoss == null ? "" : "newest step");
    byId("loss").title = newestLoss == null ? "" : String(newestLoss);

    const accuracy = newestFinite(metrics.series("val_accuracy")) ?? job.last.val_accuracy, { best } = job;
    setFact("accuracy", accuracy == null ? "–" : percent(accuracy) + uncertainty(accuracy, job.last.val_pictures), best ? bestWords(best, this.checkpoints.best) : "");
    // If the best epoch has no checkpoint, the best checkpoint is from another epoch.
    const isBestMissing = best && this.checkpoints.size > 0 && !this.checkpoints.has(best.step);
    byId("best-note").hidden = !isBestMissing;
    setText(byId("best-note"), isBestMissing ? `Epoch ${best.epoch} was the best with ${percent(best.value)}, but this epoch has no checkpoint.` : "");
    if (job.external) this.#drawExternalResults();
    // A single rank does not wait for other ranks.
    byId("wait").closest("div").hidden = this.#rankCount === 1;
    const wait = this.ranks.waitShare();
    const { train, parallel } = job.spec, stages = parallel.pipeline ?? 1;
    setFact("wait", Number.isFinite(wait) ? percent(wait) : "–", stages > 1 ? `bubble ${percent((stages - 1) / (train.accumulate + stages - 1))}` : "");

    const cards = byId("cards");
    cards.classList.toggle("bare", isBare(job, metrics));
    cards.dataset.state = job.state;

    const share = total ? Math.floor(100 * step / total) : 0;
    document.title = `${isOver || !total ? job.state : `${share} %`} · ${job.name} · Lockstep`;
    this.#drawBanner(now, step);
  }

  /** Replaces the results of a run from elsewhere in the row of numbers. */
  #drawExternalResults() {
    const row = byId("facts");
    // Such a run has no estimate of the time that is left.
    byId("left").closest("div").hidden = !isFinal(this.job.state) || this.job.ran_secs == null;
    for (const node of row.querySelectorAll(".own-result")) node.remove();
    row.append(...externalResults(this.job, this.metrics).map(([name, v]) => make("div", { className: "own-result" }, make("dt", { textContent: name }), make("dd", { textContent: formatResult(name, v) }))));
  }

  drawTitle() {
    const { job } = this;
    const state = byId("state");
    setText(state, stateWords(job));
    state.dataset.state = job.state;
    byId("no-checkpoints").classList.toggle("over", isFinal(job.state));
    const where = job.agents.length ? ` on ${job.agents.join(", ")}` : "";
    if (!job.external) setText(byId("about"), [job.attempt ? `attempt ${job.attempt}` : "", `${this.#rankCount < job.ranks ? `${this.#rankCount} of ` : ""}${plural(job.ranks, "rank")}${where}`,
      `${job.spec.model.arch} on ${job.spec.data.dataset}`].filter(Boolean).join(" · "));
    setText(byId("project-name"), job.project);
    byId("project-name").setAttribute("href", `/jobs?project=${encodeURIComponent(job.project)}`);
    byId("job-tags").replaceChildren(...job.tags.map((tag) => make("a", { className: "tag", textContent: tag, href: `/jobs?tag=${encodeURIComponent(tag)}` })));
    if (job.started_at) {
      setText(byId("started"), ` · started ${timeAndDay(job.started_at)}`);
      byId("started").title = job.started_at;
    }
  }

  /** Shows that an action was refused, with the reason. null removes the message. */
  showRefusal(why) {
    clearTimeout(this.#refusalTimer);
    if (why === null && !this.#refusal) return;
    this.#refusal = why && { state: this.job.state, why };
    if (why) this.#refusalTimer = setTimeout(() => this.showRefusal(null), REFUSED_MS);
    this.draw();
  }

  /** The job's current number of ranks, as last known, because the job's present reason may not contain the number. */
  get #rankCount() {
    const { job } = this;
    return (isActive(job.state) && this.metrics.rankCountOf(job.attempt)) || rankCountNow(job);
  }

  #refusalBanner() {
    if (this.#refusal?.state !== this.job.state) return null;
    return { tone: "bad", what: "The action failed.", why: this.#refusal.why };
  }

  #drawBanner(now, step) {
    const content = this.#refusalBanner() ?? this.#findProblem(now, step), banner = byId("banner");
    banner.hidden = !content;
    if (!content) return announce(byId("banner-status"), "");
    const { tone, what, why, link = ["#panels", this.job.external ? "Details" : "Log"] } = content;
    banner.dataset.tone = tone;
    setText(byId("banner-what"), why && /^[a-z]/.test(why) ? what.replace(/\.$/, ":") : what);
    writeSentence(byId("banner-why"), why ?? "");
    announce(byId("banner-status"), `${what} ${why ?? ""}`.trim());
    const a = byId("banner-link");
    a.setAttribute("href", link[0]);
    setText(a, link[1]);
  }

  /**
   * Describes the job's place in the queue, and the current reason for waiting. The job's own `reason` may say why its last attempt ended.
   * The same as `waiting_banner` in web/src/job.rs.
   */
  #waitingBanner(reason) {
    const { queue, job } = this, current = queue?.reason?.words, isRestart = job.state === "restarting";
    if (!queue && !reason && !isRestart) return null;
    const why = current && reason && current !== reason && job.attempt ? `${current}. Before: ${reason}` : current ?? reason;
    return { tone: "warn", what: `${isRestart ? "Starting again" : "Waiting"}${queue ? `, number ${queue.place} in the queue` : ""}.`, why, link: ["/queue", "Queue"] };
  }

  #findProblem(now, step) {
    const { job, ranks } = this, reason = job.reason ?? "";
    if (job.unreadable) return this.#unreadable;
    switch (job.state) {
      case "failed": return { tone: "bad", what: "The job failed.", why: reason };
      case "lost": return { tone: "warn", what: "The job's machine is silent.", why: reason, link: ["/machines", "Machines"] };
      case "queued":
      case "restarting": return this.#waitingBanner(reason);
      case "running": break;
      case "succeeded": return job.cause?.code === "stopped_early" ? { tone: "warn", what: "Stopped early.", why: job.cause.detail, link: ["#cp-title", "Checkpoints"] } : null;
      case "cancelled": {
        const { newest } = this.checkpoints;
        return newest ? { tone: "warn", what: "Cancelled.", why: `Retry continues from step ${count(newest.step)}.`, link: ["#cp-title", "Checkpoints"] } : null;
      }
      case "paused": return { tone: "warn", what: reason ? `${reason[0].toUpperCase()}${reason.slice(1)}.` : "Paused.", why: reason ? "" : "The checkpoint is kept; Resume continues from it.", link: ["#cp-title", "Checkpoints"] };
      default: return null;
    }
    const stepMs = this.metrics.series("step_ms").recentMean(50) || 0;
    const quietMs = now - this.#lastStepAt;
    const isBusy = [...Array(this.#rankCount).keys()].some((r) => ["evaluating", "checkpointing", "starting"].includes(ranks.reportOf(r)?.status));
    if (this.isLive && !job.external && !isBusy && step < job.total_steps && quietMs > Math.max(NO_STEP_MS, 20 * stepMs)) {
      const reports = [...Array(this.#rankCount).keys()].map((r) => ({ rank: r, step: this.metrics.series("loss", r).newestSegment?.newestStep ?? 0 }));
      const behind = reports.reduce((a, b) => (b.step < a.step ? b : a));
      const hasOthersAhead = reports.some((r) => r.step > behind.step);
      return { tone: "warn", what: `${hasOthersAhead ? `Rank ${behind.rank} has not moved` : "No rank has moved"} for ${clock(quietMs / 1000)}.`,
        why: `${hasOthersAhead ? "The other ranks wait for this rank in all-reduce. Its" : "The"} last step is ${count(behind.step)}. After ${plural(job.spec.recovery.stall_timeout_secs, "second")} without progress the job starts again.`, link: ["#ranks-title", "Ranks"] };
    }
    const slow = ranks.findSlowRank();
    return slow && { tone: "warn", what: `Rank ${slow.rank} is ${percent(slow.share, 0)} slower since step ${count(slow.since)}.`, why: slow.cause, link: ["#ranks-title", "Ranks"] };
  }
}

/** Returns the newest finite value of a series; undefined if no point with such a value has been read. */
function newestFinite({ newestSegment, segments }) {
  if (Number.isFinite(newestSegment?.newestValue)) return newestSegment.newestValue;
  return segments.flatMap((segment) => [...segment.mean.subarray(0, segment.length)]).findLast(Number.isFinite);
}

/** Returns names and values of a run's results, in the order of `external_results` in web/src/job.rs. */
function externalResults({ external, last }, metrics) {
  const results = new Map(Object.entries(external.summary).filter(([, v]) => typeof v === "number"));
  for (const name of [...knownMetrics({ last }), ...metrics.reportedNames]) {
    if (!results.has(name)) results.set(name, newestFinite(metrics.series(name)) ?? last[name]);
  }
  const sortKey = ([name]) => (Object.hasOwn(external.summary, name) ? 0 : 2) + (isResult(name) ? 0 : 1);
  return [...results].filter(([name, v]) => !name.startsWith("_") && typeof v === "number").sort((a, b) => sortKey(a) - sortKey(b)).slice(0, MAX_RESULTS);
}

/** The same as `format_result` in web/src/job.rs. */
function formatResult(name, v) {
  if (["accuracy", "val_accuracy"].includes(name) && v >= 0 && v <= 1) return percent(v);
  return Number.isInteger(v) && v >= 0 && v < 1e15 ? count(v) : value(v);
}

function setFact(id, main, note) {
  setText(byId(id), main);
  setText(byId(`${id}-more`), note);
}
