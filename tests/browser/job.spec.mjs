// The pages of a job, from the form to the job's end.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { sql } from "./five-jobs.mjs";
import { Browser, TestServer, testInFullRun, losses, pixels, state, until, untilLive } from "./test-server.mjs";

let server, browser;
before(async () => { [server, browser] = await Promise.all([TestServer.open(), Browser.open()]); });
after(async () => { await browser?.close(); await server?.close(); });

describe("a job", () => {
  test("is submitted by the form and followed live", async () => {
    const page = await browser.page(server, "/jobs");
    assert.ok(await page.getByText("No job yet").isVisible(), "an empty list says what to do");
    assert.equal(await page.locator("#no-jobs").getByRole("link", { name: "Datasets" }).getAttribute("href"), "/datasets?for=job#upload");
    await page.locator("#no-jobs").getByRole("link", { name: "form" }).click();
    await page.getByRole("link", { name: /Fashion-MNIST/ }).click();
    await page.getByLabel("Name", { exact: true }).fill("from the form");
    await page.getByLabel("Epochs", { exact: true }).fill("");
    await page.locator("details.more > summary").click();
    await page.getByLabel("Steps", { exact: true }).fill("100000");
    await page.getByLabel("Image size", { exact: true }).fill("8");
    await page.getByLabel("Global batch size").fill("16");
    await page.getByLabel("Validation", { exact: true }).fill("0.02");
    await until("the form shows the number of steps", async () => /100,000 steps in all/.test(await page.locator("#plan").textContent()));
    assert.match(await page.locator("#spec-text").inputValue(), /\[train\]\n[^[]*steps = 100000/);
    await page.getByRole("button", { name: "Submit job" }).click();
    await page.waitForURL(/\/jobs\/j\w+$/);

    await until("the job runs", async () => (await state(page)) === "running");
    const curvesBefore = await until("both ranks have a line", async () => {
      const curves = await losses(page);
      return curves["rank 0"]?.points > 1 && curves["rank 1"]?.points > 1 && curves;
    });
    const linesBefore = await until("the log has lines", async () => Number(await page.locator("#log-lines").getAttribute("data-lines")) || 0);
    const pixelsBefore = await until("both lines are drawn", async () => { const p = await pixels(page); return p[0] > 5 && p[1] > 5 && p; });

    await until("both lines grow", async () => {
      const curves = await losses(page);
      return ["rank 0", "rank 1"].every((r) => curves[r].points > curvesBefore[r].points + 10);
    });
    await until("the drawn lines change", async () => { const p = await pixels(page); return p[0] + p[1] !== pixelsBefore[0] + pixelsBefore[1]; });
    await until("the log grows", async () => Number(await page.locator("#log-lines").getAttribute("data-lines")) > linesBefore);
    await untilLive(page);
    await until("the step is shown", async () => /^[\d,]+$/.test(await page.locator("#step").textContent()));
    await until("the first lane has the rank's step time", async () => /rank 0.*\d m?s/s.test(await page.locator("#ranks li").first().textContent()));
    await server.ask(`/jobs/${new URL(page.url()).pathname.split("/").pop()}/cancel`, {});
    await until("the job ends", async () => (await state(page)) === "cancelled");
  });

  test("shows each step once at its end, also after a reload and in a second tab", async () => {
    const { id } = await server.submit({ name: "to its end", train: { steps: 60 } });
    const page = await browser.page(server, `/jobs/${id}`), tab = await page.tab(`/jobs/${id}`);
    await until("the job succeeds", async () => (await state(page)) === "succeeded");
    const finalCurves = await until("each step is drawn once", async () => {
      const curves = await losses(page);
      return curves["rank 0"].points === 60 && curves["rank 1"].points === 60 && curves;
    });
    await until("the second tab shows the same", async () => { assert.deepEqual(await losses(tab), finalCurves); return true; });
    await until("the number of steps is shown", async () => (await page.locator("#step").textContent()) === "60");
    await until("the job's accuracy is shown", async () => /^\d+\.\d %( ± \d+\.\d| \(at (least|most) \d+\.\d %\))? of \d+$/.test(await page.locator("#accuracy").textContent()));
    await until("the clock has stopped", async () => (await page.locator("#facts dt").nth(2).textContent()) === "Ran for");
    // The banner is drawn together with the clock. During training, a rank may have been slow on a busy machine.
    assert.equal(await page.locator("#banner").isVisible(), false, "a job without problems has no banner");

    const link = page.locator("#checkpoints a").first();
    const model = await page.request.get(new URL(await link.getAttribute("href"), page.url()).href);
    assert.ok(model.ok() && (await model.body()).length > 1_000_000, "the model can be downloaded");

    const stored = (await server.ask(`/jobs/${id}/logs?limit=10000`)).lines.length;
    const logged = () => page.locator("#log-lines p").allTextContents();
    const log = await until("every log line is shown once", async () => { const all = await logged(); return all.length === stored && all; });
    await page.reload();
    await until("a reload shows the same curves", async () => { assert.deepEqual(await losses(page), finalCurves); return true; });
    await until("a reload shows the same log", async () => { assert.deepEqual(await logged(), log); return true; });
  });

  testInFullRun("has a page without large empty spaces", async () => {
    const { jobs: [job] } = await server.ask("/jobs");
    for (const width of [1440, 1920]) {
      const page = await browser.page(server, `/jobs/${job.id}`, { viewport: { width, height: 1000 } }), box = (selector) => page.locator(selector).boundingBox();
      await until("the speed is drawn", async () => Number(await page.locator("#speed-chart").getAttribute("data-drawn")) > 0);
      // The charts of loss and accuracy have the same size. Their buttons appear under the pointer, or always if no pointer can hover.
      const [loss, accuracy] = [await box("#loss-chart"), await box("#accuracy-chart")];
      assert.deepEqual([loss.y, loss.width, loss.height].map(Math.round), [accuracy.y, accuracy.width, accuracy.height].map(Math.round));
      const areButtonsShown = () => page.locator(".loss-card .segments").first().evaluate((node) => getComputedStyle(node).opacity === "1");
      await page.mouse.move(1, 1);
      assert.equal(await areButtonsShown(), await page.evaluate(() => !matchMedia("(hover: hover)").matches));
      await page.locator("#loss-chart").hover();
      assert.ok(await areButtonsShown());
      await page.getByRole("tab", { name: "Settings" }).click();
      const settings = await page.locator(".own-settings").innerText();
      await page.getByRole("tab", { name: "Log", exact: true }).click();
      for (const [key, value] of [["data.dataset", "fashion-mnist"], ["train.steps", String(job.spec.train.steps)]]) assert.match(settings.replace(/\s+/g, " "), new RegExp(`${key} ${value}`));
      assert.ok(!settings.includes("train.beta1"), "defaults are not listed");
      // No card has more than 60 pixels of empty space below its content.
      const emptyBelow = async (card, last) => { const [outer, inner] = [await box(card), await box(last)]; return outer.y + outer.height - (inner.y + inner.height); };
      for (const [card, last] of [[".ranks-card", ".ranks-card .legend"], [".checkpoints-card", "#checkpoint-table, #no-checkpoints:visible"], [".log-card", "#log-panel"]]) assert.ok((await emptyBelow(card, last)) < 60, `${card} at ${width}: ${await emptyBelow(card, last)} pixels`);
      // The log follows its end after the page is resized.
      const follow = page.locator("#log-follow");
      await page.setViewportSize({ width: 1024, height: 800 });
      await page.setViewportSize({ width, height: 1000 });
      await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
      assert.ok(await follow.isChecked());
      assert.ok(await page.locator("#log-lines").evaluate((log) => log.scrollHeight - log.scrollTop - log.clientHeight < 24), "the newest line is in view");
      await page.end();
    }
  });

  test("is cancelled after a confirmation that says what is lost", async () => {
    const { id } = await server.submit({ name: "endless", train: { steps: 100_000 }, checkpoint: { every_epochs: 0 } });
    const page = await browser.page(server, `/jobs/${id}`);
    await until("the job trains", async () => (await losses(page))["rank 1"]?.points > 2);
    await page.getByRole("button", { name: "Cancel", exact: true }).click();
    const dialog = page.getByRole("dialog");
    assert.match(await dialog.textContent(), /write a last checkpoint first\. If none can be written, the training is lost/);
    await dialog.getByRole("button", { name: "Keep it" }).click();
    assert.equal(await dialog.isVisible(), false);
    assert.equal((await server.job(id)).state, "running", "the job continues after Keep it");
    await page.getByRole("button", { name: "Cancel", exact: true }).click();
    await page.getByRole("button", { name: "Cancel the job" }).click();
    await until("the job is cancelled", async () => (await state(page)) === "cancelled");
    assert.equal((await server.job(id)).state, "cancelled");
    assert.equal(await page.getByRole("button", { name: "Cancel", exact: true }).isVisible(), false);

    await page.getByRole("button", { name: "Retry", exact: true }).click();
    await until("the job continues with another attempt", async () => { const job = await server.job(id); return job.state === "running" && job.attempt === 2; });
    await until("the page shows the new attempt", async () => (await state(page)) === "running" && /attempt 2/.test(await page.locator("#about").textContent()));
    await until("charts say why the attempt started", () => page.evaluate(() => window.lockstep.charts.loss.marks.get(2) === "a cancellation"));
    await server.ask(`/jobs/${id}/cancel`, {});
    await until("the job is cancelled again", async () => (await state(page)) === "cancelled");

    await page.getByRole("button", { name: "Delete", exact: true }).click();
    await until("the dialog shows the size to be freed", async () => /\d (kB|MB|B)/.test(await dialog.textContent()));
    await page.getByRole("button", { name: "Delete the job" }).click();
    await page.waitForURL(/\/jobs$/);
    await until("the list no longer has the job", async () => !(await page.locator("#rows").textContent()).includes("endless"));
  });

  testInFullRun("with an unreadable setting names the setting and the remedy", async () => {
    const { id } = await server.submit({ name: "of another age", train: { steps: 5 } });
    await until("the job has succeeded", async () => (await server.job(id)).state === "succeeded");
    const page = await browser.page(server, `/jobs/${id}`);
    const banner = page.locator("#banner");
    await untilLive(page);
    assert.ok(!await banner.isVisible());
    // Stores a setting as another version of the server might.
    sql(server, `UPDATE jobs SET spec = json_set(spec, '$.train.optimizer', 'of another age') WHERE id = '${id}'`);
    await page.reload();
    await untilLive(page);
    assert.match(await banner.textContent(), /Not all of this job can be read\..*train\/optimizer.*with defaults for the rest\./s);
    assert.equal(await banner.getAttribute("data-tone"), "warn");
    assert.ok(await banner.isVisible());
  });

  test("has each point once on a page that was open when the server crashed", async () => {
    const { id } = await server.submit({ name: "survivor", train: { steps: 100_000 } });
    const page = await browser.page(server, `/jobs/${id}`, { expectedErrors: [/ERR_CONNECTION|WebSocket|Failed to load/] });
    await until("both ranks train", async () => {
      const curves = await losses(page);
      return curves["rank 0"]?.points > 5 && curves["rank 1"]?.points > 5;
    });
    await untilLive(page);
    await server.crash();
    await until("the page shows that it reconnects", async () => (await page.locator("#live").textContent()) === "reconnecting");
    const before = (await losses(page))["rank 0"].points;
    await server.start();
    await until("the page is live again without a reload", async () => (await page.locator("#live").textContent()) === "live");
    await until("the page has points that ranks reported while the server was down", async () => (await losses(page))["rank 0"]?.points > before + 5);
    await server.ask(`/jobs/${id}/cancel`, {});
    await until("the job ends", async () => (await state(page)) === "cancelled");
    await until("the page has each stored step once", async () => {
      const { series } = await server.ask(`/jobs/${id}/metrics?name=loss&points=10000`);
      const stored = series.filter((s) => s.rank === 0).map((s) => s.steps);
      for (const steps of stored) assert.deepEqual(steps, steps.map((_, i) => steps[0] + i));
      assert.equal((await losses(page))["rank 0"].points, stored.flat().length);
      return true;
    });
  });
});
