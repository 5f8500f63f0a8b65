// A job and its fork: each page links to the other, and the fork has its own time axis. Who paused and cancelled a job.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { Browser, TestServer, until, untilLive } from "../test-server.mjs";

let server, browser;
before(async () => { [server, browser] = await Promise.all([TestServer.open(), Browser.open()]); });
after(async () => { await browser?.close(); await server?.close(); });

const untilSucceeded = (id) => until("the job has ended", async () => (await server.job(id)).state === "succeeded");

describe("a fork", () => {
  test("and its parent link to each other", async () => {
    const parent = await server.submit({ name: "the parent", ranks: 1, train: { steps: 24 } });
    await untilSucceeded(parent.id);
    const [checkpoint] = (await server.ask(`/jobs/${parent.id}/checkpoints`)).checkpoints;
    // The parent's page is open during the fork.
    const parentPage = await browser.page(server, `/jobs/${parent.id}?tab=history`);
    await untilLive(parentPage);
    const fork = await server.ask(`/jobs/${parent.id}/fork`, { checkpoint: checkpoint.id, set: { name: "the fork", "train.steps": 48, "parallel.ranks": 1 } });
    const { owner } = await server.job(fork.id);
    assert.ok(owner, "the fork has an owner");
    await until("the parent's open page lists the fork and its owner", async () => (await parentPage.locator("#lineage li", { hasText: "the fork" }).textContent()).includes(`by ${owner}`));
    assert.match(await parentPage.locator('#history-rows li[data-what="submitted"]').textContent(), new RegExp(`Submitted by ${owner}`));
    await parentPage.end();
    const page = await browser.page(server, `/jobs/${fork.id}?tab=history`), panel = page.locator("#history-panel");
    const link = panel.getByRole("link", { name: "the parent" });
    await until("the fork's page links to its parent", () => link.isVisible());
    assert.match(await page.locator('#history-rows li[data-what="forked"]').textContent(), new RegExp(`Forked by ${owner}from checkpoint`));
    assert.ok(await page.locator("#lineage li time").first().isVisible(), "the time of the fork is shown");
    await link.click();
    await page.waitForURL(new RegExp(parent.id));
    await page.getByRole("tab", { name: "History" }).click();
    await until("the parent's page links to the fork", () => panel.getByRole("link", { name: "the fork" }).isVisible());
  });

  test("has a time axis and speeds of its own training, without its parent's", async () => {
    const parent = await server.submit({ name: "trained before", ranks: 1, train: { steps: 24 } });
    await untilSucceeded(parent.id);
    const fork = await server.ask(`/jobs/${parent.id}/fork`, { checkpoint: "latest", set: { name: "trained on", "train.steps": 64, "parallel.ranks": 1 } });
    await untilSucceeded(fork.id);
    const secs = async (id) => (await server.ask(`/jobs/${id}/metrics?name=step_ms&ranks=0`)).series.at(-1).mean.reduce((a, b) => a + b) / 1000;
    const forkSecs = await secs(fork.id), parentSecs = await secs(parent.id), isNear = (value, expected) => Math.abs(value / expected - 1) < 0.01;
    /** Returns the range of a chart's line on the axis, its steps and its number of points. */
    const lineRange = (page, chart, n = 0) => page.evaluate(([chart, n]) => {
      const { view, layers } = window.lockstep.charts[chart], { segments } = layers()[n].series, segment = segments.at(-1);
      if (!segment) return { last: NaN };
      const positions = view.positions(segment);
      return { attempts: segments.length, first: positions[0], last: positions[segment.length - 1], steps: [segment.steps[0], segment.newestStep], points: segment.length };
    }, [chart, n]);

    const page = await browser.page(server, `/jobs/${fork.id}`);
    await until("the fork's charts are drawn", () => page.evaluate(() => ["loss", "images_per_second"].every((name) => window.lockstep?.charts[name].firstDrawnAt > 0)));
    for (const chart of ["loss", "images_per_second"]) {
      const { attempts, first, last, steps, points } = await lineRange(page, chart);
      assert.deepEqual({ attempts, first, last, steps, points }, { attempts: 1, first: 25, last: 64, steps: [25, 64], points: 40 }, `${chart} by step continues from the checkpoint`);
    }
    await page.locator("button[data-axis=time]").click();
    for (const chart of ["loss", "images_per_second"]) {
      const { first, last } = await lineRange(page, chart);
      assert.ok(isNear(last, forkSecs), `${chart} ends at ${last} s, the fork's steps took ${forkSecs} s and the parent's ${parentSecs} s`);
      assert.ok(first > 0 && first < last, `${chart} begins at ${first} s`);
    }
    assert.equal(await page.evaluate(() => window.lockstep.charts.loss.xName()), "training time (hours:minutes:seconds)");
    const { images_per_second: speed } = await server.job(fork.id);
    assert.ok(isNear(speed, 40 * 8 / (await lineRange(page, "images_per_second")).last), `${speed} images/s agree with the chart's time`);
    // The crosshair shows the fork's time and the step of the whole training.
    const crosshair = page.locator("#loss-chart [role=status]");
    await page.locator("#loss-chart").focus();
    await page.keyboard.press("End");
    await until("the last point is the fork's last step", async () => /^\d+:\d\d of training · step 64\b/.test(await crosshair.textContent()));
    await page.keyboard.press("Home");
    await until("the first point follows the parent's checkpoint", async () => /^0:00 of training · step 2[45]\b/.test(await crosshair.textContent()));

    const compare = await page.tab(`/compare?jobs=${parent.id},${fork.id}&metric=loss,images_per_second&axis=time`);
    for (const chart of ["loss", "images_per_second"]) {
      await until(`${chart} of both jobs is drawn by each job's own time`, async () => (await compare.evaluate((name) => Number(window.lockstep?.charts[name]?.root.dataset.drawn) > 0, chart))
        && isNear((await lineRange(compare, chart, 0)).last, parentSecs) && isNear((await lineRange(compare, chart, 1)).last, forkSecs));
    }
    assert.equal(await compare.evaluate(() => window.lockstep.charts.loss.xName()), "training time (hours:minutes:seconds)");
  });
});

test("a pause and a cancellation are listed in the history with the person who requested them", async () => {
  const { id } = await server.submit({ name: "asked about", ranks: 1, train: { steps: 2000 } }), page = await browser.page(server, `/jobs/${id}?tab=history`);
  await until("the job trains", async () => (await server.job(id)).step > 0);
  await server.ask(`/jobs/${id}/pause`, {});
  await until("the job is paused", async () => (await server.job(id)).state === "paused");
  await server.ask(`/jobs/${id}/cancel`, {});
  const { owner } = await server.job(id), entry = (what) => page.locator(`#history-rows li[data-what="${what}"]`).textContent();
  for (const [what, label] of [["submitted", "Submitted"], ["pause_requested", "Pause requested"], ["cancelled", "Cancelled"]]) {
    await until(`${label} is listed`, async () => (await page.locator(`#history-rows li[data-what="${what}"]`).count()) === 1);
    assert.ok((await entry(what)).includes(`${label} by ${owner}`), await entry(what));
  }
});
