// Five jobs that tests of the list look at: one that holds the only slot, and four that were cancelled before they had begun.

import { execFileSync } from "node:child_process";
import { join as path } from "node:path";
import { join, spec } from "./agent.mjs";
import { until } from "./test-server.mjs";

/** Runs SQL on the server's own file, next to the server. */
export const sql = (server, text) => execFileSync("python3", ["-c", "import sqlite3, sys; db = sqlite3.connect(sys.argv[1], timeout=30); db.executescript('BEGIN;' + sys.argv[2] + ';COMMIT;')", path(server.dir, "lockstep.db"), text]);

/** Submits them; answers the page of the agent. */
export async function fiveJobs(server, browser) {
  const agent = await join(browser.chromium, server, 1);
  // The one slot is held, so that the others wait, and are cancelled before they have begun.
  const holder = spec("holder", 1, 100);
  holder.train.lr = 0.1;
  await server.ask("/jobs", { ...holder, tags: ["held"] });
  const losses = { anna: 0.5, berta: 0.25, carl: 0.75, dora: null };
  for (const [i, [name, loss]] of Object.entries(losses).entries()) {
    const body = spec(name, 1, 100);
    body.train.lr = [0.1, 0.4, 0.2, 0.05][i];
    const { id } = await server.ask("/jobs", { ...body, project: i < 2 ? "vision" : "audio", tags: i === 1 ? ["warm up"] : [], notes: i === 2 ? "a needle in the notes" : "" });
    await server.ask(`/jobs/${id}/cancel`, {});
    await until("it is cancelled", async () => (await server.job(id)).state === "cancelled");
    if (loss !== null) sql(server, `UPDATE jobs SET last = json_set(last, '$.loss', ${loss}) WHERE id = '${id}'`);
  }
  return agent;
}

export const names = (page) => page.locator("#rows tr [data-f=name]").evaluateAll((links) => links.map((a) => a.title || a.textContent));
export const listed = (page, expected) => until(`the list is ${expected}`, async () => { const now = await names(page); return now.join() === expected || Promise.reject(new Error(now.join())); }, 20_000);
export const address = (page) => new URL(page.url()).searchParams;
export const head = (page, name) => page.getByRole("columnheader", { name }).getByRole("button");
/** Takes a job away, whatever it is doing. */
export async function remove(server, id) {
  await server.ask(`/jobs/${id}/cancel`, {}).catch(() => {});
  await until("it is over", async () => (await server.job(id)).state === "cancelled");
  const answer = await fetch(`${server.url}/api/v1/jobs/${id}`, { method: "DELETE" });
  if (answer.status !== 204) throw new Error(`${id} is not deleted: ${answer.status}`);
}
