// What the benchmarks of pages share: options, the losses of a job, and the times of pages, by the browser's clock.

import { until } from "../browser/test-server.mjs";

export const ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-timer-throttling"];

/** Returns the number after an option of the command line. */
export function option(name, fallback) {
  const index = process.argv.indexOf(`--${name}`);
  return index < 0 ? fallback : Number(process.argv[index + 1]);
}

/** Reports `points` losses of each rank of a job, through the simulated agent. */
export async function reportLosses(agent, id, ranks, points) {
  await agent.evaluate(async ([id, ranks, points]) => {
    const attempt = await window.simulatedAgent.attempt(id), EVENT_STEPS = 500, PART_STEPS = 20 * EVENT_STEPS;
    await window.simulatedAgent.report(attempt, 0, [{ type: "running", total_steps: points, steps_per_epoch: points / 10, start_step: 0 }]);
    for (let first = 1; first <= points; first += PART_STEPS) {
      await Promise.all(Array.from({ length: ranks }, (_, rank) => {
        const events = [];
        for (let from = first; from < first + PART_STEPS && from <= points; from += EVENT_STEPS) {
          const steps = Array.from({ length: Math.min(EVENT_STEPS, points - from + 1) }, (_, i) => from + i);
          events.push({ type: "metrics", rank, columns: [{ name: "loss", steps, values: steps.map((s) => window.agentKit.loss(s, rank)) }] });
        }
        return window.simulatedAgent.report(attempt, rank, events);
      }));
    }
  }, [id, ranks, points]);
}

const firstPaint = (page) => until("rows are painted", () => page.evaluate(() => performance.getEntriesByName("first-contentful-paint")[0]?.startTime));
const listIsLoaded = (page) => until("the list is loaded", () => page.evaluate(() => performance.getEntriesByName("jobs listed").length).catch(() => 0));

/** Opens the list of jobs. Returns the milliseconds from navigation to the first rows painted. */
export async function timeList(page, server) {
  await page.goto(`${server.url}/jobs`, { waitUntil: "load" });
  await listIsLoaded(page);
  return firstPaint(page);
}

/** The same, from another page of the dashboard. */
export async function timeListFromMachines(page, server) {
  await page.goto(`${server.url}/machines`, { waitUntil: "load" });
  await page.click('nav a[href="/jobs"]');
  await listIsLoaded(page);
  return firstPaint(page);
}

/** Returns the milliseconds in which an open page reads and parses all jobs. */
export function timeAllJobs(page) {
  return page.evaluate(async () => {
    const start = performance.now();
    let cursor = "";
    do { cursor = (await (await fetch(`/api/v1/jobs?limit=500${cursor && `&cursor=${cursor}`}`)).json()).next_cursor; } while (cursor);
    return performance.now() - start;
  });
}

/** Opens a job's page. Returns the milliseconds from navigation to the first chart drawn. */
export async function timeFirstChart(page, server, id) {
  await page.goto(`${server.url}/jobs/${id}`);
  return until("the first chart is drawn", () => page.evaluate(() => window.lockstep?.charts.loss.firstDrawnAt));
}
