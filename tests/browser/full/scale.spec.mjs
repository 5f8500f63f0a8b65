// A job with many points and log lines, reported by a simulated agent: the page stays correct and small.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { loss, metrics, range, simulateAgent, spec } from "../agent.mjs";
import { Browser, TestServer, losses, until } from "../test-server.mjs";

const RANKS = 4, STEPS = 60_000;
let server, browser, agent, job, attempt;
before(async () => {
  [server, browser] = await Promise.all([TestServer.open({ dataset: false, agent: false }), Browser.open()]);
  agent = await simulateAgent(browser.chromium, server, RANKS);
  job = await server.ask("/jobs", spec("many points", RANKS, STEPS));
  attempt = await agent.attempt(job.id);
  await agent.begin(attempt, { total_steps: STEPS, steps_per_epoch: 6000 });
  for (let rank = 0; rank < RANKS; rank++) {
    const events = [];
    // From step 45,000, rank 3 waits for data and the other ranks wait for rank 3.
    const slow = (s) => (s > 45_000 ? 8.25 : 0.25), times = rank === 3 ? { data_ms: slow, all_reduce_ms: 0.25 } : { data_ms: 0.25, all_reduce_ms: slow };
    for (let first = 1; first <= STEPS - 100; first += 50) events.push(metrics(rank, range(first, first + 49), { loss: (s) => loss(s, rank), step_ms: 25.5, ...times }));
    await agent.report(attempt, rank, events);
  }
});
after(async () => { await browser?.close(); await server?.close(); });

describe("a long run", () => {
  test("is drawn by buckets, which the note says, and by single points when zoomed", async () => {
    const page = await browser.page(server, `/jobs/${job.id}`), note = page.locator("#loss-note");
    await until("the chart is drawn", async () => (await losses(page))["rank 3"]?.points > STEPS - 200);
    await until("the note names buckets", async () => /^min to max of \d+ points a pixel · 4 ranks$/.test(await note.textContent()));
    const buckets = await page.evaluate(() => window.lockstep.charts.loss.snapshot()[0].buckets);
    assert.ok(buckets > 300 && buckets <= 2000, `${buckets} buckets: about one a pixel`);
    await page.evaluate(() => window.lockstep.view.setZoom([30_000, 30_200]));
    await until("the note names single points", async () => (await note.textContent()) === "every point · 4 ranks");
    const { series } = await server.ask(`/jobs/${job.id}/metrics?name=loss&ranks=2&from=30000&to=30200&points=500`);
    const drawn = () => page.evaluate(() => { const { loss } = window.lockstep.charts, s = loss.drawnSeries(loss.layers().find((l) => l.label === "rank 2").series).segments[0]; return Array.from(s.mean.subarray(0, s.length)); });
    // Points of a wider range may arrive first.
    await until("the chart has the server's points", async () => { assert.deepEqual(await drawn(), series[0].mean.map(Math.fround)); return true; });
    await page.evaluate(() => window.lockstep.view.setZoom(null));
    await until("the note names buckets again", async () => /min to max/.test(await note.textContent()));
  });

  test("names a slow rank with its first slow step and the cause, and a rank that has stopped", async () => {
    const page = await browser.page(server, `/jobs/${job.id}`);
    const banner = page.locator("#banner");
    await until("the banner is shown", () => banner.isVisible());
    // At first the page has only the newest steps.
    await until("the banner names rank 3, the step and the cause", async () => {
      const text = await banner.textContent();
      const [, share, since] = text.match(/Rank 3 is (\d+) % slower since step ([\d,]+)\..*waits for data/) ?? assert.fail(text);
      return (Number(share) > 20 && Math.abs(Number(since.replaceAll(",", "")) - 45_000) < 2000) || Promise.reject(new Error(text));
    });
    // Ranks 0, 2 and 3 report two more steps, rank 1 none. Then no rank reports.
    for (const rank of [0, 2, 3]) await agent.reportSteps(attempt, rank, [STEPS - 99, STEPS - 98], { loss: 0.5 });
    await until("the banner names rank 1", async () => /Rank 1 has not moved for 0:\d\d\..*all-reduce/.test(await banner.textContent()), 60_000);
  });

  test("has at most 1000 rows of a log of 100,000 lines, and loads other lines by scrolling and searching", async () => {
    for (let first = 1; first <= 100_000; first += 1000) {
      const lines = range(first, first + 999).map((number) => ({ number, at: "2026-01-02T03:04:05Z", text: number === 777 ? "a needle" : `line ${number}` }));
      await agent.report(attempt, 0, range(0, 99).map((i) => ({ type: "log", rank: 0, lines: lines.slice(i * 10, i * 10 + 10) })));
    }
    const page = await browser.page(server, `/jobs/${job.id}`), box = page.locator("#log-lines"), rows = box.locator("p[data-at]");
    await until("the newest lines are shown", async () => /line 100000/.test(await rows.last().textContent()));
    assert.ok((await rows.count()) <= 1000);
    const firstBefore = await rows.first().textContent();
    await box.evaluate((b) => { b.scrollTop = 0; });
    await until("older lines are loaded", async () => (await rows.first().textContent()) !== firstBefore);
    assert.ok((await rows.count()) <= 1000);
    await page.getByLabel("Search the log").fill("needle");
    await until("the needle is found", async () => (await rows.count()) === 1 && /a needle/.test(await rows.first().textContent()));
  });
});

describe("every page", () => {
  test("is smaller than 220 KB and has no inline scripts", async () => {
    for (const path of ["/jobs", "/jobs/new", `/jobs/${job.id}`, "/datasets", "/machines", `/compare?jobs=${job.id}`]) {
      const page = await browser.page(server, "/machines"), tools = await page.context().newCDPSession(page);
      await tools.send("Network.enable");
      await tools.send("Network.setCacheDisabled", { cacheDisabled: true });
      const urls = new Map();
      let bytes = 0;
      tools.on("Network.responseReceived", ({ requestId, response }) => urls.set(requestId, response.url));
      // Counts the page without its data.
      tools.on("Network.loadingFinished", ({ requestId, encodedDataLength }) => { if (!/\/api\//.test(urls.get(requestId) ?? "")) bytes += encodedDataLength; });
      const response = await page.goto(server.url + path);
      await page.waitForLoadState("load");
      await until("the page's scripts have run", () => page.locator("#keys").isVisible());
      assert.ok(bytes > 5000 && bytes < 220_000, `${path}: ${bytes} bytes`);
      const policy = response.headers()["content-security-policy"];
      assert.match(policy, /default-src 'none'/);
      assert.match(policy, /script-src 'self'(;|$)/);
      assert.doesNotMatch(policy, /unsafe/);
      assert.doesNotMatch(await response.text(), / style="| on\w+="|<script>/, "the server's HTML has no inline scripts");
      await page.end();
    }
  });
});
