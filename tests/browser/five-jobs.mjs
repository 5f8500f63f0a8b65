// Five jobs for tests of the list: one job occupies the only slot, and four were cancelled while queued.

import { execFileSync } from "node:child_process";
import { join as path } from "node:path";
import { simulateAgent, spec } from "./agent.mjs";
import { until } from "./test-server.mjs";

/** Runs SQL on the server's database file while the server runs. */
export const sql = (server, text) => execFileSync("python3", ["-c", "import sqlite3, sys; db = sqlite3.connect(sys.argv[1], timeout=30); db.executescript('BEGIN;' + sys.argv[2] + ';COMMIT;')", path(server.dir, "lockstep.db"), text]);

/** Submits the jobs and returns the agent's page. */
export async function submitFiveJobs(server, browser) {
  const agent = await simulateAgent(browser.chromium, server, 1);
  // The job `holder` occupies the only slot, so the other jobs wait and are cancelled before they start.
  const holder = spec("holder", 1, 100);
  holder.train.lr = 0.1;
  await server.ask("/jobs", { ...holder, tags: ["held"] });
  const losses = { anna: 0.5, berta: 0.25, carl: 0.75, dora: null };
  for (const [i, [name, loss]] of Object.entries(losses).entries()) {
    const body = spec(name, 1, 100);
    body.train.lr = [0.1, 0.4, 0.2, 0.05][i];
    const { id } = await server.ask("/jobs", { ...body, project: i < 2 ? "vision" : "audio", tags: i === 1 ? ["warm up"] : [], notes: i === 2 ? "a needle in the notes" : "" });
    await server.ask(`/jobs/${id}/cancel`, {});
    await until("the job is cancelled", async () => (await server.job(id)).state === "cancelled");
    if (loss !== null) sql(server, `UPDATE jobs SET last = json_set(last, '$.loss', ${loss}) WHERE id = '${id}'`);
  }
  return agent;
}

export const jobNames = (page) => page.locator("#rows tr [data-f=name]").evaluateAll((links) => links.map((a) => a.title || a.textContent));
export const untilListed = (page, expected) => until(`the list is ${expected}`, async () => { const names = await jobNames(page); return names.join() === expected || Promise.reject(new Error(names.join())); }, 20_000);
export const queryOf = (page) => new URL(page.url()).searchParams;
export const columnHead = (page, name) => page.getByRole("columnheader", { name }).getByRole("button");
/** Cancels a job in any state and deletes it. */
export async function removeJob(server, id) {
  await server.ask(`/jobs/${id}/cancel`, {}).catch(() => {});
  await until("the job has ended", async () => (await server.job(id)).state === "cancelled");
  const response = await fetch(`${server.url}/api/v1/jobs/${id}`, { method: "DELETE" });
  if (response.status !== 204) throw new Error(`${id} is not deleted: ${response.status}`);
}
