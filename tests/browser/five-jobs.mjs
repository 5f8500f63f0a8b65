// Five jobs for tests of the list: one job occupies the only slot, and four were cancelled while queued.

import { execFileSync } from "node:child_process";
import { join } from "node:path";
import { simulateAgent, spec } from "./agent.mjs";
import { until } from "./test-server.mjs";

/** Runs SQL on the server's database file while the server runs. */
export const sql = (server, text) => execFileSync("python3", ["-c", "import sqlite3, sys; db = sqlite3.connect(sys.argv[1], timeout=30); db.executescript('BEGIN;' + sys.argv[2] + ';COMMIT;')", join(server.dir, "lockstep.db"), text]);

/** Submits the jobs and returns the agent's page. */
export async function submitFiveJobs(server, browser) {
  const agent = await simulateAgent(browser.chromium, server, 1);
  const holder = spec("holder", 1, 100);
  holder.train.lr = 0.1;
  await server.ask("/jobs", { ...holder, tags: ["held"] });
  for (const { lr, loss, ...job } of [
    { name: "anna", lr: 0.1, loss: 0.5, project: "vision" },
    { name: "berta", lr: 0.4, loss: 0.25, project: "vision", tags: ["warm up"] },
    { name: "carl", lr: 0.2, loss: 0.75, project: "audio", notes: "a needle in the notes" },
    { name: "dora", lr: 0.05, loss: null, project: "audio" },
  ]) {
    const body = spec(job.name, 1, 100);
    body.train.lr = lr;
    const { id } = await server.ask("/jobs", { ...body, ...job });
    await server.ask(`/jobs/${id}/cancel`, {});
    await until("the job is cancelled", async () => (await server.job(id)).state === "cancelled");
    if (loss !== null) sql(server, `UPDATE jobs SET last = json_set(last, '$.loss', ${loss}) WHERE id = '${id}'`);
  }
  return agent;
}

export const jobNames = (page) => page.locator("#rows tr [data-f=name]").evaluateAll((links) => links.map((a) => a.title || a.textContent));
export const untilListed = (page, expected) => until(`the list is ${expected}`, async () => { const names = await jobNames(page); return names.join() === expected || Promise.reject(new Error(names.join())); });
export const queryOf = (page) => new URL(page.url()).searchParams;
export const columnHead = (page, name) => page.getByRole("columnheader", { name }).getByRole("button");
/** Deletes a job, after its cancellation if it has not ended. */
export async function removeJob(server, id) {
  await server.ask(`/jobs/${id}/cancel`, {}).catch(() => {});
  await until("the job has ended", async () => (await server.job(id)).state === "cancelled");
  await server.ask(`/jobs/${id}`, undefined, "DELETE");
}
