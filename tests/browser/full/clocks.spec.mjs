// Clocks that are wrong, laptops that sleep, connections that die without a word: pages show all there is, and need no reload.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { readdirSync } from "node:fs";
import { connect, createServer } from "node:net";
import { join as path } from "node:path";
import { after, afterEach, before, describe, test } from "node:test";
import { simulateAgent, spec } from "../agent.mjs";
import { BINARY, Browser, TestServer, losses, until } from "../test-server.mjs";

const MINUTES = 60_000, RANKS = 2;
let browser;
before(async () => { browser = await Browser.open(); });
after(() => browser.close());

/** The library that gives a process another clock. */
function faketime() {
  for (const folder of readdirSync("/usr/lib")) {
    const found = path("/usr/lib", folder, "faketime/libfaketime.so.1");
    try { readdirSync(path(found, "..")); return found; } catch { /* not there */ }
  }
  assert.fail("libfaketime is not installed; tests/run installs it");
}

describe("a machine whose clock is ten minutes off", () => {
  for (const [which, machine, reader] of [["ahead, and the reader's behind", "+10m", -10], ["behind, and the reader's ahead", "-10m", 10]]) {
    test(`${which}: its job is followed live, whole and with true times`, async () => {
      const server = await TestServer.open({ agent: false, dataset: false });
      const agent = spawn(BINARY, ["agent", "--server", server.url, "--name", "off", "--cpu-slots", "2", "--data-dir", path(server.dir, "agent")], {
        env: { ...process.env, LD_PRELOAD: faketime(), FAKETIME: machine, FAKETIME_DONT_FAKE_MONOTONIC: "1" }, stdio: "ignore",
      });
      try {
        await until("it has joined", async () => (await server.ask("/agents")).agents.some((a) => a.online));
        await server.register();
        const page = await browser.page(server, "/docs");
        // The clock alone: what the page measures by performance.now() and its timers go on as ever.
        await page.addInitScript((off) => {
          const Real = Date;
          window.Date = class extends Real {
            constructor(...given) { given.length ? super(...given) : super(Real.now() + off); }
            static now() { return Real.now() + off; }
          };
        }, reader * MINUTES);
        const { id } = await server.submit({ name: "clocks", train: { steps: 60 } });
        await page.goto(`${server.url}/jobs/${id}`);
        await page.evaluate(() => { window.sameDocument = true; });
        const live = page.locator("#live"), shown = [];
        await until("the job has ended", async () => { shown.push(await live.textContent()); return (await page.locator("#state").textContent()) === "succeeded"; });
        assert.ok(shown.every((status) => !/min|[1-9]\d s/.test(status)), `it was never called behind: ${[...new Set(shown)]}`);
        for (const rank of [0, 1]) await until("every loss", async () => (await losses(page))[`rank ${rank}`]?.points === 60);
        const { logs } = await server.ask(`/jobs/${id}/logs?limit=1000`).then((found) => ({ logs: found.lines }));
        await until("the last line", async () => (await page.locator("#log-lines").innerText()).includes(logs.at(-1).text));
        await until("it took seconds, and not ten minutes", async () => /^0?[01]:\d\d$|^\d+(\.\d+)? s$/.test(await page.locator("#left").textContent()));
        const job = await server.job(id), secs = (Date.parse(job.finished_at) - Date.parse(job.started_at)) / 1000;
        assert.ok(secs > 0 && secs < 120, `${secs} s`);
        assert.ok(await page.evaluate(() => window.sameDocument), "without being loaded again");

        await page.goto(`${server.url}/jobs`);
        await until("the list says a true age", async () => /^(just now|\d+ s( ago)?|[01] min( ago)?)$/.test((await page.locator("#rows [data-f=age]").first().innerText()).trim()));
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

describe("a connection that dies without a word", () => {
  let server, agent, line, open = null;
  before(async () => {
    server = await TestServer.open({ dataset: false, agent: false });
    agent = await simulateAgent(browser.chromium, server, RANKS);
    line = await Line.open(server.port);
  });
  afterEach(async () => {
    if (open) await agent.evaluate(async (id) => window.simulatedAgent.end(await window.simulatedAgent.attempt(id), 20), open.id);
    open = null;
  });
  after(async () => { line?.close(); await server?.close(); });

  async function running(name) {
    const job = open = await server.ask("/jobs", spec(name, RANKS, 1000));
    await agent.evaluate(async (id) => window.simulatedAgent.report(await window.simulatedAgent.attempt(id), 0, [{ type: "running", total_steps: 1000, steps_per_epoch: 100, start_step: 0 }]), job.id);
    await tell(job, 1, 10);
    return job;
  }
  const tell = (job, first, last) => agent.evaluate(async ([id, ranks, first, last]) => {
    const attempt = await window.simulatedAgent.attempt(id), steps = Array.from({ length: last - first + 1 }, (_, i) => first + i), at = new Date().toISOString();
    for (let rank = 0; rank < ranks; rank++) {
      await window.simulatedAgent.report(attempt, rank, [
        { type: "metrics", rank, columns: [{ name: "loss", steps, values: steps.map((s) => window.agentKit.loss(s, rank)) }] },
        { type: "log", rank, lines: steps.map((s) => ({ number: s, at, text: `rank ${rank} did step ${s}` })) },
      ]);
    }
  }, [job.id, RANKS, first, last]);
  const finish = async (job, step) => {
    await agent.evaluate(async ([id, step]) => window.simulatedAgent.end(await window.simulatedAgent.attempt(id), step), [job.id, step]);
    await until("the job has ended", async () => (await server.job(job.id)).state === "succeeded");
  };
  /** A page whose clock the test moves, live, over the line that the test cuts. */
  async function reading(at) {
    const page = await browser.page({ url: line.url }, "/docs", { expected: [/WebSocket/] });
    await page.clock.install();
    page.underWay = new Set();
    page.on("request", (request) => page.underWay.add(request));
    for (const over of ["requestfinished", "requestfailed"]) page.on(over, (request) => page.underWay.delete(request));
    await page.goto(line.url + at);
    await until("the page is live", async () => (await page.locator("#live").textContent()) === "live");
    await page.evaluate(() => { window.sameDocument = true; });
    return page;
  }
  async function isWhole(page, steps) {
    for (let rank = 0; rank < RANKS; rank++) await until(`every loss of rank ${rank}`, async () => (await losses(page))[`rank ${rank}`]?.points === steps);
    for (const step of [1, 10, 11, steps]) await until(`the line of step ${step}`, async () => (await page.locator("#log-lines").innerText()).includes(`rank 1 did step ${step}\n`) || (await page.locator("#log-lines").innerText()).endsWith(`did step ${step}`));
    assert.equal((await page.locator("#log-lines").innerText()).split("rank 0 did step 11\n").length, 2, "once");
    assert.ok(await page.evaluate(() => window.sameDocument), "without being loaded again");
  }

  test("while a laptop sleeps is noticed when it wakes up, and nothing is missing", async () => {
    const job = await running("asleep"), page = await reading(`/jobs/${job.id}`);
    line.forget();
    await tell(job, 11, 20);
    await page.clock.fastForward("08:00:00");
    await isWhole(page, 20);
    await page.end();
  });

  test("under a page that is awake is noticed by the missing heartbeats", async () => {
    const job = await running("cut"), page = await reading(`/jobs/${job.id}`);
    line.forget();
    await tell(job, 11, 20);
    await page.clock.runFor(40_000);
    assert.equal((await losses(page))["rank 0"].points, 10, "a heartbeat may be late");
    await page.clock.runFor(10_000);
    await isWhole(page, 20);
    await page.end();
  });

  test("under the list is noticed, too", async () => {
    const job = await running("first"), page = await reading("/jobs");
    await until("it is there", async () => (await page.locator("#rows").innerText()).includes("first"));
    line.forget();
    await server.ask("/jobs", spec("came while nobody heard", RANKS, 10)).then(({ id }) => server.ask(`/jobs/${id}/cancel`, {}));
    await page.clock.runFor(50_000);
    await until("the new job", async () => { await page.clock.runFor(6000); return (await page.locator("#rows").innerText()).includes("came while nobody heard"); });
    assert.ok(await page.evaluate(() => window.sameDocument) && job.id, "without being loaded again");
    await page.end();
  });

  test("under the list: a job that ended meanwhile far down says so", async () => {
    const job = await running("far down"), rest = Array.from({ length: 60 }, (_, n) => (spec(`above ${n}`, RANKS, 10)));
    for (const body of rest) await server.ask("/jobs", body).then(({ id }) => server.ask(`/jobs/${id}/cancel`, {}));
    const page = await reading("/jobs"), row = page.locator(`#rows tr[data-id="${job.id}"]`);
    await until("the reader has come to it", async () => { await page.evaluate(() => scrollTo(0, document.body.scrollHeight)); return row.isVisible(); });
    assert.equal(await row.getAttribute("data-state"), "running");
    assert.ok(await page.locator("#rows tr").evaluateAll((all, id) => all.findIndex((tr) => tr.dataset.id === id) >= 50, job.id), "it is further down than the first part");
    line.forget();
    await finish(job, 20);
    await page.clock.runFor(50_000);
    await until("it says that it is over", async () => { await page.clock.runFor(6000); return (await row.getAttribute("data-state")) === "succeeded"; });
    assert.ok(await page.evaluate(() => window.sameDocument), "without being loaded again");
    await page.end();
  });

  test("under Compare: a job that ended meanwhile has its last points", async () => {
    const job = await running("compared"), page = await reading(`/compare?jobs=${job.id}&metric=loss,images_per_second`);
    const points = (metric) => page.evaluate((metric) => window.lockstep.charts[metric].snapshot().map((s) => s.points).join(), metric);
    await until("its first points are drawn", async () => (await points("loss")) === "10");
    line.forget();
    await tell(job, 11, 20);
    await finish(job, 20);
    await page.clock.runFor(50_000);
    await until("all of them are", async () => (await points("loss")) === "20");
    await until("and its end is told", async () => /succeeded/.test(await page.locator("#results").textContent()));
    assert.ok(await page.evaluate(() => window.sameDocument), "without being loaded again");
    await page.end();
  });

  test("under a job's page, with more missed than is sent again: its panels and ranks are those of now", async () => {
    const job = await running("far behind"), page = await reading(`/jobs/${job.id}`), tab = (name) => page.getByRole("tab", { name, exact: true });
    for (const name of ["Histograms", "Network"]) assert.equal(await tab(name).isVisible(), false);
    line.forget();
    await agent.evaluate(async (id) => {
      const attempt = await window.simulatedAgent.attempt(id), at = new Date().toISOString();
      const counts = Array.from({ length: 64 }, (_, k) => 40 - Math.abs(k - 32)), layer = { name: "conv1.weight", kind: "weight", min: -0.5, max: 0.5, counts };
      await window.simulatedAgent.report(attempt, 0, [
        { type: "network", layers: [{ name: "conv1", kind: "conv 3x3", output_shape: [16, 8, 8], parameters: 432, time_us: 10.5 }] },
        { type: "histograms", step: 10, layers: [layer] },
        { type: "rank", rank: 1, report: { status: "evaluating", step: 10, epoch: 1, step_ms: 1.5, all_reduce_ms: 0.5, data_ms: 0.5, images_per_second: 10.5, pid: 4711, device: "a device of now" } },
      ]);
      for (let part = 0; part < 25; part++) await window.simulatedAgent.report(attempt, 0, Array.from({ length: 1000 }, (_, i) => ({ type: "log", rank: 0, lines: [{ number: 1000 * part + i + 100, at, text: "one of very many" }] })));
    }, job.id);
    await tell(job, 11, 20);
    await page.clock.runFor(50_000);
    for (let rank = 0; rank < RANKS; rank++) await until(`every loss of rank ${rank}`, async () => (await losses(page))[`rank ${rank}`]?.points === 20);
    for (const name of ["Histograms", "Network"]) await until(`${name} is offered`, () => tab(name).isVisible());
    await until("the rank's report is the newest", async () => /a device of now/.test(await page.locator("#ranks li").nth(1).textContent()));
    await tab("Histograms").click();
    await until("they are shown", () => page.locator("#histogram-rows tr").first().isVisible());
    await tab("Network").click();
    await until("it is shown", () => page.locator("#network-rows tr").first().isVisible());
    assert.ok(await page.evaluate(() => window.sameDocument), "without being loaded again");
    await page.end();
  });

  /** What is under way when nothing more is heard stays so: the requests that the page makes by itself until it notices. */
  const frozen = async (page) => {
    line.forget();
    await page.clock.runFor(10_000);
    await until("a request is under way", () => page.underWay.size > 0);
    await page.clock.runFor(40_000);
  };

  test("under Machines: one that is drained meanwhile says so", async () => {
    const page = await reading("/machines"), drain = (way) => fetch(`${server.url}/api/v1/agents/made-up/${way}`, { method: "POST" }).then((response) => assert.ok(response.ok, way));
    await until("it is there", async () => /made-up/.test(await page.locator("#machines").innerText()));
    await frozen(page);
    await drain("drain");
    await until("the machine is drained", async () => { await page.clock.runFor(6000); return (await page.locator(".warnings").innerText()).includes("Drained"); });
    assert.ok(await page.evaluate(() => window.sameDocument), "without being loaded again");
    await drain("undrain");
    await page.end();
  });

  test("under the queue: a job that came meanwhile stands in it", async () => {
    await running("holds every slot");
    const page = await reading("/queue");
    await frozen(page);
    const { id } = await server.ask("/jobs", spec("waits meanwhile", RANKS, 10));
    await until("it is there", async () => { await page.clock.runFor(6000); return /waits meanwhile/.test(await page.locator("#queue").innerText()); });
    assert.ok(await page.evaluate(() => window.sameDocument), "without being loaded again");
    await page.end();
    await server.ask(`/jobs/${id}/cancel`, {});
  });

  test("under the list by groups: a group that came meanwhile is there", async () => {
    const job = await running("in groups"), page = await reading("/jobs?group_by=project");
    await until("it is grouped", () => page.locator(".group-head").first().isVisible());
    const asked = page.waitForRequest(/jobs\/groups/);
    await tell(job, 11, 12);
    await until("the groups are asked for", async () => { await page.clock.runFor(500); return Promise.race([asked.then(() => true), new Promise((done) => setTimeout(done, 50))]); });
    line.forget();
    await page.clock.runFor(40_000);
    await server.ask("/jobs", { ...spec("of another project", RANKS, 10), project: "came-meanwhile" }).then(({ id }) => server.ask(`/jobs/${id}/cancel`, {}));
    await until("its group is there", async () => { await page.clock.runFor(6000); return /came-meanwhile/.test(await page.locator("#jobs").innerText()); });
    assert.ok(await page.evaluate(() => window.sameDocument), "without being loaded again");
    await page.end();
  });

  test("under the list while older rows are read: they come nevertheless", async () => {
    // The others find no slots: none starts, and is not there to be stopped.
    await running("the newest that runs");
    for (let n = 0; n < 60; n++) await server.ask("/jobs", spec(`older ${n}`, RANKS, 10)).then(({ id }) => server.ask(`/jobs/${id}/cancel`, {}));
    const page = await reading("/jobs");
    await until("what it asked for is here", () => page.underWay.size === 0);
    const rows = page.locator("#rows tr"), first = await rows.count(), asked = page.waitForRequest(/api\/v1\/jobs\?.*cursor/);
    line.forget();
    await until("they are asked for", async () => { await page.evaluate(() => scrollTo(0, document.body.scrollHeight)); return Promise.race([asked, new Promise((done) => setTimeout(done, 100))]); });
    await page.clock.runFor(50_000);
    await until("they are there", async () => { await page.clock.runFor(1000); await page.evaluate(() => scrollTo(0, document.body.scrollHeight)); return (await rows.count()) > first; });
    assert.ok(await page.evaluate(() => window.sameDocument), "without being loaded again");
    await page.end();
  });

  test("is not seen in one that is quiet: heartbeats come", async () => {
    const job = await running("quiet"), page = await browser.page({ url: line.url }, "/docs"), sockets = [];
    page.on("websocket", (socket) => sockets.push(socket));
    const heard = new Promise((done) => page.on("websocket", (socket) => socket.on("framereceived", ({ payload }) => { if (/"type":"heartbeat"/.test(payload)) done(JSON.parse(payload)); })));
    await page.goto(`${line.url}/jobs/${job.id}`);
    await until("the page is live", async () => (await page.locator("#live").textContent()) === "live");
    const { at } = await heard;
    assert.ok(Math.abs(Date.parse(at) - Date.now()) < 5000, "with the server's time");
    assert.equal(sockets.length, 1);
    await page.end();
  });
});

/** A line between browser and server that can go dead: connections stay open, and nothing comes through any more. */
class Line {
  static async open(port) {
    const line = new Line();
    line.ends = new Set();
    line.server = createServer((from) => {
      const to = connect(port, "127.0.0.1"), ends = [from, to], pair = { dead: false, ends };
      line.ends.add(pair);
      for (const [one, other] of [[from, to], [to, from]]) {
        one.on("data", (bytes) => { if (!pair.dead) other.write(bytes); });
        one.on("close", () => { if (!pair.dead) other.destroy(); });
        one.on("error", () => {});
      }
    });
    await new Promise((done) => line.server.listen(0, "127.0.0.1", done));
    line.url = `http://127.0.0.1:${line.server.address().port}`;
    return line;
  }

  /** Every connection there is goes dead; new ones work. */
  forget() { for (const pair of this.ends) pair.dead = true; }

  close() {
    for (const { ends } of this.ends) for (const end of ends) end.destroy();
    this.server.close();
  }
}
