// All pages show the same figures: a job's speed, its history, and its values in the list and in Compare. The agent is simulated.

import assert from "node:assert/strict";
import { mkdir, readFile, rm } from "node:fs/promises";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { range, simulateAgent, spec } from "./agent.mjs";
import { Browser, TestServer, saveChart, testInFullRun, until, untilLive, untilAsRendered } from "./test-server.mjs";

const STEP_MS = [10, 20, 60];
let server, browser, agent;
before(async () => {
  [server, browser] = await Promise.all([TestServer.open({ dataset: false, agent: false }), Browser.open()]);
  agent = await simulateAgent(browser.chromium, server, 4);
});
after(async () => { await browser?.close(); await server?.close(); });

const begin = (attempt, start_step = 0) => agent.begin(attempt, { total_steps: 600, start_step });
/** Reports steps with the durations of STEP_MS in turn. */
const reportSteps = async (attempt, ranks, from, to) => {
  for (let rank = 0; rank < ranks; rank++) await agent.reportSteps(attempt, rank, range(from, to), { loss: (s) => 2 - s / 400 + rank / 10, accuracy: (s) => s / 1000, step_ms: (s) => STEP_MS[s % 3] });
};
const killed = { how: "failed", retriable: true, reason: { code: "rank_killed", rank: 1, step: 300, signal: 9, words: "rank 1 was killed by signal 9 at step 300" } };
const checkpoint = (step) => ({ type: "checkpoint", epoch: 1, step, val_accuracy: 0.5, val_loss: 1.5, validation: { pictures: 187, fingerprint: "5f3a" }, best: true, size_bytes: 188743680 });
const number = (text) => Number(text.match(/[\d,.]+/)?.[0].replaceAll(",", ""));
const untilShows = (page, selector, text) => until(`${selector} says ${text}`, async () => (await page.locator(selector).first().textContent()).includes(text));

test("numbers and names have the same texts on a rendered and on a live page", async () => {
  const cases = JSON.parse(await readFile(new URL("../../web/src/texts.json", import.meta.url), "utf8")), page = await browser.page(server, "/jobs");
  const differing = await page.evaluate(async (cases) => {
    const scripts = ["numbers", "cut", "jobs/row", "job/names", "job/checkpoints"], functions = Object.assign({}, ...await Promise.all(scripts.map((name) => import(`/static/${name}.js`))));
    return Object.entries(cases).flatMap(([name, all]) => all.map(([given, rendered]) => ({ name, given, rendered, live: functions[name](...given) }))).filter(({ rendered, live }) => live !== rendered);
  }, cases);
  assert.deepEqual(differing, []);
});

describe("a job", () => {
  testInFullRun("that diverges has an axis with distinct labels", async () => {
    const page = await browser.page(server, "/jobs");
    const labels = await page.evaluate(async () => {
      const { formatTick } = await import("/static/job/names.js"), { linearTicks } = await import("/static/chart/scale.js");
      return [[0, 3.2e31], [2e-5, 9e-5], [1.23e6, 1.26e6]].map(([low, high]) => linearTicks(low, high, 7).map(formatTick));
    });
    assert.deepEqual(labels[0], ["0", "5e30", "1e31", "1.5e31", "2e31", "2.5e31", "3e31"]);
    for (const all of labels) assert.equal(new Set(all).size, all.length, all.join());
  });

  test("has the same speed on every page, and its history shows why an attempt ended", async () => {
    const job = await server.ask("/jobs", spec("killed once", 2, 600));
    let attempt = await agent.attempt(job.id);
    await begin(attempt);
    await reportSteps(attempt, 2, 1, 300);
    // A checkpoint without files has no actions.
    const folder = join(server.dir, "jobs", job.id, "checkpoints", "1-290");
    await mkdir(folder, { recursive: true });
    await agent.report(attempt, 0, [checkpoint(290)]);
    await agent.endAttempt(attempt, killed);
    attempt = await agent.attempt(job.id, 2);
    await begin(attempt, 290);
    const page = await browser.page(server, `/jobs/${job.id}`), list = await page.tab("/jobs"), compare = await page.tab(`/compare?jobs=${job.id}`);
    await untilLive(page);
    // The attempt has no loss yet, and the loss of step 300 belongs to the attempt before.
    for (const [id, text] of [["#step", "290"], ["#loss", "–"]]) await untilShows(page, id, text);
    const evaluation = (epoch, accuracy) => ({ type: "evaluation", epoch, step: 290, samples: 100, accuracy, loss: 1.5, secs: 1.5 });
    await agent.report(attempt, 0, [evaluation(2, 0.875), evaluation(3, 0.75)]);
    await reportSteps(attempt, 2, 291, 320);

    // 30 steps of 16 pictures, ten of each duration. The mean of the steps' speeds would be 889.
    const speed = 30 * 16 / 0.9, speedText = String(Math.round(speed)), secsLeft = 280 * 16 / speed;
    const current = await until("the server has all steps", async () => { const j = await server.job(job.id); return j.step === 320 && Math.abs(j.images_per_second - speed) < 0.5 && j; });
    assert.ok(Math.abs(current.eta_secs - secsLeft) < 0.05, `${current.eta_secs} s left instead of ${secsLeft}`);
    await untilShows(page, "#speed", speedText);
    await untilShows(page, "#speed-more", `${Math.round(speed / 2)} per rank`);
    await untilShows(page, "#speed-note", `${speedText} in all`);
    await untilShows(list, `tr[data-id="${job.id}"] [data-f=speed]`, speedText);
    assert.equal(await list.locator(`tr[data-id="${job.id}"] [data-f=best]`).textContent(), "87.5 %", "the best accuracy, not the last");
    // An accuracy of few pictures is shown with its standard error and their number.
    for (const [tab, selector, text] of [
      [list, `tr[data-id="${job.id}"] .c-best`, "87.5 % ± 3.3 of 100"],
      [compare, "#results [data-column='best accuracy']", "87.5 % ± 3.3 of 100"],
      [compare, "#results [data-column='val. accuracy']", "75.0 % so far ± 4.3 of 100"],
    ]) await untilShows(tab, selector, text);
    await until("Compare shows the same speed", async () => (await compare.locator("#results [data-column='images/s']").textContent()) === speedText);
    await until("the list and the page agree on the time left", async () => {
      const left = await page.locator("#left").textContent();
      return (await list.locator(`tr[data-id="${job.id}"] [data-f=progress]`).textContent()).includes(`${left} left`);
    });
    const speeds = await page.evaluate(() => { const g = window.lockstep.charts.images_per_second.layers()[0].series.segments.at(-1); return { max: Math.max(...g.max), min: Math.min(...g.min) }; });
    assert.ok(Math.abs(speeds.max - 1600) < 0.1 && Math.abs(speeds.min - 16000 / 60) < 0.1, `each point is its step's own speed: ${JSON.stringify(speeds)}`);
    assert.match(await compare.locator("#results").textContent(), /so far/, "Compare marks the loss of a running job as not final");

    // The history shows which rank failed, why, and from which checkpoint the next attempt continued.
    await page.getByRole("tab", { name: "History" }).click();
    const row = page.locator('#history-rows li[data-what="ended"][data-attempt="1"]');
    await until("the history shows the first attempt's end", () => row.isVisible());
    const ended = await row.textContent();
    for (const part of ["Attempt 1 failed", "rank 1 was killed by signal 9", "the next attempt continued from 1-290"]) assert.ok(ended.includes(part), `${part} in ${ended}`);
    assert.deepEqual(await page.locator("#history-rows li").evaluateAll((all) => all.map((li) => li.dataset.what)), ["submitted", "started", "ended", "started"]);
    assert.deepEqual(await page.evaluate(() => [...window.lockstep.charts.loss.marks]), [[2, "rank 1 was killed by signal 9 at step 300"]]);

    await agent.endAttempt(attempt, { how: "succeeded", step: 600 });
    await until("the job has ended", async () => (await page.locator("#state").textContent()) === "succeeded");
    assert.equal(number(await page.locator("#speed").textContent()), Number(speedText), "the speed is kept after the end");
    await untilShows(list, `tr[data-id="${job.id}"] [data-f=speed]`, speedText);
    // The table of checkpoints, with all its buttons, is inside its card.
    for (const width of [1440, 1280, 390]) {
      await page.setViewportSize({ width, height: 900 });
      assert.equal(await page.locator("#checkpoints .row-actions > button").count(), 4);
      const over = await page.locator(".checkpoints-card").evaluate((card) => Math.max(...[...card.querySelectorAll("td, td > *")].map((node) => node.getBoundingClientRect().right)) - card.getBoundingClientRect().right);
      assert.ok(over < 0, `${over} pixels too wide at ${width}`);
      if (width === 390) continue;
      const centres = await page.locator("#checkpoints tr").first().locator(".row-actions > *, [data-f=accuracy]").evaluateAll((nodes) => nodes.map((node) => { const { top, bottom } = node.getBoundingClientRect(); return (top + bottom) / 2; }));
      assert.ok(Math.max(...centres) - Math.min(...centres) < 6, `the row has one line at ${width}: ${centres}`);
      assert.equal(await page.locator("#checkpoints [data-f=accuracy]").first().evaluate((cell) => { const range = document.createRange(); range.selectNodeContents(cell); return range.getClientRects().length; }), 1, `the accuracy has one line at ${width}`);
    }
    await until("Compare shows the job's end", async () => /succeeded/.test(await compare.locator("#results").textContent()) && !/so far/.test(await compare.locator("#results").textContent()));
    const offers = page.locator("#predict:not([hidden]), #fork:not([hidden]), #classify-checkpoint option, #evaluation-checkpoint option");
    assert.equal(await offers.count(), 4);
    await rm(folder, { recursive: true });
    await page.reload();
    await until("the page marks the checkpoint", () => page.getByText("files missing").first().isVisible());
    assert.equal(await offers.count(), 0, "a checkpoint without files is not offered");
  });

  test("that waits, failed or was cancelled before its first step shows why and what to do, in place of empty charts", async () => {
    const busy = await server.ask("/jobs", spec("busy", 4, 600)), attempt = await agent.attempt(busy.id);
    await begin(attempt);
    const waits = await server.ask("/jobs", spec("waits", 4, 600)), page = await browser.page(server, `/jobs/${waits.id}`);
    await untilShows(page, "#banner", "number 1 in the queue");
    await untilShows(page, "#banner", "waits for 4 slots");
    const todo = page.locator(".instead");
    await until("the page says that nothing needs to be done", async () => /^What to do\s+Nothing: the job starts by itself/.test(await todo.innerText()));
    assert.ok(!await page.locator("#loss-chart").isVisible(), "no empty chart");
    await untilAsRendered(page);
    const cancelled = await page.tab(`/jobs/${busy.id}`);
    await until("the chart of the running job says that it has no point", async () => (await cancelled.locator("#loss-chart").getAttribute("data-empty")) === "No point yet.");
    await server.ask(`/jobs/${busy.id}/cancel`, {});
    await agent.endAttempt(attempt, { how: "stopped" });
    await until("the message names the cancellation", async () => /cancelled before its first step/.test(await cancelled.locator(".instead").innerText()));
    const nextAttempt = await agent.attempt(waits.id);
    await begin(nextAttempt);
    await until("the job runs, and the banner with the earlier reason is gone", async () => (await page.locator("#state").textContent()) === "running" && !(await page.locator("#banner").isVisible()));
    await agent.endAttempt(nextAttempt, { how: "failed", retriable: false, reason: { code: "dataset_unusable", words: "its pictures are gone" } });
    await untilShows(page, "#banner", "its pictures are gone");
    await until("the page says what to do", async () => /ended before its first step/.test(await todo.innerText()));
    await untilShows(page, "#log-lines", "No line: the job ended before a rank wrote one.");
    await untilAsRendered(page);
    const list = await page.tab("/jobs");
    await until("the list is live", async () => (await list.locator("#live").textContent()) === "live" && (await list.locator("#rows .parts").count()) > 0);
    await untilAsRendered(list);
  });
});

describe("a job that continues with fewer ranks", () => {
  testInFullRun("averages over the ranks of each attempt, and hides ranks that the newest attempt lacks", async () => {
    const { id } = await server.ask("/jobs", { ...spec("fewer", 4, 600), recovery: { min_ranks: 2, wait_seconds: 0 } });
    const first = await agent.attempt(id);
    const reportTimes = async (attempt, stepMs, to) => {
      for (const [rank, ms] of stepMs.entries()) await agent.reportSteps(attempt, rank, range(1, to), { loss: attempt.attempt + rank / 4, step_ms: ms, all_reduce_ms: 1.5, data_ms: 0.5 });
    };
    await begin(first);
    await reportTimes(first, [40.5, 10.5, 10.5, 10.5], 100);
    const page = await browser.page(server, `/jobs/${id}`);
    await until("four lanes are shown", async () => (await page.locator("#ranks li:visible").count()) === 4);
    await untilLive(page);
    // The machine leaves in an orderly way and joins again with half of its slots.
    await agent.say({ type: "leaving", reason: "the agent was stopped" });
    await agent.endAttempt(first, { how: "stopped" });
    await agent.close();
    agent = await simulateAgent(browser.chromium, server, 2);
    const second = await agent.attempt(id);
    assert.equal(second.attempt, 2);
    await begin(second);
    await reportTimes(second, [40.5, 40.5], 60);
    // For each attempt the number of means, and the newest mean: 1 + (0 + 1 + 2 + 3) / 4 / 4 with four ranks, 2 + (0 + 1) / 4 / 2 with two.
    const means = (page) => page.evaluate(() => window.lockstep.metrics.mean("loss").segments.map((s) => `${s.attempt}: ${s.length} of ${s.newestValue}`).join());
    const expected = "1: 100 of 1.375,2: 60 of 2.125", reloaded = await page.tab(`/jobs/${id}`), compare = await page.tab(`/compare?jobs=${id}`);
    for (const [tab, which] of [[page, "the open page"], [reloaded, "a new page"]]) {
      await until(`${which} has the means`, async () => (await means(tab)) === expected || Promise.reject(new Error(await means(tab))), 20_000);
      await untilShows(tab, "#loss", "2.125");
      await untilShows(tab, "#about", "2 of 4 ranks");
      await until("two lanes are left", async () => (await tab.locator("#ranks li:visible").count()) === 2, 20_000);
      await untilShows(tab, "#wait", "3.7 %");
      await until("no rank is reported as slow", async () => (await tab.locator("#ranks-note").textContent()).includes("limited by computing") && !(await tab.locator("#banner").isVisible()), 20_000);
    }
    const compared = (tab) => tab.evaluate(() => window.lockstep.chart.snapshot().map((s) => `${s.attempt}: ${s.points} of ${s.value}`).join());
    await until("Compare shows the same means", async () => (await compared(compare)) === expected || Promise.reject(new Error(await compared(compare))), 20_000);
    await agent.endAttempt(second, { how: "succeeded", step: 600 });
    await until("the job has ended", async () => (await page.locator("#state").textContent()) === "succeeded");
    const reopened = await page.tab(`/jobs/${id}`);
    await until("the means are the same after the job's end", async () => (await means(reopened)) === expected, 20_000);
    await until("the lanes of the last attempt are shown", async () => (await reopened.locator("#ranks li:visible").count()) === 2, 20_000);
    await page.end();
    await agent.close();
    agent = await simulateAgent(browser.chromium, server, 4);
  });
});

describe("a log", () => {
  test("that does not follow its end shows each line once, including lines that arrive during a read", async () => {
    const { id } = await server.ask("/jobs", spec("writes", 1, 600)), attempt = await agent.attempt(id), at = new Date().toISOString();
    const write = (from, to) => agent.report(attempt, 0, [{ type: "log", rank: 0, lines: range(from, to).map((number) => ({ number, at, text: `line ${number} of it` })) }]);
    await begin(attempt);
    for (let from = 1; from <= 300; from += 50) await write(from, from + 49);
    const page = await browser.page(server, `/jobs/${id}`), box = page.locator("#log-lines"), follow = page.locator("#log-follow");
    const untilAnnounced = (n) => until(`the page knows of ${n} lines`, async () => (await box.getAttribute("data-lines")) === String(n));
    await untilLive(page);
    await untilAnnounced(300);
    await box.evaluate((b) => { b.scrollTop = 0; });
    await until("the log no longer follows its end", async () => !await follow.isChecked());
    await write(301, 305);
    await untilAnnounced(305);
    // Delays a response, so that it lacks the lines that arrive meanwhile.
    let reads = 0, answered = 0;
    await page.route("**/logs?*after=*", async (route) => {
      const response = await route.fetch();
      if (reads++ === 0) { await write(306, 310); await untilAnnounced(310); }
      await route.fulfill({ response });
      answered++;
    });
    const toEnd = () => box.evaluate((b) => { b.scrollTop = b.scrollHeight; });
    await toEnd();
    await until("more lines are read", () => answered > 0);
    await until("the log follows its end again", async () => { await toEnd(); return follow.isChecked(); }, 20_000);
    await write(311, 311);
    // Rank and number of each line. `data-at` has the event and the attempt before them.
    const expected = Array.from({ length: 311 }, (_, i) => `0.${i + 1}`);
    const shown = () => box.locator("[data-at]").evaluateAll((rows) => rows.map((row) => row.dataset.at.split(".").slice(2).join(".")));
    await until("each line is shown once", async () => { assert.deepEqual(await shown(), expected); return true; }, 20_000);
    await agent.endAttempt(attempt, { how: "succeeded", step: 600 });
  });
});

describe("a chart", () => {
  test("of a newly chosen metric has the points that arrive while its history is read", async () => {
    const { id } = await server.ask("/jobs", spec("chosen", 1, 600)), attempt = await agent.attempt(id);
    const reportNorms = (from, to) => agent.reportSteps(attempt, 0, range(from, to), { grad_norm: 1.5 });
    await begin(attempt);
    await reportNorms(1, 20);
    const page = await browser.page(server, `/jobs/${id}`), seq = () => page.evaluate(() => window.lockstep.seq);
    await untilLive(page);
    await page.route("**/metrics?name=grad_norm*", async (route) => {
      const response = await route.fetch(), before = await seq();
      await reportNorms(21, 30);
      await until("the page receives more events", async () => (await seq()) > before);
      await route.fulfill({ response });
    });
    await page.locator("#other-metric").selectOption("grad_norm");
    const points = () => page.evaluate(() => window.lockstep.charts.lr.snapshot().map((line) => `${line.points} to ${line.step}`).join());
    await until("all points are drawn", async () => (await points()) === "30 to 30" || Promise.reject(new Error(await points())), 20_000);
    await reportNorms(31, 40);
    await until("new points are drawn", async () => (await points()) === "40 to 40", 20_000);
    await agent.endAttempt(attempt, { how: "succeeded", step: 600 });
  });

  test("has a slider and a range, and is saved with title, axes, units and legend", async () => {
    const job = await server.ask("/jobs", spec("drawn", 2, 600)), attempt = await agent.attempt(job.id);
    await begin(attempt);
    await reportSteps(attempt, 2, 1, 200);
    for (const rank of [0, 1]) await agent.reportSteps(attempt, rank, [201], { loss: 5000 });
    await agent.endAttempt(attempt, { how: "succeeded", step: 600 });
    const page = await browser.page(server, `/jobs/${job.id}`);
    const axis = () => page.evaluate(() => { const { y } = window.lockstep.charts.loss; return [y.low, y.high]; });
    await until("the chart is drawn", () => page.evaluate(() => window.lockstep.charts.loss.firstDrawnAt > 0));
    assert.ok((await axis())[1] >= 5000);
    const card = page.locator(".loss-card");
    await card.locator("summary", { hasText: "Range" }).click();
    await card.getByLabel("ignore outliers").check();
    await until("the axis leaves out the outlier", async () => (await axis())[1] < 10);
    await card.getByLabel("from").fill("0.5");
    await card.getByLabel("to", { exact: true }).fill("2.5");
    await card.getByLabel("to", { exact: true }).press("Enter");
    await until("the axis has the chosen range", async () => (await axis()).join() === "0.5,2.5");
    await page.locator("#smooth").fill("0.85");
    await page.locator("#smooth").dispatchEvent("change");
    const address = new URL(page.url());
    assert.deepEqual(["loss-range", "loss-outliers", "smooth"].map((k) => address.searchParams.get(k)), ["0.5~2.5", "no", "0.85"]);
    const tab = await page.tab(address.pathname + address.search);
    await until("a link restores the same chart", async () => (await tab.evaluate(() => { const c = window.lockstep?.charts.loss; return c?.y && [c.y.low, c.y.high, c.smoothing, c.robust].join(); })) === "0.5,2.5,0.85,true");

    const svg = await saveChart(page, card, "SVG");
    for (const text of ["drawn · Loss of each rank", "loss (cross-entropy)", "optimizer step", "rank 0", "rank 1"]) assert.ok(svg.includes(`>${text}</text>`), `${text} in the picture`);
    const bytes = await saveChart(page, card, "PNG");
    assert.equal(bytes.subarray(1, 4).toString(), "PNG");
    const box = await page.locator("#loss-chart").boundingBox();
    assert.ok(bytes.readUInt32BE(20) / 2 > box.height + 60, "the picture has space for names around the chart");
  });
});
