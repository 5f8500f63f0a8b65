// Wrong clocks, sleeping laptops and connections that die silently: pages show all data without a reload.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { readdirSync } from "node:fs";
import { connect, createServer } from "node:net";
import { join } from "node:path";
import { after, afterEach, before, describe, test } from "node:test";
import { loss, metrics, range, simulateAgent, spec } from "../agent.mjs";
import { BINARY, Browser, TestServer, losses, until, untilLive } from "../test-server.mjs";

const MINUTES = 60_000, RANKS = 2;
let browser;
before(async () => { browser = await Browser.open(); });
after(() => browser.close());

/** Finds libfaketime, which gives a process another clock. */
function findFaketime() {
  for (const folder of readdirSync("/usr/lib")) {
    const library = join("/usr/lib", folder, "faketime/libfaketime.so.1");
    try { readdirSync(join(library, "..")); return library; } catch { /* not in this folder */ }
  }
  assert.fail("libfaketime is not installed; tests/run installs it");
}

describe("a job on a machine with a wrong clock", () => {
  for (const [machineOffset, browserOffset] of [["+10m", -10], ["-10m", 10]]) {
    test(`has a live and complete page with correct times: the machine is ${machineOffset} off, the browser ${browserOffset}m`, async () => {
      const server = await TestServer.open({ agent: false, dataset: false });
      const agent = spawn(BINARY, ["agent", "--server", server.url, "--name", "off", "--cpu-slots", "2", "--data-dir", join(server.dir, "agent")], {
        env: { ...process.env, LD_PRELOAD: findFaketime(), FAKETIME: machineOffset, FAKETIME_DONT_FAKE_MONOTONIC: "1" }, stdio: "ignore",
      });
      try {
        await until("the machine has joined", async () => (await server.ask("/agents")).agents.some((a) => a.online));
        await server.register();
        const page = await browser.page(server, "/docs");
        // Changes only the clock: performance.now() and timers are unaffected.
        await page.addInitScript((offsetMs) => {
          const Real = Date;
          window.Date = class extends Real {
            constructor(...given) { given.length ? super(...given) : super(Real.now() + offsetMs); }
            static now() { return Real.now() + offsetMs; }
          };
        }, browserOffset * MINUTES);
        const { id } = await server.submit({ name: "clocks", train: { steps: 60 } });
        await page.goto(`${server.url}/jobs/${id}`);
        await page.evaluate(() => { window.sameDocument = true; });
        const live = page.locator("#live"), statuses = [];
        await until("the job has ended", async () => { statuses.push(await live.textContent()); return (await page.locator("#state").textContent()) === "succeeded"; });
        assert.ok(statuses.every((status) => !/min|[1-9]\d s/.test(status)), `the page never counts as behind: ${[...new Set(statuses)]}`);
        for (const rank of [0, 1]) await until("every loss is drawn", async () => (await losses(page))[`rank ${rank}`]?.points === 60);
        const { lines } = await server.ask(`/jobs/${id}/logs?limit=1000`);
        await until("the last log line is shown", async () => (await page.locator("#log-lines").innerText()).includes(lines.at(-1).text));
        await until("the duration is correct", async () => /^0?[01]:\d\d$|^\d+(\.\d+)? s$/.test(await page.locator("#left").textContent()));
        const job = await server.job(id), secs = (Date.parse(job.finished_at) - Date.parse(job.started_at)) / 1000;
        assert.ok(secs > 0 && secs < 120, `${secs} s`);
        assert.ok(await page.evaluate(() => window.sameDocument), "the page was not reloaded");

        await page.goto(`${server.url}/jobs`);
        await until("the list shows the correct age", async () => /^(just now|\d+ s( ago)?|[01] min( ago)?)$/.test((await page.locator("#rows [data-f=age]").first().innerText()).trim()));
        await page.goto(`${server.url}/machines`);
        await until("the machine is online", async () => /online/.test(await page.locator(".machine .pill").first().textContent()));
        await page.end();
      } finally {
        agent.kill("SIGKILL");
        await server.close();
      }
    });
  }
});

describe("a connection that dies silently", () => {
  let server, agent, proxy, runningJob = null;
  before(async () => {
    server = await TestServer.open({ dataset: false, agent: false });
    agent = await simulateAgent(browser.chromium, server, RANKS);
    proxy = await FreezingProxy.open(server.port);
  });
  afterEach(async () => {
    if (runningJob) await finish(runningJob);
  });
  after(async () => { proxy?.close(); await server?.close(); });

  async function startJob(name) {
    const job = runningJob = await server.ask("/jobs", spec(name, RANKS, 1000));
    job.attempt = await agent.attempt(job.id);
    await agent.begin(job.attempt);
    await reportSteps(job, 1, 10);
    return job;
  }
  async function reportSteps({ attempt }, first, last) {
    const steps = range(first, last), at = new Date().toISOString();
    for (let rank = 0; rank < RANKS; rank++) {
      await agent.report(attempt, rank, [metrics(rank, steps, { loss: (s) => loss(s, rank) }), { type: "log", rank, lines: steps.map((s) => ({ number: s, at, text: `rank ${rank} did step ${s}` })) }]);
    }
  }
  async function finish({ attempt }) {
    runningJob = null;
    await agent.endAttempt(attempt, { how: "succeeded", step: 20 });
  }
  /** Opens a live page with a simulated clock behind the proxy. `page.pending`: requests without a complete response. `page.end()` fails the
   *  test if the page was reloaded. */
  async function openPage(address) {
    const page = await browser.page({ url: proxy.url }, "/docs", { expectedErrors: [/WebSocket/] });
    await page.clock.install();
    page.pending = new Set();
    page.on("request", (request) => page.pending.add(request));
    for (const event of ["requestfinished", "requestfailed"]) page.on(event, (request) => page.pending.delete(request));
    await page.goto(proxy.url + address);
    await untilLive(page);
    await page.evaluate(() => { window.sameDocument = true; });
    const { end } = page;
    page.end = async () => { assert.ok(await page.evaluate(() => window.sameDocument), "the page was not reloaded"); await end(); };
    return page;
  }
  async function assertComplete(page, steps) {
    for (let rank = 0; rank < RANKS; rank++) await until(`every loss of rank ${rank}`, async () => (await losses(page))[`rank ${rank}`]?.points === steps);
    for (const step of [1, 10, 11, steps]) await until(`the line of step ${step}`, async () => `${await page.locator("#log-lines").innerText()}\n`.includes(`rank 1 did step ${step}\n`));
    assert.equal((await page.locator("#log-lines").innerText()).split("rank 0 did step 11\n").length, 2, "the line is shown once");
  }

  test("while a laptop sleeps is detected when the laptop wakes up, and no data is missing", async () => {
    const job = await startJob("asleep"), page = await openPage(`/jobs/${job.id}`);
    proxy.freeze();
    await reportSteps(job, 11, 20);
    await page.clock.fastForward("08:00:00");
    await assertComplete(page, 20);
  });

  test("under a job's page is detected by missing heartbeats", async () => {
    const job = await startJob("cut"), page = await openPage(`/jobs/${job.id}`);
    proxy.freeze();
    await reportSteps(job, 11, 20);
    await page.clock.runFor(40_000);
    assert.equal((await losses(page))["rank 0"].points, 10, "one missing heartbeat is tolerated");
    await page.clock.runFor(10_000);
    await assertComplete(page, 20);
  });

  test("under the list is detected, and a new job is listed", async () => {
    await startJob("first");
    const page = await openPage("/jobs");
    await until("the job is listed", async () => (await page.locator("#rows").innerText()).includes("first"));
    proxy.freeze();
    await server.ask("/jobs", spec("came while nobody heard", RANKS, 10)).then(({ id }) => server.ask(`/jobs/${id}/cancel`, {}));
    await page.clock.runFor(50_000);
    await until("the new job is listed", async () => { await page.clock.runFor(6000); return (await page.locator("#rows").innerText()).includes("came while nobody heard"); });
  });

  test("under the list: a job far down that ended meanwhile is shown as ended", async () => {
    const job = await startJob("far down");
    for (let n = 0; n < 60; n++) await server.ask("/jobs", spec(`above ${n}`, RANKS, 10)).then(({ id }) => server.ask(`/jobs/${id}/cancel`, {}));
    const page = await openPage("/jobs"), row = page.locator(`#rows tr[data-id="${job.id}"]`);
    await until("the page is scrolled to the job", async () => { await page.evaluate(() => scrollTo(0, document.body.scrollHeight)); return row.isVisible(); });
    assert.equal(await row.getAttribute("data-state"), "running");
    assert.ok(await page.locator("#rows tr").evaluateAll((all, id) => all.findIndex((tr) => tr.dataset.id === id) >= 50, job.id), "the job is below the first 50 rows");
    proxy.freeze();
    await finish(job);
    await page.clock.runFor(50_000);
    await until("the row shows that the job has succeeded", async () => { await page.clock.runFor(6000); return (await row.getAttribute("data-state")) === "succeeded"; });
  });

  test("under Compare: a job that ended meanwhile has its last points", async () => {
    const job = await startJob("compared"), page = await openPage(`/compare?jobs=${job.id}&metric=loss,images_per_second`);
    const points = (metric) => page.evaluate((metric) => window.lockstep.charts[metric].snapshot().map((s) => s.points).join(), metric);
    await until("the first points are drawn", async () => (await points("loss")) === "10");
    proxy.freeze();
    await reportSteps(job, 11, 20);
    await finish(job);
    await page.clock.runFor(50_000);
    await until("all points are drawn", async () => (await points("loss")) === "20");
    await until("the results show the job's end", async () => /succeeded/.test(await page.locator("#results").textContent()));
  });

  test("under a job's page, with more missed events than are sent again: the log, checkpoints, tabs and ranks are current", async () => {
    const job = await startJob("far behind"), page = await openPage(`/jobs/${job.id}`), tab = (name) => page.getByRole("tab", { name, exact: true });
    for (const name of ["Histograms", "Network"]) assert.equal(await tab(name).isVisible(), false);
    proxy.freeze();
    const at = new Date().toISOString(), layer = { name: "conv1.weight", kind: "weight", min: -0.5, max: 0.5, counts: range(0, 63).map((k) => 40 - Math.abs(k - 32)) };
    await agent.report(job.attempt, 0, [
      { type: "network", layers: [{ name: "conv1", kind: "conv 3x3", output_shape: [16, 8, 8], parameters: 432, time_us: 10.5 }] },
      { type: "histograms", step: 10, layers: [layer] },
      { type: "checkpoint", epoch: 1, step: 5, val_accuracy: 0.5, val_loss: 1.5, best: true, size_bytes: 1234567 },
      { type: "rank", rank: 1, report: { status: "evaluating", step: 10, epoch: 1, step_ms: 1.5, all_reduce_ms: 0.5, data_ms: 0.5, images_per_second: 10.5, pid: 4711, device: "a device of now" } },
    ]);
    for (let number = 100; number < 25_100; number += 1000) await agent.report(job.attempt, 0, range(number, number + 999).map((number) => ({ type: "log", rank: 0, lines: [{ number, at, text: "one of very many" }] })));
    await reportSteps(job, 11, 20);
    await page.clock.runFor(50_000);
    for (let rank = 0; rank < RANKS; rank++) await until(`every loss of rank ${rank}`, async () => (await losses(page))[`rank ${rank}`]?.points === 20);
    const log = () => page.locator("#log-lines").innerText();
    await until("the newest line is shown", async () => (await log()).includes("rank 1 did step 20"));
    await until("the checkpoint is listed", async () => (await page.locator("#checkpoints tr").allInnerTexts()).map((row) => /1-5/.test(row)).join() === "true");
    await agent.report(job.attempt, 0, [{ type: "log", rank: 0, lines: [{ number: 30_000, at, text: "and one more" }] }]);
    await until("the next line is shown", async () => (await log()).includes("and one more"));
    assert.equal((await log()).split("and one more").length, 2, "the line is shown once");
    for (const name of ["Histograms", "Network"]) await until(`${name} is offered`, () => tab(name).isVisible());
    await until("the rank's report is the newest", async () => /a device of now/.test(await page.locator("#ranks li").nth(1).textContent()));
    await tab("Histograms").click();
    await until("histograms are shown", () => page.locator("#histogram-rows tr").first().isVisible());
    await tab("Network").click();
    await until("the network is shown", () => page.locator("#network-rows tr").first().isVisible());
  });

  /** Freezes the connections, and waits until the page has a pending request and detects the freeze. */
  const freezeWithRequest = async (page) => {
    proxy.freeze();
    await page.clock.runFor(10_000);
    await until("a request is pending", () => page.pending.size > 0);
    await page.clock.runFor(40_000);
  };

  test("under Machines: a machine that is drained meanwhile is shown as drained", async () => {
    const page = await openPage("/machines"), post = (action) => server.ask(`/agents/simulated/${action}`, undefined, "POST");
    await until("the machine is listed", async () => /simulated/.test(await page.locator("#machines").innerText()));
    await freezeWithRequest(page);
    await post("drain");
    await until("the machine is drained", async () => { await page.clock.runFor(6000); return (await page.locator(".warnings").innerText()).includes("Drained"); });
    await post("undrain");
  });

  test("under the queue: a job that was submitted meanwhile is listed", async () => {
    await startJob("holds every slot");
    const page = await openPage("/queue");
    await freezeWithRequest(page);
    const { id } = await server.ask("/jobs", spec("waits meanwhile", RANKS, 10));
    await until("the job is listed", async () => { await page.clock.runFor(6000); return /waits meanwhile/.test(await page.locator("#queue").innerText()); });
    await page.end();
    await server.ask(`/jobs/${id}/cancel`, {});
  });

  test("under the list by groups: a new group is listed", async () => {
    const job = await startJob("in groups"), page = await openPage("/jobs?group_by=project");
    await until("the groups are listed", () => page.locator(".group-head").first().isVisible());
    const asked = page.waitForRequest(/jobs\/groups/);
    await reportSteps(job, 11, 12);
    await until("the page requests the groups", async () => { await page.clock.runFor(500); return Promise.race([asked.then(() => true), new Promise((done) => setTimeout(done, 50))]); });
    proxy.freeze();
    await page.clock.runFor(40_000);
    await server.ask("/jobs", { ...spec("of another project", RANKS, 10), project: "came-meanwhile" }).then(({ id }) => server.ask(`/jobs/${id}/cancel`, {}));
    await until("the new group is listed", async () => { await page.clock.runFor(6000); return /came-meanwhile/.test(await page.locator("#jobs").innerText()); });
  });

  test("under the list during a request for older rows: the rows are listed", async () => {
    // The other jobs find no slots, so they can be cancelled before they start.
    await startJob("the newest that runs");
    for (let n = 0; n < 60; n++) await server.ask("/jobs", spec(`older ${n}`, RANKS, 10)).then(({ id }) => server.ask(`/jobs/${id}/cancel`, {}));
    const page = await openPage("/jobs");
    await until("no request is pending", () => page.pending.size === 0);
    const rows = page.locator("#rows tr"), rowsBefore = await rows.count(), asked = page.waitForRequest(/api\/v1\/jobs\?.*cursor/);
    proxy.freeze();
    await until("the page requests older rows", async () => { await page.evaluate(() => scrollTo(0, document.body.scrollHeight)); return Promise.race([asked, new Promise((done) => setTimeout(done, 100))]); });
    await page.clock.runFor(50_000);
    await until("older rows are listed", async () => { await page.clock.runFor(1000); await page.evaluate(() => scrollTo(0, document.body.scrollHeight)); return (await rows.count()) > rowsBefore; });
  });

  test("is not assumed for a quiet connection with heartbeats", async () => {
    const job = await startJob("quiet"), page = await browser.page({ url: proxy.url }, "/docs"), sockets = [];
    page.on("websocket", (socket) => sockets.push(socket));
    const heartbeat = new Promise((done) => page.on("websocket", (socket) => socket.on("framereceived", ({ payload }) => { if (/"type":"heartbeat"/.test(payload)) done(JSON.parse(payload)); })));
    await page.goto(`${proxy.url}/jobs/${job.id}`);
    await untilLive(page);
    const { at } = await heartbeat;
    assert.ok(Math.abs(Date.parse(at) - Date.now()) < 5000, "a heartbeat has the server's time");
    assert.equal(sockets.length, 1);
  });
});

/** A TCP proxy between browser and server. After `freeze`, existing connections stay open but transfer nothing. */
class FreezingProxy {
  static async open(port) {
    const proxy = new FreezingProxy();
    proxy.pairs = new Set();
    proxy.server = createServer((downstream) => {
      const upstream = connect(port, "127.0.0.1"), ends = [downstream, upstream], pair = { isFrozen: false, ends };
      proxy.pairs.add(pair);
      for (const [source, target] of [[downstream, upstream], [upstream, downstream]]) {
        source.on("data", (bytes) => { if (!pair.isFrozen) target.write(bytes); });
        source.on("close", () => { if (!pair.isFrozen) target.destroy(); });
        source.on("error", () => {});
      }
    });
    await new Promise((done) => proxy.server.listen(0, "127.0.0.1", done));
    proxy.url = `http://127.0.0.1:${proxy.server.address().port}`;
    return proxy;
  }

  /** Freezes all existing connections. New connections work. */
  freeze() { for (const pair of this.pairs) pair.isFrozen = true; }

  close() {
    for (const { ends } of this.pairs) for (const end of ends) end.destroy();
    this.server.close();
  }
}
