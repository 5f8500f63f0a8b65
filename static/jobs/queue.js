// The places of waiting jobs in the queue, and their reasons for waiting. No stream reports places and reasons, because other
// jobs and machines change them without an event of the waiting job. So the page requests them while it shows a waiting job.

import { isWaiting } from "../job/states.js";
import { ask } from "../page.js";

const REQUEST_INTERVAL_MS = 5000;
/** Maximum number of jobs in a request. */
const MAX_JOBS = 1000;

/** Returns a priority above that of every waiting job, except other people's private jobs. The server refuses a priority above 1000. */
export async function frontPriority() {
  const { jobs } = await ask("/api/v1/queue?fields=priority");
  return Math.max(0, ...jobs.map(({ priority }) => priority)) + 1;
}

export class Queue {
  /** `jobs()`: jobs on the page. `onChange(job)`: called when a job's place or reason has changed. */
  constructor(jobs, onChange) {
    Object.assign(this, { jobs, onChange });
    setInterval(() => this.#ask().catch(() => {}), REQUEST_INTERVAL_MS);
  }

  /** Keeps the known place of a job when the stream, which has no places, reports the job. */
  keepPlace(known, job) { if (isWaiting(job) && !job.queue && known?.queue) job.queue = known.queue; }

  async #ask() {
    const here = new Map(this.jobs().filter(isWaiting).map((job) => [job.id, job]));
    if (!here.size || document.hidden) return;
    const { jobs } = await ask(`/api/v1/jobs?state=queued,restarting&sort=-priority&fields=id,state,reason,queue&limit=${MAX_JOBS}`);
    for (const { id, state, reason, queue } of jobs) {
      const job = here.get(id);
      // The stream may have reported another state in the meantime.
      if (!job || job.state !== state || (job.reason === reason && job.queue?.place === queue?.place)) continue;
      Object.assign(job, { reason, queue });
      this.onChange(job);
    }
  }
}
