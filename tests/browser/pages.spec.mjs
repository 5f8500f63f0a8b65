// Reloads, the theme, and the list and the charts of a real job.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { savePicture } from "./looks.mjs";
import { Browser, TestServer, testInFullRun, losses, state, until, untilLive } from "./test-server.mjs";

let server, browser, finished;
before(async () => {
  [server, browser] = await Promise.all([TestServer.open(), Browser.open()]);
  finished = await server.submit({ name: "finished" });
  await until("a job has finished", async () => (await server.job(finished.id)).state === "succeeded");
});
after(async () => { await browser?.close(); await server?.close(); });

describe("pages", () => {
  testInFullRun("load in all tabs that are reloaded at the same time", async () => {
    // A reload may interrupt the opening of a socket, which Chromium reports.
    const page = await browser.page(server, "/jobs", { expectedErrors: [/WebSocket is closed before the connection is established/] });
    const tabs = [page, await page.tab(`/jobs/${finished.id}`), await page.tab("/jobs"), await page.tab(`/jobs/${finished.id}`)];
    for (let round = 0; round < 3; round++) {
      const responses = await Promise.all(tabs.map((tab) => tab.reload()));
      assert.deepEqual(responses.map((response) => response.status()), [200, 200, 200, 200]);
    }
    for (const tab of tabs) await untilLive(tab);
    assert.match(await page.locator("#rows").textContent(), /finished/);
    assert.equal(await state(tabs[1]), "succeeded");
  });

  test("show the audit log without horizontal scrolling, also with a long path", async () => {
    await fetch(`${server.url}/api/v1/datasets/${"a-name-that-nobody-has-".repeat(8)}`, { method: "DELETE", headers: server.headers });
    const page = await browser.page(server, "/audit"), card = page.locator(".card.table");
    await until("the request is listed", async () => /a-name-that-nobody-has/.test(await card.textContent()));
    const over = await card.evaluate((node) => node.scrollWidth - node.clientWidth);
    assert.ok(over <= 0, `the table is ${over} pixels wider than the card`);
    assert.match(await card.innerText(), /this machine tried to remove dataset a-name-that-nobody-has.*refused: 404/s);
    assert.match(await card.innerText(), /this machine submitted job finished/);
    await savePicture(page, "audit");
    await page.getByRole("link", { name: "datasets", exact: true }).last().click();
    await until("only entries of datasets are listed", async () => { const text = await card.innerText(); return /remove dataset/.test(text) && !/submitted job/.test(text); });
    await page.getByLabel("Who").fill("nobody-of-this-name");
    await page.getByRole("button", { name: "Filter" }).click();
    await page.getByText("No entry matches.").waitFor();
  });

  test("show an error in a webhook beside its field and keep the other values, and the audit log describes the attempt", async () => {
    const page = await browser.page(server, "/webhooks", { expectedErrors: [/422/] });
    await page.getByLabel("URL").fill("http://127.0.0.1/hook");
    await page.getByLabel("Format").selectOption("slack");
    await page.getByLabel("Project").fill("vision");
    await page.getByLabel("Job started").check();
    await page.getByRole("button", { name: "Add" }).click();
    await until("the error is beside its field", async () => /^127\.0\.0\.1 belongs to this machine/.test(await page.locator("#w-url-error").textContent()));
    assert.deepEqual(await Promise.all(["URL", "Format", "Project"].map((label) => page.getByLabel(label).inputValue())), ["http://127.0.0.1/hook", "slack", "vision"]);
    assert.ok(await page.getByLabel("Job started").isChecked());
    await page.goto(`${server.url}/audit`);
    await page.getByRole("link", { name: "webhooks", exact: true }).click();
    await until("the attempt is described", async () => /this machine tried to add webhook refused: 422/.test(await page.locator(".card.table").innerText()));
  });

  test("keep a chosen theme", async () => {
    const page = await browser.page(server, "/jobs", { colorScheme: "dark" });
    const background = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
    const dark = await background();
    await page.getByRole("button", { name: "Use the light theme" }).click();
    const light = await background();
    assert.notEqual(light, dark);
    await page.goto(`${server.url}/machines`);
    assert.equal(await background(), light);
  });
});

describe("the list", () => {
  // The job has one rank: with all cores in use, a browser without a GPU would be too slow to draw.
  test("changes in place, and keeps its filter in the URL", async () => {
    const page = await browser.page(server, "/jobs");
    const { id } = await server.submit({ name: "in the list", ranks: 1, train: { steps: 100_000 } });
    const row = page.locator(`tr[data-id="${id}"]`);
    await until("the new job appears without a reload", () => row.isVisible());
    await until("the job runs", async () => (await row.locator("[data-f=state]").textContent()) === "running");
    const progress = await until("the job has progress", async () => Number(await row.locator("progress").getAttribute("value")) || 0);
    await until("the progress grows", async () => Number(await row.locator("progress").getAttribute("value")) > progress);
    await page.locator("#filters [data-state=succeeded]").click();
    await until("only matching jobs are listed", async () => !(await row.isVisible()) && page.locator(`tr[data-id="${finished.id}"]`).isVisible());
    assert.equal(new URL(page.url()).searchParams.get("state"), "succeeded");
    await page.reload();
    assert.equal(await row.isVisible(), false, "the URL keeps the filter");
    await page.locator('#filters [data-state=""]').click();
    await page.keyboard.press("/");
    await page.keyboard.type("in the");
    await until("the search finds the job", async () => (await row.isVisible()) && !(await page.locator(`tr[data-id="${finished.id}"]`).isVisible()));
    await until("the URL has the whole text", () => new URL(page.url()).searchParams.get("q") === "in the");
    await page.keyboard.type(" moon");
    await until("the list says that nothing matches", () => page.locator("#none-match").isVisible());

    const machines = await page.tab("/machines");
    await until("the job's slot is shown as busy", async () => (await machines.locator(".slots .busy").count()) === 1);
    await server.ask(`/jobs/${id}/cancel`, {});
    await until("the slot is free again", async () => (await machines.locator(".slots .busy").count()) === 0);
  });
});

describe("a chart", () => {
  test("shows values to mouse and keyboard, zooms in, and resets the zoom", async () => {
    const page = await browser.page(server, `/jobs/${finished.id}`);
    await until("the chart is drawn", async () => (await losses(page))["rank 1"]?.points === 40 && (await page.locator("#loss-note").textContent()) !== "");
    assert.equal(await page.locator("#loss-note").textContent(), "every point · 2 ranks");
    const chart = page.locator("#loss-chart"), box = await chart.boundingBox();
    await page.mouse.move(box.x + box.width / 2, box.y + box.height / 2);
    const tip = chart.locator(".tip");
    await until("the tooltip shows both ranks", async () => /step \d+.*rank 0\s*\d.*rank 1\s*\d/s.test(await tip.textContent()));

    const drag = async (from, to) => {
      await page.mouse.move(box.x + box.width * from, box.y + 100);
      await page.mouse.down();
      await page.mouse.move(box.x + box.width * to, box.y + 120, { steps: 5 });
      await page.mouse.up();
    };
    await drag(0.3, 0.6);
    const zoom = await page.evaluate(() => window.lockstep.view.zoom);
    assert.ok(zoom && zoom[1] - zoom[0] < 20, `${zoom}`);
    await chart.dblclick({ position: { x: 300, y: 100 } });
    assert.equal(await page.evaluate(() => window.lockstep.view.zoom), null);

    await page.mouse.move(0, 0);
    await chart.focus();
    await page.keyboard.press("Home");
    await page.keyboard.press("ArrowRight");
    await until("the values are announced", async () => /step \d+.*rank 1 \d/.test(await chart.locator("[role=status]").textContent()));
    const zoomWidth = () => page.evaluate(() => { const [from, to] = window.lockstep.view.zoom; return to - from; });
    for (let times = 0; times < 2; times++) {
      await page.keyboard.press("+");
      // The next key zooms from the range that is drawn.
      await until("the zoom is drawn", () => page.evaluate(() => { const { view: { zoom }, charts: { loss: { x } } } = window.lockstep; return x.low === zoom[0] && x.high === zoom[1]; }));
    }
    const zoomedIn = await zoomWidth();
    await page.keyboard.press("-");
    assert.ok((await zoomWidth()) > zoomedIn);
    await page.keyboard.press("0");
    assert.equal(await page.evaluate(() => window.lockstep.view.zoom), null);

    await page.locator("#smooth").fill("0.6");
    assert.equal(await page.evaluate(() => window.lockstep.charts.loss.smoothing), 0.6);
    for (const name of ["log", "epoch", "time"]) {
      await page.getByRole("button", { name, exact: true }).click();
      assert.equal(await page.getByRole("button", { name, exact: true }).getAttribute("aria-pressed"), "true");
    }
    assert.equal(await state(page), "succeeded");
  });

  test("draws a point at the end time of its step, also when step times are in buckets", async () => {
    const page = await browser.page(server, "/jobs");
    const [exact, buckets] = await page.evaluate(async () => {
      const { Series } = await import("/static/chart/series.js"), { times, View } = await import("/static/chart/view.js");
      const exact = new Series("step_ms", 0), buckets = new Series("step_ms", 0), loss = new Series("loss", 0), steps = Array.from({ length: 64 }, (_, i) => i + 1);
      exact.append(1, steps, steps.map((step) => (step <= 32 ? 1000 : 2000)));
      buckets.load(1, { steps: [1, 17, 33, 49], mean: [1000, 1000, 2000, 2000] }, false, 16);
      loss.append(1, [1, 16, 17, 40, 64], [1, 1, 1, 1, 1]);
      return [exact, buckets].map((clock) => {
        const view = Object.assign(new View(() => clock), { axis: "time" });
        return { times: [...times(loss.segments[0], clock)], steps: [1, 16, 48, 96].map((secs) => view.stepAt(secs)) };
      });
    });
    assert.deepEqual(exact, { times: [1, 16, 17, 48, 96], steps: [1, 16, 40, 64] });
    assert.deepEqual(buckets, exact);
  });

  test("keeps peaks, gaps and totals when it merges points, and ignores repeated points", async () => {
    const page = await browser.page(server, "/jobs");
    const merged = await page.evaluate(async () => {
      const { MeanSeries, Series } = await import("/static/chart/series.js");
      const series = new Series("loss", 0, 1024);
      for (let step = 1; step <= 100_000; step += 100) {
        const steps = Array.from({ length: 100 }, (_, i) => step + i);
        series.append(1, steps, steps.map((s) => (s === 77_777 ? 9 : s > 50_000 && s <= 60_000 ? null : 1)));
        series.append(1, steps, steps.map(() => 5));
      }
      const segment = series.segments[0], indicesWhere = (f) => Array.from({ length: segment.length }, (_, i) => i).filter(f);
      const resumed = new Series("loss", 0), ones = Array(20).fill(1);
      resumed.append(1, ones.map((_, i) => i + 1), ones);
      resumed.append(2, [11], [5]);
      const mean = new MeanSeries("loss", () => 2, 1024);
      mean.appendRank(1, [1, 2, 3], [1, 2, 3]);
      mean.appendRank(1, [1, 2], [3, null]);
      return {
        buckets: segment.length, points: segment.counts.subarray(0, segment.length).reduce((a, b) => a + b, 0), exact: series.exact,
        peaks: indicesWhere((i) => segment.max[i] === 9).length, repeated: indicesWhere((i) => segment.max[i] === 5).length,
        gap: indicesWhere((i) => Number.isNaN(segment.mean[i])).reduce((n, i) => n + segment.counts[i], 0),
        mean: Array.from(mean.segments[0].mean.subarray(0, mean.segments[0].length)),
        largestBucket: Math.max(...segment.counts.subarray(0, segment.length)), newest: segment.newestValue,
        smooth: [...segment.smooth(0.6).subarray(0, 3)], resumed: resumed.segments[1].smooth(0.9)[0],
      };
    });
    assert.ok(merged.buckets <= 1024 && merged.points === 100_000 && !merged.exact, JSON.stringify(merged));
    assert.ok(merged.largestBucket <= 256, `a bucket has ${merged.largestBucket} of 100,000 points: the buckets differ too much in size`);
    assert.equal(merged.newest, 1);
    assert.deepEqual([merged.peaks, merged.repeated, merged.gap], [1, 0, 10_000]);
    assert.deepEqual(merged.mean, [2, NaN], "the mean includes a step once each rank has reported the step");
    assert.deepEqual(merged.smooth, [1, 1, 1], "smoothing has no bias at its start");
    // An average with weights: 10 steps of loss 1 before the resume, one step of loss 5 after it. The weights' sum is 1 - 0.9 ** 11.
    assert.ok(Math.abs(merged.resumed - ((1 - 0.9 ** 10) * 0.9 + 5 * 0.1) / (1 - 0.9 ** 11)) < 1e-3, `smoothing continues at a resume: ${merged.resumed}`);
  });
});
