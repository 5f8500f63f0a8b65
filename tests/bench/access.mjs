// The cost of authentication in a browser: loads the pages of two servers with the same database in turns, one with sessions and one with
// --no-auth, and measures by the browser's clock.
//
//   LOCKSTEP_BIN=target/release/lockstep node tests/bench/access.mjs [--jobs 1000] [--points 1000000] [--rounds 15]
//
// An admin and a member have signed in by password. For members the server checks the ownership of everything; admins get the same page as with
// --no-auth. The second server is also used by two browser contexts, so each server gets equally many requests; the difference between these two
// contexts is noise. In each round, each of the four contexts opens every page once, in a random order. Prints medians, and their ratios to the
// median of both contexts without authentication. tests/bench/access.py measures single requests.

import { cp, mkdtemp } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join as path } from "node:path";
import { chromium } from "../browser/node_modules/playwright-core/index.mjs";
import { CHROMIUM, TestServer, signIn, until } from "../browser/test-server.mjs";
import { simulateAgent, spec } from "../browser/agent.mjs";
import { ARGUMENTS as args, option, reportLosses, timeAllJobs, timeFirstChart, timeList, timeListFromMachines } from "./pages.mjs";

const JOBS = option("jobs", 1000), POINTS = option("points", 1_000_000), ROUNDS = option("rounds", 15), RANKS = 8;
const median = (values) => values.toSorted((a, b) => a - b)[values.length >> 1];

/** Returns the numbers below `count` in a random order. */
function shuffled(count) {
  const order = Array.from({ length: count }, (_, i) => i);
  for (let i = count - 1; i > 0; i--) {
    const j = Math.floor(Math.random() * (i + 1));
    [order[i], order[j]] = [order[j], order[i]];
  }
  return order;
}

/** Submits many jobs, and a job of 8 ranks that reports all its losses and ends. Returns the id of that job. */
async function fill(server) {
  const agentBrowser = await chromium.launch({ executablePath: CHROMIUM, args });
  const agent = await simulateAgent(agentBrowser, server, RANKS);
  const { id } = await server.ask("/jobs", spec("many points", RANKS, POINTS));
  await reportLosses(agent, id, RANKS, POINTS);
  await agent.evaluate(async ([id, points]) => window.simulatedAgent.end(await window.simulatedAgent.attempt(id), points), [id, POINTS]);
  await until("the job has ended", async () => (await server.job(id)).state === "succeeded");
  await agentBrowser.close();
  for (let i = 0; i < JOBS - 1; i++) await server.ask("/jobs", spec(`job ${i}`, 1 + (i % RANKS), 1000));
  return id;
}

/** The measurements. Each runs in a new tab. */
const cases = (job) => ({
  [`${JOBS} jobs: navigation to first rows painted, in a new tab`]: timeList,
  "the same, from another page of the dashboard": timeListFromMachines,
  [`all ${JOBS} jobs as JSON, read and parsed`]: async (page, server) => {
    await page.goto(`${server.url}/machines`, { waitUntil: "load" });
    return timeAllJobs(page);
  },
  [`${RANKS} ranks × ${POINTS.toLocaleString("en")} points: navigation to first chart`]: (page, server) => timeFirstChart(page, server, job),
  "the same job: navigation to its websocket's last event": async (page, server) => {
    await page.goto(`${server.url}/machines`, { waitUntil: "load" });
    return page.evaluate((job) => new Promise((done, failed) => {
      const start = performance.now(), socket = new WebSocket(`ws://${location.host}/api/v1/jobs/${job}/stream?since=0`);
      socket.onmessage = ({ data }) => { if (JSON.parse(data).type === "live") { done(performance.now() - start); socket.close(); } };
      socket.onerror = () => failed(new Error("the stream"));
    }), job);
  },
});

const first = await TestServer.open({ dataset: false, agent: false });
const servers = [];
let browser;
try {
  const job = await fill(first);
  await first.crash();
  for (const auth of [true, false]) {
    const dir = await mkdtemp(path(tmpdir(), "lockstep-access-"));
    await cp(first.dir, dir, { recursive: true });
    servers.push(await TestServer.open({ dataset: false, agent: false, auth, dir }));
  }
  browser = await chromium.launch({ executablePath: CHROMIUM, args });
  const [authenticated, open] = servers;
  const clients = [["an admin", authenticated, "admin"], ["a member", authenticated, "member"], ["without", open], ["without, again", open]];
  const contexts = [];
  for (const [, server, role] of clients) {
    contexts.push(await browser.newContext({ viewport: { width: 1440, height: 1000 } }));
    if (role) await signIn(contexts.at(-1), server, role);
  }
  const names = clients.map(([name]) => name);
  console.log(`| what | ${[...names, "ratio, admin", "ratio, member", "ratio, without to itself", "n"].join(" | ")} |\n|${"---|".repeat(names.length + 5)}`);
  for (const [what, measure] of Object.entries(cases(job))) {
    const times = clients.map(() => []);
    for (let round = 0; round <= ROUNDS; round++) {
      for (const client of shuffled(clients.length)) {
        const page = await contexts[client].newPage();
        const ms = await measure(page, clients[client][1]);
        // The first round is a warm-up.
        if (round) times[client].push(ms);
        await page.close();
      }
    }
    const medians = times.map(median), without = median(times.slice(2).flat());
    const ratios = [medians[0] / without, medians[1] / without, medians[3] / medians[2]].map((v) => v.toFixed(3));
    console.log(`| ${[what, ...medians.map((v) => `${v.toFixed(1)} ms`), ...ratios, ROUNDS].join(" | ")} |`);
  }
} finally {
  await browser?.close();
  for (const server of [first, ...servers]) await server.close();
}
