// Measures the dashboard with much data: a real server and a real Chromium, by the browser's clock.
//
//   LOCKSTEP_BIN=target/release/lockstep node tests/bench/dashboard.mjs [--live-minutes 10] [--points 1000000] [--jobs 1000] [--many 10000] [--lines 10000000] [--as nobody]
//
// With --as admin or --as member, the server requires authentication: the simulated agent has a token, and the browser is signed in with that role.
//
// 1. A list of a thousand jobs, one of them running, with its own server and browser: from navigation to the drawn list (n = 15; in a
//    new tab, which includes the start of its process, and from another page), and all jobs as JSON.
//    Then ten thousand jobs, copied in the SQLite file (needs python3): sorted by a setting (n = 15), and, once all are loaded, the
//    frame times while a wheel scrolls by ticks of 120 pixels, and during jumps through the list.
// 2. A job of 8 ranks with a million losses each, reported through the agents' websocket: from navigation to the first
//    drawn chart (n = 15), and from the end of a zoom to the finer chart (n = 15).
// 3. A job of 8 ranks that report five metrics, 100 points of each per second and rank: frames per second, memory.
// 4. A job with ten million log lines, one event per line. They are written into the SQLite file while the server is
//    stopped (needs python3), as reporting them would take as long as training.

import { execFileSync } from "node:child_process";
import { rm } from "node:fs/promises";
import { chromium } from "../browser/node_modules/playwright-core/index.mjs";
import { CHROMIUM, TestServer, signIn, until } from "../browser/test-server.mjs";
import { simulateAgent, spec } from "../browser/agent.mjs";
import { ARGUMENTS, option, reportLosses, timeAllJobs, timeFirstChart, timeList, timeListFromMachines } from "./pages.mjs";

const POINTS = option("points", 1_000_000), MINUTES = option("live-minutes", 10), JOBS = option("jobs", 1000), MANY = option("many", 10_000), LINES = option("lines", 10_000_000), RANKS = 8, N = 15;
const AS = process.argv.includes("--as") ? process.argv[process.argv.indexOf("--as") + 1] : "nobody";
if (!["nobody", "admin", "member"].includes(AS)) throw new Error(`--as ${AS}: nobody, admin or member`);
const args = [...ARGUMENTS, "--enable-precise-memory-info"];
const quantile = (values, q) => values.toSorted((a, b) => a - b)[Math.min(values.length - 1, Math.floor(q * values.length))];
const row = (what, values, unit = "ms") => console.log(`| ${what} | ${quantile(values, 0.5).toFixed(0)} ${unit} | ${Math.min(...values).toFixed(0)} to ${Math.max(...values).toFixed(0)} ${unit} | ${values.length} |`);

/** Opens a browser context, signed in if --as names a role. */
async function openContext(browser, server) {
  const context = await browser.newContext({ viewport: { width: 1440, height: 1000 } });
  if (AS !== "nobody") await signIn(context, server, AS);
  return context;
}

/** Writes log lines as the store does, one event per line, of eight ranks in turn. */
const FILL = `
import sqlite3, sys
path, job, lines = sys.argv[1], sys.argv[2], int(sys.argv[3])
db = sqlite3.connect(path)
db.execute("PRAGMA synchronous = OFF")
first = db.execute("SELECT last_seq FROM jobs WHERE id = ?", (job,)).fetchone()[0] + 1
def events():
    for i in range(lines):
        text = "a needle" if i == 1000 else f"epoch: {1 + i // 80000} step: {i // 8}, loss is {0.25 + (i * 7919 % 1000) / 1000}"
        yield job, first + i, 1767323045000 + i, "log", 1, i % 8, '{"type":"log","attempt":1,"rank":%d,"lines":[{"number":%d,"at":"2026-01-02T03:04:05.%03dZ","text":"%s"}]}' % (i % 8, i // 8 + 1, i % 1000, text)
db.executemany("INSERT INTO events (job_id, seq, at, kind, attempt, rank, body) VALUES (?, ?, ?, ?, ?, ?, ?)", events())
db.execute("UPDATE jobs SET last_seq = ? WHERE id = ?", (first + lines - 1, job))
db.commit()
print(first)
`;

async function measureLogs() {
  const { id } = await server.ask("/jobs", spec("many lines", RANKS, 10_000_000));
  await server.crash();
  const began = Date.now(), first = Number(execFileSync("python3", ["-c", FILL, `${server.dir}/lockstep.db`, id, String(LINES)]));
  // A server that was killed leaves this lock, and starts only if the database's write-ahead log exists. The script has moved the log into the
  // database.
  await rm(`${server.dir}/lockstep.db.lock`);
  console.error(`${LINES.toLocaleString("en")} lines written in ${((Date.now() - began) / 1000).toFixed(0)} s`);
  await server.start();
  const opened = [], recent = [], linked = [], older = [], rare = [], rows = "#log-lines p[data-at]";
  const page = await context.newPage();
  /** Returns the milliseconds from `act` until `check` holds, both evaluated in the page. */
  const timed = (act, check) => page.evaluate(async ([act, check]) => {
    const start = performance.now();
    new Function(act)();
    for (const holds = new Function(`return ${check}`); !holds();) {
      await new Promise((done) => requestAnimationFrame(done));
      if (performance.now() - start > 120_000) throw new Error(`not within two minutes: ${check}`);
    }
    return performance.now() - start;
  }, [act, check]);
  const last = `[...document.querySelectorAll("${rows}")].at(-1)?.textContent`;
  const search = (q) => `const s = document.querySelector("#log-search"); s.value = ${JSON.stringify(q)}; s.dispatchEvent(new Event("input", { bubbles: true }));`;
  for (let i = 0; i < N; i++) {
    await page.goto(`${server.url}/jobs/${id}`, { waitUntil: "commit" });
    await until("the newest lines are shown", () => page.evaluate(() => performance.getEntriesByName("log shown").length));
    opened.push(await page.evaluate(() => performance.getEntriesByName("log shown")[0].startTime));
    older.push(await timed(`document.querySelector("#log-lines").scrollTop = 0; window.was = document.querySelector("${rows}").dataset.at;`, `document.querySelector("${rows}").dataset.at !== window.was`));
    const step = Math.floor((LINES - 1 - i * 800) / 8);
    recent.push(await timed(search(`step: ${step},`), `document.querySelectorAll("${rows}").length > 0 && ${last}.includes("step: ${step},")`));
    if (i < 3) rare.push(await timed(search("a needle"), `document.querySelectorAll("${rows}").length === 1 && ${last}.includes("a needle")`));
    const seq = first + Math.floor(LINES * (i + 1) / (N + 2)), line = seq - first;
    await page.goto(`${server.url}/jobs/${id}?line=${seq}.1.${line % 8}.${Math.floor(line / 8) + 1}`, { waitUntil: "commit" });
    await until("the linked line is shown", () => page.evaluate(() => document.querySelector("#log-lines .marked") && performance.getEntriesByName("log shown").length));
    linked.push(await page.evaluate(() => performance.getEntriesByName("log shown")[0].startTime));
  }
  await page.close();
  const many = `${LINES.toLocaleString("en")} log lines`;
  row(`${many}: navigation to the newest on the page`, opened);
  row("the same: scrolling up to earlier lines", older);
  row("the same: a search that finds one of the newest lines, including 200 ms of waiting for the next key", recent);
  row("the same: a search that finds one of the first lines and reads all others", rare);
  row("the same: a link to a line, navigation to that line", linked);
}

async function measureList() {
  const server = await TestServer.open({ dataset: false, agent: false, auth: AS !== "nobody" });
  const [browser, agentBrowser] = await Promise.all([1, 2].map(() => chromium.launch({ executablePath: CHROMIUM, args })));
  try {
    const agent = await simulateAgent(agentBrowser, server, RANKS), context = await openContext(browser, server);
    const { id } = await server.ask("/jobs", spec("running", RANKS, 1000));
    await agent.evaluate(async ([id]) => {
      const attempt = await window.simulatedAgent.attempt(id), steps = Array.from({ length: 500 }, (_, i) => 1 + i);
      await window.simulatedAgent.report(attempt, 0, [{ type: "running", total_steps: 1000, steps_per_epoch: 100, start_step: 0 }]);
      await window.simulatedAgent.report(attempt, 0, [{ type: "metrics", rank: 0, columns: [{ name: "loss", steps, values: steps.map((s) => window.agentKit.loss(s, 0)) }] }]);
    }, [id]);
    for (let i = 0; i < JOBS - 1; i++) await server.ask("/jobs", spec(`job ${i}`, 1 + (i % RANKS), 1000));
    const listed = [], within = [], fetched = [], json = [];
    for (let i = 0; i < N; i++) {
      const page = await context.newPage();
      listed.push(await timeList(page, server));
      fetched.push(await page.evaluate(() => performance.getEntriesByName("jobs listed")[0].startTime));
      json.push(await timeAllJobs(page));
      within.push(await timeListFromMachines(page, server));
      await page.close();
    }
    row(`list of ${JOBS} jobs: navigation to first rows painted, in a new tab`, listed);
    row("the same, from another page of the dashboard", within);
    row("the same: to the list refreshed by its script", fetched);
    row(`all ${JOBS} jobs as JSON, read and parsed`, json);
  } finally {
    await Promise.all([browser.close(), agentBrowser.close()]);
    await server.close();
  }
}

/** Copies a job many times, with other settings and losses. */
const COPY = `
import sqlite3, sys
path, job, many = sys.argv[1], sys.argv[2], int(sys.argv[3])
db = sqlite3.connect(path, timeout=30)
db.execute("""WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)
    INSERT INTO jobs (id, name, state, priority, project, spec, ranks, last, created_at, finished_at, last_seq)
    SELECT substr(id, 1, length(id) - 5) || printf('%05d', i), 'many ' || i, 'succeeded', priority, project, json_set(spec, '$.train.lr', (i * 7919 % 10007) / 10007.0), ranks,
        json_set(last, '$.loss', (i * 31 % 1009) / 1009.0), created_at - i * 1000, created_at, 1 FROM jobs, n WHERE jobs.id = ?""", (many, job))
db.commit()
`;

/** Sorts ten thousand jobs by a setting, and scrolls through them. */
async function measureManyJobs() {
  const server = await TestServer.open({ dataset: false, agent: false });
  const [browser, agentBrowser] = await Promise.all([1, 2].map(() => chromium.launch({ executablePath: CHROMIUM, args })));
  try {
    await simulateAgent(agentBrowser, server, 1);
    const { id } = await server.ask("/jobs", spec("first", 1, 100));
    await server.ask(`/jobs/${id}/cancel`, {});
    await until("the job is cancelled", async () => (await server.job(id)).state === "cancelled");
    execFileSync("python3", ["-c", COPY, `${server.dir}/lockstep.db`, id, String(MANY)]);
    const requested = [], clicked = [], count = MANY.toLocaleString("en");
    for (let i = 0; i < N; i++) {
      const from = performance.now();
      await server.ask(`/jobs?sort=${i % 2 ? "-" : ""}spec.train.lr&limit=50`);
      requested.push(performance.now() - from);
    }
    const page = await (await browser.newContext({ viewport: { width: 1440, height: 1000 } })).newPage();
    await page.goto(`${server.url}/jobs?q=many&columns=loss,train.lr`);
    await until("the jobs are listed", () => page.evaluate(() => document.querySelectorAll("#rows tr").length >= 50));
    for (let i = 0; i < N; i++) {
      clicked.push(await page.evaluate(() => new Promise((done) => {
        const rows = document.getElementById("rows"), first = rows.firstElementChild, from = performance.now();
        new MutationObserver((_, watch) => { if (rows.firstElementChild === first) return; watch.disconnect(); requestAnimationFrame(() => done(performance.now() - from)); }).observe(rows, { childList: true });
        document.querySelector("th[data-key='train.lr'] button").click();
      })));
    }
    row(`${count} jobs: GET /jobs sorted by train.lr, 50 of them`, requested);
    row("the same: a click on the column's head until its rows are drawn", clicked);
    await page.evaluate(async (all) => {
      const rows = document.getElementById("rows");
      while (rows.childElementCount < all) { scrollTo(0, document.documentElement.scrollHeight); await new Promise(requestAnimationFrame); }
    }, MANY);
    const frames = async (act) => {
      await page.evaluate(() => {
        window.took = [];
        let before = performance.now();
        const tick = (now) => { window.took.push(now - before); before = now; window.ticking = requestAnimationFrame(tick); };
        window.ticking = requestAnimationFrame(tick);
      });
      await act();
      return page.evaluate(() => { cancelAnimationFrame(window.ticking); return window.took; });
    };
    await page.evaluate(() => scrollTo(0, document.documentElement.scrollHeight / 2));
    await page.mouse.move(720, 600);
    const wheel = await frames(async () => { for (let i = 0; i < 200; i++) { await page.mouse.wheel(0, i < 100 ? 120 : -120); await new Promise((done) => setTimeout(done, 25)); } });
    const jumps = await frames(() => page.evaluate(async () => {
      const height = document.documentElement.scrollHeight;
      for (let n = 0; n < 200; n++) { scrollTo(0, Math.abs(height - 2 * height * n / 200)); await new Promise(requestAnimationFrame); }
    }));
    row("the same, all loaded: time of a frame while a wheel scrolls, 200 ticks of 120 pixels", wheel);
    console.log(`| 95th percentile of these | ${quantile(wheel, 0.95).toFixed(0)} ms | | |`);
    row("the same: time of a frame during jumps of 5,800 pixels", jumps);
    console.log(`| 95th percentile of these | ${quantile(jumps, 0.95).toFixed(0)} ms | | |`);
  } finally {
    await Promise.all([browser.close(), agentBrowser.close()]);
    await server.close();
  }
}

console.log("| what | median | from to | n |\n|---|---|---|---|");
await measureList();
if (MANY) await measureManyJobs();
const server = await TestServer.open({ dataset: false, agent: false, auth: AS !== "nobody" });
const [browser, agentBrowser] = await Promise.all([1, 2].map(() => chromium.launch({ executablePath: CHROMIUM, args })));
let agent, context;
try {
  agent = await simulateAgent(agentBrowser, server, RANKS);

  const { id } = await server.ask("/jobs", spec("a million points", RANKS, POINTS));
  const filled = Date.now();
  await reportLosses(agent, id, RANKS, POINTS);
  console.error(`filled in ${((Date.now() - filled) / 1000).toFixed(0)} s`);

  context = await openContext(browser, server);
  const opened = [], zoomed = [];
  for (let i = 0; i < N; i++) {
    const page = await context.newPage();
    opened.push(await timeFirstChart(page, server, id));
    await until("the page is live", () => page.evaluate(() => document.querySelector("#live").textContent === "live"));
    // From the end of a zoom to the frame that shows finer buckets.
    zoomed.push(await page.evaluate(async ([from, to]) => {
      const { view, charts } = window.lockstep, start = performance.now();
      view.setZoom([from, to]);
      for (;;) {
        await new Promise((done) => requestAnimationFrame(done));
        if (charts.loss.detail?.zoom === view.zoom && charts.loss.paintedAt > start && !charts.loss.isOutdated) return performance.now() - start;
        if (performance.now() - start > 10_000) throw new Error("no finer chart");
      }
    }, [POINTS * 0.05 * i, POINTS * 0.05 * i + POINTS / (2 + i)]));
    await page.close();
  }
  row(`${RANKS} ranks × ${POINTS.toLocaleString("en")} points: navigation to first chart`, opened);
  row("the same job: zoom to finer chart", zoomed);

  if (MINUTES) await measureLivePage(id);
  if (LINES) await measureLogs();
} finally {
  await Promise.all([browser.close(), agentBrowser.close()]);
  await server.close();
}

/** Measures the page of a live job, after the job `first` has ended. */
async function measureLivePage(first) {
  const live = await server.ask("/jobs", { ...spec("live", RANKS, 10_000_000), priority: 10 });
  await agent.evaluate(async ([first]) => { await window.simulatedAgent.end(await window.simulatedAgent.attempt(first), 1); }, [first]);
  await agent.evaluate(async ([id, ranks]) => {
    const attempt = await window.simulatedAgent.attempt(id);
    await window.simulatedAgent.report(attempt, 0, [{ type: "running", total_steps: 10_000_000, steps_per_epoch: 100_000, start_step: 0 }]);
    let step = 1;
    window.reporting = setInterval(() => {
      const steps = Array.from({ length: 10 }, (_, i) => step + i);
      step += 10;
      for (let rank = 0; rank < ranks; rank++) {
        const columns = ["loss", "accuracy", "step_ms", "data_ms", "all_reduce_ms"].map((name) => ({ name, steps, values: steps.map((s) => window.agentKit.loss(s, rank)) }));
        window.simulatedAgent.report(attempt, rank, [{ type: "metrics", rank, columns }], 1e9);
      }
    }, 100);
  }, [live.id, RANKS]);
  const page = await context.newPage(), tools = await context.newCDPSession(page);
  await tools.send("Performance.enable");
  await page.goto(`${server.url}/jobs/${live.id}`);
  await until("the page is live", () => page.evaluate(() => document.querySelector("#live").textContent === "live"));
  await page.evaluate(() => {
    const seen = window.frames_ = { times: [], longest: 0 };
    let before = performance.now(), count = 0, from = before;
    const tick = (now) => {
      seen.longest = Math.max(seen.longest, now - before);
      before = now;
      if (++count && now - from >= 1000) { seen.times.push(count * 1000 / (now - from)); count = 0; from = now; }
      requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
  });
  const heaps = [];
  for (let minute = 0; minute < MINUTES; minute++) {
    await new Promise((done) => setTimeout(done, 60_000));
    const { metrics } = await tools.send("Performance.getMetrics");
    heaps.push(metrics.find((m) => m.name === "JSHeapUsedSize").value / 1e6);
    console.error(`minute ${minute + 1}: ${heaps.at(-1).toFixed(0)} MB of heap`);
  }
  const { times, longest } = await page.evaluate(() => window.frames_);
  const points = await page.evaluate(() => window.lockstep.charts.loss.snapshot().reduce((n, s) => n + s.points, 0));
  row(`live, ${RANKS} ranks × 100 points/s of five metrics, ${MINUTES} min: frames each second`, times, "fps");
  row("the same: JavaScript heap at each minute's end, garbage included", heaps, "MB");
  console.log(`| the same: longest frame; points drawn of loss | ${longest.toFixed(0)} ms | ${points.toLocaleString("en")} | 1 |`);
  await page.close();
}
