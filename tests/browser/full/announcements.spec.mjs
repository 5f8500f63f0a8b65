// Announcements to screen readers: a state is announced once, not with every change of a number.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { range, simulateAgent, spec } from "../agent.mjs";
import { Browser, TestServer, until, untilLive } from "../test-server.mjs";

let server, browser, agent, job, attempt;
const layer = { name: "conv1.weight", kind: "weight", min: -0.5, max: 0.5, counts: range(0, 63).map((k) => 40 - Math.abs(k - 32)) };
const reportHistograms = (step) => agent.report(attempt, 0, [{ type: "histograms", step, layers: [layer] }]);
const reportMetrics = (first, last) => agent.reportSteps(attempt, 0, range(first, last), { loss: (s) => 2 / s + 0.5, step_ms: 40.5 });
before(async () => {
  [server, browser] = await Promise.all([TestServer.open({ agent: false, dataset: false }), Browser.open()]);
  agent = await simulateAgent(browser.chromium, server, 3);
  job = (await server.ask("/jobs", spec("announced", 1, 1000))).id;
  attempt = await agent.attempt(job);
  await agent.begin(attempt);
  await agent.report(attempt, 0, [{ type: "checkpoint", epoch: 1, step: 5, val_accuracy: 0.5, val_loss: 1.5, best: true, size_bytes: 1234567 }]);
  await reportMetrics(1, 10);
  await reportHistograms(10);
});
after(async () => { await browser?.close(); await server?.close(); });

/** Records all further announcements of the page's live regions. */
const recordAnnouncements = (page) => page.evaluate(() => {
  window.announced = [];
  const live = document.querySelectorAll('[role="status"], [role="alert"], [aria-live="polite"], [aria-live="assertive"]');
  const note = (node) => { const text = node.textContent.trim(); if (text) window.announced.push(text); };
  for (const node of live) new MutationObserver(() => note(node)).observe(node, { childList: true, characterData: true, subtree: true });
});
const announced = (page) => page.evaluate(() => window.announced);

describe("live regions", () => {
  test("announce nothing while only numbers change", async () => {
    const { id } = await server.ask("/jobs", spec("announces nothing", 2, 120)), attempt = await agent.attempt(id);
    const report = async (first, last) => { for (const rank of [0, 1]) await agent.reportSteps(attempt, rank, range(first, last), { loss: (s) => 2.5 - s / 200, step_ms: (s) => 50.5 + s }); };
    await agent.begin(attempt, { total_steps: 120 });
    await report(1, 5);
    const page = await browser.page(server, `/jobs/${id}`);
    await untilLive(page);
    await recordAnnouncements(page);
    for (let step = 6; step <= 50; step++) {
      await report(step, step);
      await until("the step is shown", async () => Number(await page.locator("#step").textContent()) >= step);
    }
    assert.deepEqual(await announced(page), []);
    await agent.endAttempt(attempt, { how: "succeeded", step: 120 });
  });

  test("announce the evaluation of a checkpoint, but not its seconds", async () => {
    const page = await browser.page(server, `/jobs/${job}`);
    await page.route("**/evaluation?*", (route) => route.fulfill({ status: 202, json: { detail: "1-5 is being evaluated on machine-a; ask again" } }));
    await recordAnnouncements(page);
    await page.locator('[data-tab="evaluation"]').click();
    const secs = page.locator("#evaluation-secs");
    await until("seconds count up", async () => Number.parseInt(await secs.textContent(), 10) >= 5);
    assert.equal(await secs.evaluate((node) => Boolean(node.closest('[aria-hidden="true"]') && !node.closest("[role=status]"))), true);
    assert.deepEqual((await announced(page)).filter((text) => /valuat/.test(text)), ["Evaluating on the validation pictures …", "1-5 is being evaluated on machine-a …"]);
  });

  test("announce the inspection of a dataset, but not its counts", async () => {
    const page = await browser.page(server, "/datasets");
    let inspected = 0;
    await page.route("**/datasets/inspect?*", async (route) => { await new Promise((done) => setTimeout(done, 50)); return route.fulfill({ status: 202, json: { inspected: inspected += 1000, total: 2_000_000 } }); });
    await recordAnnouncements(page);
    await page.locator("#d-path").fill("/data/pictures");
    await until("the inspection has counted files", () => inspected >= 20_000);
    await until("the count is shown", async () => /^[\d,]+ of 2,000,000$/.test(await page.locator("#add-count").textContent()));
    assert.deepEqual(await announced(page), ["Inspecting the files …"]);
  });

  test("announce a step of the histograms that is chosen by keyboard, but not each new step", async () => {
    const page = await browser.page(server, `/jobs/${job}?tab=histograms`), status = page.locator("#histogram-status");
    await until("the status names one step", async () => /at 1 step$/.test(await status.textContent()));
    await recordAnnouncements(page);
    for (const step of [20, 30]) {
      await reportHistograms(step);
      await until("the status counts the new step", async () => (await status.textContent()).endsWith(`at ${step / 10} steps`));
    }
    // The status before the first new step may be announced after the recording has begun, so one announcement is allowed.
    assert.ok((await announced(page)).filter((text) => /histogram|layer|step \d/.test(text)).length <= 1, (await announced(page)).join("\n"));
    await page.locator("#histogram-chart").focus();
    await page.keyboard.press("ArrowLeft");
    await until("a step chosen by keyboard is announced", async () => (await announced(page)).some((text) => /^step \d+, attempt 1/.test(text)));
  });

  test("announce a failed action, whose message survives the redraw of each second", async () => {
    // The clock must be installed before the job's page loads, so another page is opened first.
    const page = await browser.page(server, "/docs", { expectedErrors: [/409/] }), what = page.locator("#banner-what"), detail = "It is being cancelled.";
    await page.clock.install();
    await page.route("**/pause", (route) => route.fulfill({ status: 409, contentType: "application/problem+json", body: JSON.stringify({ title: "conflict", status: 409, detail }) }));
    await page.goto(`${server.url}/jobs/${job}`);
    await untilLive(page);
    await recordAnnouncements(page);
    const refused = "The action failed.", countRefusals = () => announced(page).then((all) => all.filter((text) => text === `${refused} ${detail}`).length);
    for (const count of [1, 2]) {
      await page.getByRole("button", { name: "Pause", exact: true }).click();
      await until("the failure is announced", async () => (await countRefusals()) === count, 20_000);
      assert.equal(await page.locator("#banner-why").textContent(), detail);
      // The page draws its numbers each second.
      for (let secs = 0; secs < 5; secs++) { await page.clock.runFor(1000); assert.equal(await what.textContent(), refused); }
    }
    await page.clock.runFor(6000);
    assert.ok((await what.textContent()) !== refused || await page.locator("#banner").isHidden(), "the message disappears after some seconds");
    assert.equal(await countRefusals(), 2);
  });

  test("announce a standstill, but not its seconds", async () => {
    const page = await browser.page(server, "/docs");
    await page.clock.install();
    await page.goto(`${server.url}/jobs/${job}`);
    await untilLive(page);
    await recordAnnouncements(page);
    const what = page.locator("#banner-what"), shown = new Set();
    await until("the banner reports the standstill", async () => { await page.clock.runFor(1000); return /No rank has moved for/.test(await what.textContent()); });
    for (let secs = 0; secs < 10; secs++) { await page.clock.runFor(1000); shown.add(await what.textContent()); }
    assert.ok(shown.size > 5, `the seconds count up: ${[...shown]}`);
    assert.equal((await announced(page)).filter((text) => /No rank has moved/.test(text)).length, 1, (await announced(page)).join("\n"));
    // A second standstill is announced again.
    await reportMetrics(11, 20);
    await until("the banner disappears after new steps", async () => { await page.clock.runFor(1000); return page.locator("#banner").isHidden(); });
    await until("the second standstill is announced", async () => { await page.clock.runFor(1000); return (await announced(page)).filter((text) => /No rank has moved/.test(text)).length === 2; });
  });
});
