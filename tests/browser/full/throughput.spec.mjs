// The throughput of a job, pictures divided by the training time of the newest attempt, is the same on all pages. The agent is simulated.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdir, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { range, simulateAgent, spec } from "../agent.mjs";
import { BINARY, Browser, TestServer, saveChart, until } from "../test-server.mjs";

let server, browser, agent;
before(async () => {
  [server, browser] = await Promise.all([TestServer.open({ dataset: false, agent: false }), Browser.open()]);
  agent = await simulateAgent(browser.chromium, server, 4);
});
after(async () => { await browser?.close(); await server?.close(); });

/** Reports the steps after `from` up to `to` of an attempt. `ms(step, rank)`: the duration of each step. `fields`: further fields of
 *  the event `running`. */
async function train(attempt, ranks, from, to, ms, fields = {}) {
  await agent.begin(attempt, { total_steps: 120, steps_per_epoch: 30, start_step: from, ...fields });
  for (let rank = 0; rank < ranks; rank++) await agent.reportSteps(attempt, rank, range(from + 1, to), { loss: (s) => 2.5 - s / 200, step_ms: (s) => ms(s, rank), all_reduce_ms: rank * 5.5 });
}
const CHECKPOINT = { type: "checkpoint", epoch: 1, step: 30, val_accuracy: 0.5, val_loss: 1.5, best: true, size_bytes: 1234567 };
const finish = async (attempt, page) => { await agent.endAttempt(attempt, { how: "succeeded", step: 120 }); await page.end(); };
const number = (text) => Number(text?.match(/[\d,]+(\.\d+)?/)?.[0].replaceAll(",", ""));

/** Returns the mean speed of the newest attempt in the first line of the chart of images/s, weighted by time. */
const chartSpeed = (page) => page.evaluate(() => {
  const segment = window.lockstep.charts.images_per_second.layers()[0].series.segments.at(-1), n = segment.length;
  const speeds = segment.mean.subarray(0, n), ms = segment.source.mean.subarray(0, n), counts = segment.counts.subarray(0, n);
  const time = ms.reduce((sum, v, i) => sum + v * counts[i], 0);
  return speeds.reduce((sum, v, i) => sum + v * ms[i] * counts[i], 0) / time;
});

const cli = (...args) => execFileSync(BINARY, [...args, "--server", server.url], { encoding: "utf8" });
/** Returns the value under `head` in a job's row of `lockstep list`. */
function listCell(id, head) {
  const lines = cli("list").split("\n"), column = lines[0].indexOf(head);
  return lines.find((line) => line.startsWith(id)).slice(column).split(" ")[0];
}

/** Checks that the API, the command line and all pages show the speed `expected` within 1 %. Returns the job's page and Compare. */
async function assertSpeed(id, ranks, expected) {
  const assertNear = (what, value) => assert.ok(Math.abs(value / expected - 1) < 0.01, `${what}: ${value} instead of ${expected}`);
  await until("the server has a speed", async () => (await server.job(id)).images_per_second > 0);
  assertNear("the API", (await server.job(id)).images_per_second);
  assertNear("lockstep show", number(cli("show", id).match(/^images a second .*$/m)[0].slice("images a second".length)));
  assertNear("lockstep list", number(listCell(id, "IMAGES/S")));
  const page = await browser.page(server, `/jobs/${id}`), list = await page.tab("/jobs"), compare = await page.tab(`/compare?jobs=${id}&metric=images_per_second`);
  await until("the page shows the speed", async () => number(await page.locator("#speed").textContent()) > 0);
  assertNear("the header", number(await page.locator("#speed").textContent()));
  if (ranks > 1) assertNear("a rank's share", ranks * number(await page.locator("#speed-more").textContent()));
  await until("the chart is drawn", async () => (await page.evaluate(() => window.lockstep.charts.images_per_second.firstDrawnAt)) > 0);
  assertNear("the chart", await chartSpeed(page));
  for (const width of [390, 1024, 1920]) {
    await page.setViewportSize({ width, height: 900 });
    assertNear(`the header at ${width}`, number(await page.locator("#speed").textContent()));
    assertNear(`the chart at ${width}`, await chartSpeed(page));
  }
  assertNear("the chart's note", number((await page.locator("#speed-note").textContent()).match(/[\d,.]+ in all/)[0]));
  const row = list.locator(`tr[data-id="${id}"] [data-f=speed]`);
  await until("the job is listed", async () => number(await row.textContent()) > 0);
  assertNear("the list", number(await row.textContent()));
  await until("Compare has drawn the job", () => compare.evaluate(() => Number(document.querySelector("#curves .chart")?.dataset.drawn) > 0));
  assertNear("Compare's table", number(await compare.locator("#results [data-column='images/s']").textContent()));
  assertNear("Compare's chart", await chartSpeed(compare));
  return { page, compare };
}
/** Returns the time of the newest attempt's last point on Compare's axis of time, in seconds. */
const lastTime = (compare) => compare.evaluate(() => { const { chart } = window.lockstep, segment = chart.layers()[0].series.segments.at(-1); return chart.view.positions(segment)[segment.length - 1]; });
async function assertLastTime(compare, secs) {
  await compare.locator("button[data-axis=time]").click();
  await until(`the last point is at ${secs} s`, async () => Math.abs((await lastTime(compare)) / secs - 1) < 0.01);
}

describe("the throughput of a job", () => {
  test("with one attempt is the same on all pages", async () => {
    const { id } = await server.ask("/jobs", spec("plain", 1, 120)), attempt = await agent.attempt(id);
    await train(attempt, 1, 0, 60, (s) => [10.5, 20.5, 60.5][s % 3]);
    const { page, compare } = await assertSpeed(id, 1, 60 * 8 / (20 * 91.5 / 1000));
    await assertLastTime(compare, 20 * 91.5 / 1000);
    await finish(attempt, page);
  });

  test("that was resumed counts only the newest attempt, without the pause", async () => {
    const { id } = await server.ask("/jobs", spec("paused once", 1, 120));
    let attempt = await agent.attempt(id);
    await train(attempt, 1, 0, 30, () => 100.5);
    await agent.report(attempt, 0, [CHECKPOINT]);
    await server.ask(`/jobs/${id}/pause`, {});
    await agent.endAttempt(attempt, { how: "stopped" });
    await until("the job is paused", async () => (await server.job(id)).state === "paused");
    await server.ask(`/jobs/${id}/resume`, {});
    attempt = await agent.attempt(id, 2);
    await train(attempt, 1, 30, 60, () => 40.5);
    const { page, compare } = await assertSpeed(id, 1, 8 / 0.0405);
    await assertLastTime(compare, 30 * 0.1005 + 30 * 0.0405);
    // The mark at the start of the second attempt names its reason.
    assert.match(await saveChart(page, page.locator(".loss-card"), "SVG"), />attempt 2 \(after a pause on request\)<\/text>/);
    assert.match(await saveChart(compare, compare.locator("#curves .curve").first(), "SVG"), />paused once: attempt 2<\/text>/, "in Compare the mark names its job");
    await page.getByRole("tab", { name: "History" }).click();
    await until("the history lists the pause and the resumption", async () => (await page.locator("#history-rows li").evaluateAll((all) => all.map((li) => li.dataset.what).join())) === "submitted,started,pause_requested,ended,resumed,started");
    await finish(attempt, page);
  });

  test("that was killed and restarted counts only the newest attempt", async () => {
    const { id } = await server.ask("/jobs", spec("killed once", 2, 120));
    let attempt = await agent.attempt(id);
    await train(attempt, 2, 0, 40, () => 80.5);
    await agent.report(attempt, 0, [CHECKPOINT]);
    await agent.endAttempt(attempt, { how: "failed", retriable: true, reason: { code: "rank_killed", rank: 1, step: 40, signal: 9, words: "rank 1 was killed by signal 9 at step 40" } });
    attempt = await agent.attempt(id, 2);
    await train(attempt, 2, 30, 60, (s) => [20.5, 40.5][s % 2]);
    const { page } = await assertSpeed(id, 2, 2 * 16 / 0.061);
    await finish(attempt, page);
  });

  test("on two ranks of different speed counts a step once", async () => {
    const { id } = await server.ask("/jobs", spec("uneven", 2, 120)), attempt = await agent.attempt(id);
    // The faster rank waits for the other rank, so their steps end together.
    await train(attempt, 2, 0, 60, (_, rank) => (rank ? 49.5 : 50.5));
    const { page } = await assertSpeed(id, 2, 16 / 0.0505);
    await finish(attempt, page);
  });

  test("that is a fork counts only its own steps and time", async () => {
    const parent = await server.ask("/jobs", spec("forked from", 1, 120));
    let attempt = await agent.attempt(parent.id);
    await train(attempt, 1, 0, 30, () => 100.5);
    await agent.report(attempt, 0, [CHECKPOINT]);
    await agent.endAttempt(attempt, { how: "succeeded", step: 30 });
    // A checkpoint without files is sufficient, as no rank reads it.
    const folder = join(server.dir, "jobs", parent.id, "checkpoints", "1-30");
    await mkdir(folder, { recursive: true });
    await writeFile(join(folder, "MANIFEST.json"), '{"files":{}}');
    const { id } = await server.ask(`/jobs/${parent.id}/fork`, { checkpoint: "latest", set: { name: "a fork" } });
    attempt = await agent.attempt(id);
    await train(attempt, 1, 30, 60, () => 40.5);
    const { page, compare } = await assertSpeed(id, 1, 8 / 0.0405);
    await assertLastTime(compare, 30 * 0.0405);
    await finish(attempt, page);
  });

  test("whose epochs end with a smaller step counts the actual pictures", async () => {
    const body = spec("a rest", 1, 120);
    body.data.drop_remainder = false;
    const { id } = await server.ask("/jobs", body), attempt = await agent.attempt(id);
    // Steps of 8, 8 and 4.
    await train(attempt, 1, 0, 60, () => 50.5, { steps_per_epoch: 3, train_samples: 20 });
    const { page } = await assertSpeed(id, 1, 20 / (3 * 0.0505));
    await finish(attempt, page);
  });
});
