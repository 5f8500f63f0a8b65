// Where waiting jobs stand and what they wait for just now. No stream tells: how many slots are free is no event of a job, so it is
// asked again while one that waits is on the page.

import { ask } from "../page.js";

const EVERY_MS = 5000, MOST = 1000;
export const waits = (job) => ["queued", "restarting"].includes(job.state);

export class Queue {
  /** `jobs()`: those on the page. `changed(job)`: one stands elsewhere now, or waits for something else. */
  constructor(jobs, changed) {
    Object.assign(this, { jobs, changed });
    setInterval(() => this.#ask().catch(() => {}), EVERY_MS);
  }

  /** What is known of a job goes over to what the stream says of it. */
  keep(known, job) { if (waits(job) && !job.queue && known?.queue) job.queue = known.queue; }

  async #ask() {
    const here = new Map(this.jobs().filter(waits).map((job) => [job.id, job]));
    if (!here.size || document.hidden) return;
    const { jobs } = await ask(`/api/v1/jobs?state=queued,restarting&sort=-priority&fields=id,state,reason,queue&limit=${MOST}`);
    for (const { id, state, reason, queue } of jobs) {
      const job = here.get(id);
      // The stream may have told of another state meanwhile.
      if (!job || job.state !== state || (job.reason === reason && job.queue?.place === queue?.place)) continue;
      Object.assign(job, { reason, queue });
      this.changed(job);
    }
  }
}
