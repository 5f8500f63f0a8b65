// Updates of an open page: lanes with the GPUs' measurements, the delay of the stream, the end of a job. The agent is simulated, so no test
// waits for training.

import assert from "node:assert/strict";
import { after, afterEach, before, describe, test } from "node:test";
import { loss, metrics, range, simulateAgent, spec } from "./agent.mjs";
import { Browser, TestServer, testInFullRun, losses, until, untilLive } from "./test-server.mjs";

const RANKS = 4;
let server, browser, agent, runningJob = null;
before(async () => {
  [server, browser] = await Promise.all([TestServer.open({ dataset: false, agent: false }), Browser.open()]);
  agent = await simulateAgent(browser.chromium, server, RANKS);
});
// Frees the slots for the next test, also after a failure.
afterEach(async () => { if (runningJob) await end(runningJob, 60); });
after(async () => { await browser?.close(); await server?.close(); });

/** Starts a job on all ranks and reports `steps` steps. */
async function startJob(name, steps) {
  const job = runningJob = await server.ask("/jobs", spec(name, RANKS, 1000)), attempt = job.attempt = await agent.attempt(job.id);
  await agent.begin(attempt);
  for (let rank = 0; rank < RANKS; rank++) await agent.reportSteps(attempt, rank, range(1, steps), {
    loss: (s) => loss(s, rank), step_ms: 40.5, all_reduce_ms: 10.5, data_ms: 5.5,
    gpu_utilization: 0.75 + rank / 16, gpu_memory_bytes: 12.3e9 + 0.5, gpu_power_watts: 350.5 + rank, gpu_temperature_celsius: 71.25,
  });
  return job;
}
const end = (job, step) => {
  runningJob = null;
  return agent.endAttempt(job.attempt, { how: "succeeded", step });
};

/** Records the titles of the page's notifications in `window.notified`. While `window.isAway` is set, the page counts as hidden and draws no frame. */
const recordNotifications = (page) => page.context().addInitScript(() => {
  const draw = window.requestAnimationFrame.bind(window);
  window.notified = [];
  window.Notification = class { static permission = "granted"; constructor(title) { window.notified.push(title); } };
  Object.defineProperty(document, "hidden", { get: () => window.isAway === true });
  window.requestAnimationFrame = (f) => (window.isAway ? 1 : draw(f));
  localStorage.setItem("notify", "yes");
});

describe("a page of several ranks", () => {
  test("shows in each rank's lane the parts of a step, the rank's status, and the GPU's utilisation, memory, temperature and power", async () => {
    const job = await startJob("on GPUs", 60), page = await browser.page(server, `/jobs/${job.id}`), lane = (rank) => page.locator(`#ranks li[data-rank="${rank}"]`);
    await until("four lanes are shown", async () => (await page.locator("#ranks li").count()) === RANKS);
    await untilLive(page);
    const parts = await until("the lane is divided", async () => {
      const widths = await lane(1).locator(".lane span").evaluateAll((all) => Object.fromEntries(all.map((s) => [s.className, parseFloat(s.style.width) || 0])));
      return widths["k-compute"] > 0 && widths;
    });
    assert.ok(Math.abs(parts["k-wait"] / parts["k-compute"] - 10.5 / 24.5) < 0.02 && Math.abs(parts["k-data"] / parts["k-compute"] - 5.5 / 24.5) < 0.02, JSON.stringify(parts));
    const note = page.locator("#ranks-note");
    assert.equal(await note.textContent(), "last 50 steps · limited by computing");
    for (let rank = 0; rank < RANKS; rank++) await agent.reportSteps(job.attempt, rank, range(61, 110), { step_ms: 40.5, data_ms: 10.5 });
    await until("data loading limits the speed", async () => (await note.textContent()) === "last 50 steps · limited by data loading (26 % of a step)");
    /** Reports further steps of 40.5 ms, with the given times in all-reduce for each rank. */
    const reportWaits = async (from, waits) => {
      for (const [rank, wait] of waits.entries()) await agent.reportSteps(job.attempt, rank, range(from, from + 49), { step_ms: 40.5, data_ms: 0.5, all_reduce_ms: wait });
    };
    await reportWaits(111, [30.5, 32.5, 28.5, 30.5]);
    await until("all-reduce takes longer than computing", async () => /^last 50 steps · limited by communication \(all-reduce takes 70 % of a step\)$/.test(await note.textContent()));
    await reportWaits(161, [30.5, 30.5, 1.5, 30.5]);
    await until("three ranks wait for rank 2", async () => /^last 50 steps · limited by rank 2: the others wait for it$/.test(await note.textContent()));
    await reportWaits(211, [10.5, 10.5, 10.5, 10.5]);
    await until("computing takes longest", async () => (await note.textContent()) === "last 50 steps · limited by computing");
    const text = await lane(1).locator(".rank-about").innerText();
    for (const value of ["81 %", "12 GB", "71 °C", "352 W"]) assert.ok(text.includes(value), `${value} in ${text}`);

    const report = { step: 60, epoch: 1, step_ms: 40.5, all_reduce_ms: 10.5, data_ms: 5.5, images_per_second: 790.5, pid: 4321, device: "GPU 2", axis_ms: { pipeline: 0, data: 8.1, height: 0, model: 2.4 } };
    const reportStatus = (status) => agent.report(job.attempt, 2, [{ type: "rank", rank: 2, report: { status, ...report } }]);
    await reportStatus("checkpointing");
    await until("the rank has the status checkpointing", async () => /GPU 2.*checkpointing.*step 60/s.test(await lane(2).locator(".rank-about").innerText()));
    assert.equal(await lane(2).locator(".rank-axes").innerText(), "data 20 %", "only axes with several ranks are shown");
    assert.ok(await lane(1).locator(".rank-axes").isHidden(), "a rank without times of axes shows none");
    await new Promise((done) => setTimeout(done, 300)); // the duration of the checkpoint
    await reportStatus("training");
    await until("the lane shows the time of the checkpoint", async () => parseFloat(await lane(2).locator(".k-checkpoint").evaluate((s) => s.style.width)) > 0);

    await page.locator("#other-metric").selectOption("gpu_power_watts");
    const power = await until("power is drawn for each rank", async () => { const all = await page.evaluate(() => window.lockstep.charts.lr.snapshot()); return all.length === RANKS && all; });
    assert.deepEqual(power.map((line) => [line.label, line.points, line.value]), [0, 1, 2, 3].map((r) => [`rank ${r}`, 60, 350.5 + r]));
  });

  test("has a crosshair that all charts share, and a mean with a band from the lowest to the highest rank", async () => {
    const job = await startJob("together", 60), page = await browser.page(server, `/jobs/${job.id}`);
    await until("the chart is drawn", async () => (await losses(page))["rank 3"]?.points === 60);
    const box = await page.locator("#loss-chart").boundingBox();
    /** Whether the chart shows the crosshair, for each of four charts. */
    const haveCrosshair = () => page.evaluate(() => ["loss", "accuracy", "images_per_second", "lr"].map((name) => {
      const { overlay } = window.lockstep.charts[name], copy = new OffscreenCanvas(overlay.width, overlay.height).getContext("2d", { willReadFrequently: true });
      copy.drawImage(overlay, 0, 0);
      const { data } = copy.getImageData(0, 0, overlay.width, overlay.height);
      return data.some((v) => v > 0);
    }));
    await page.mouse.move(box.x + box.width / 2, box.y + box.height / 2);
    await page.locator("#other-metric").selectOption("step_ms");
    await page.mouse.move(box.x + box.width / 3, box.y + box.height / 2);
    await until("the charts of loss and of the other metric show the crosshair", async () => { const [loss, , , other] = await haveCrosshair(); return loss && other; });
    await page.mouse.move(1, 1);
    await until("the crosshair disappears when the mouse leaves", async () => (await haveCrosshair()).every((hasCrosshair) => !hasCrosshair));

    await page.getByRole("button", { name: "mean", exact: true }).click();
    const mean = await until("one line is left", async () => { const all = await page.evaluate(() => window.lockstep.charts.loss.snapshot()); return all.length === 1 && all[0]; });
    assert.deepEqual([mean.label, mean.points], ["mean of ranks", 60]);
    const { series } = await server.ask(`/jobs/${job.id}/metrics?name=loss&points=100`);
    const spread = await page.evaluate(() => { const g = window.lockstep.charts.loss.layers()[0].series.segments[0]; return [30, 59].map((i) => [g.min[i], g.mean[i], g.max[i]]); });
    for (const [k, i] of [30, 59].entries()) {
      const all = series.map((s) => s.mean[i]), expected = [Math.min(...all), all.reduce((a, b) => a + b) / all.length, Math.max(...all)];
      expected.forEach((v, n) => assert.ok(Math.abs(spread[k][n] - v) < 1e-6, `${spread[k]} instead of ${expected}`));
    }
  });
});

describe("a page that stays open", () => {
  test("shows its delay while it catches up, and then has all points", async () => {
    const job = await startJob("cut off", 10), page = await browser.page(server, "/machines");
    let isCut = false, holdsLive = false, socket = null;
    const heldMessages = [];
    await page.routeWebSocket(/\/stream/, (ws) => {
      if (isCut) return ws.close();
      const server = ws.connectToServer();
      // Holds back the frame that ends the catch-up until the page has been checked.
      server.onMessage((message) => { if (holdsLive && JSON.parse(message).type === "live") heldMessages.push(() => ws.send(message)); else ws.send(message); });
      socket = ws;
    });
    const openedAt = Date.now();
    await page.goto(`${server.url}/jobs/${job.id}`);
    // The page's clock is behind the server's clock by at most this time, because the page takes over the time at which it was rendered.
    const maxSkewMs = Date.now() - openedAt, live = page.locator("#live");
    await until("the page is live", async () => (await live.textContent()) === "live");
    [isCut, holdsLive] = [true, true];
    await socket.close();
    await until("the page reconnects", async () => (await live.textContent()) === "reconnecting");
    for (let rank = 0; rank < RANKS; rank++) await agent.reportSteps(job.attempt, rank, [11, 12, 13], { loss: (s) => loss(s, rank) });
    // The events are this old when the page receives them.
    await new Promise((done) => setTimeout(done, 3200 + maxSkewMs));
    isCut = false;
    await until("the page shows its delay", async () => /^\d+ s behind$/.test(await live.textContent()));
    assert.ok(parseInt(await live.textContent()) >= 3);
    holdsLive = false;
    heldMessages.splice(0).forEach((send) => send());
    await until("the page is live again", async () => (await live.textContent()) === "live");
    assert.equal((await losses(page))["rank 2"].points, 13);
  });

  test("selects the best checkpoint until another is chosen, and classifies its pictures again after a change", async () => {
    const job = await startJob("improves", 10), { attempt } = job, page = await browser.page(server, `/jobs/${job.id}?tab=classify`);
    const evaluated = [], classes = page.locator("#classify-results ol span"), reliability = page.locator("#classify-reliability");
    // The predicted class names the checkpoint of the request.
    await page.route("**/predict", (route) => route.fulfill({ json: { predictions: [{ classes: [{ class: route.request().url().match(/(\d+-\d+)\/predict$/)[1], probability: 0.5 }] }] } }));
    await page.route("**/evaluation?*", (route) => {
      evaluated.push(route.request().url().match(/\d+-\d+$/)[0]);
      return route.fulfill({ status: 202, json: { detail: "being evaluated; ask again" } });
    });
    /** Reports a validation and a checkpoint after it, and waits until the page lists the checkpoint. */
    const report = async (epoch, accuracy, loss, { isBest }) => {
      const step = 10 * epoch, rows = page.locator("#checkpoints tr");
      await agent.report(attempt, 0, [
        { type: "evaluation", epoch, step, samples: 100, accuracy, loss, secs: 1.5 },
        { type: "checkpoint", epoch, step, val_accuracy: accuracy, val_loss: loss, validation: { pictures: 100, fingerprint: "5f3a" }, best: isBest, size_bytes: 1234567 },
      ]);
      await until("the checkpoint is listed", async () => (await rows.first().locator("[data-f=label]").textContent()) === `${epoch}-${step}`);
    };
    const selects = (panel, label) => until(`${panel} selects ${label}`, async () => (await page.locator(`#${panel}-checkpoint option:checked`).textContent()) === label);
    const predicts = (checkpoint, accuracy) => until(`the classes and the accuracy are of ${checkpoint}`, async () => (
      (await classes.allTextContents()).join() === checkpoint && (await reliability.textContent()).includes(`: ${accuracy} %`)));

    await untilLive(page);
    assert.match(await page.locator("#classify-status").textContent(), /^No checkpoint yet/);
    await report(1, 0.5, 1.5, { isBest: true });
    await until("the accuracy has its standard error and its number of pictures", async () => (await page.locator("#accuracy").textContent()) === "50.0 % ± 5.0 of 100");
    await selects("classify", "1-10, best");
    assert.equal(await page.locator("#classify-status").textContent(), "");
    await page.locator("#classify-files").setInputFiles({ name: "a.png", mimeType: "image/png", buffer: Buffer.from("a picture") });
    await predicts("1-10", "50.0");
    await report(2, 0.75, 1.5, { isBest: true });
    await selects("classify", "2-20, best");
    await predicts("2-20", "75.0");
    await report(3, 0.625, 1.25, { isBest: false });
    await selects("classify", "2-20, best");
    // With equal accuracies, the lower loss decides, in the row of numbers and in the list of checkpoints.
    await report(4, 0.75, 1.25, { isBest: true });
    await until("the row of numbers names the same epoch", async () => (await page.locator("#accuracy-more").textContent()) === "best 75.0 % at epoch 4");
    await predicts("4-40", "75.0");
    await page.locator("#classify-checkpoint").selectOption("1-10");
    await predicts("1-10", "50.0");
    await report(5, 0.875, 1.25, { isBest: true });
    await selects("classify", "1-10");
    await predicts("1-10", "50.0");

    await page.getByRole("tab", { name: "Evaluation" }).click();
    await selects("evaluation", "5-50, best");
    await report(6, 0.9375, 1.25, { isBest: true });
    await selects("evaluation", "6-60, best");
    await until("the new best checkpoint is evaluated", () => evaluated.at(-1) === "6-60");
    assert.ok(evaluated.every((id) => ["5-50", "6-60"].includes(id)), evaluated.join());

    runningJob = null;
    await server.ask(`/jobs/${job.id}/cancel`, {});
    await agent.endAttempt(attempt, { how: "stopped" });
    await until("the banner says where Retry continues", async () => /^\s*Cancelled\. Retry continues from step 60\.\s/.test(await page.locator("#banner").textContent()));
    assert.match(await (await page.request.get(page.url())).text(), /Retry continues from step 60\./, "also on the rendered page");
  });

  test("shows where a lower learning rate can be set when a job diverges", async () => {
    const job = await startJob("diverges", 10), page = await browser.page(server, `/jobs/${job.id}`);
    const words = "training has diverged at step 10 (epoch 1): the loss is not finite. Try a lower train.lr";
    await untilLive(page);
    runningJob = null;
    await agent.endAttempt(job.attempt, { how: "failed", retriable: false, reason: { code: "diverged", rank: 0, step: 10, detail: words, words } });
    await until("the link is shown", async () => (await page.locator("#diagnosis").textContent()) === "Start the job again with train.lr = 0.001. · try train.lr = 0.001");
    assert.equal(await page.locator("#diagnosis a").getAttribute("href"), `/jobs/new?from=${job.id}&set=train.lr=0.001`);
    await until("the banner says why", async () => /The job failed:\s+training has diverged at step 10/.test(await page.locator("#banner").textContent()));
  });

  test("notifies of a job's end while it is hidden, if a person has asked for that, and shows why the accuracy is low", async () => {
    const job = await startJob("while you are away", 10), page = await browser.page(server, "/machines");
    // A headless browser shows no notifications, so they are recorded.
    await page.context().addInitScript(() => {
      window.notified = [];
      window.Notification = class {
        static permission = "default";
        static async requestPermission() { return this.permission = "granted"; }
        constructor(title, options) { window.notified.push([title, options.body]); }
      };
      Object.defineProperty(document, "hidden", { get: () => window.isAway === true });
    });
    await page.goto(`${server.url}/jobs/${job.id}`);
    await until("the page's scripts have run", () => page.locator("#keys").isVisible());
    await page.getByRole("button", { name: "Notify me when jobs end" }).click();
    await until("the choice is stored", () => page.getByRole("button", { name: "Do not notify me when jobs end" }).isVisible());
    await untilLive(page);
    await page.evaluate(() => { window.isAway = true; });
    await agent.report(job.attempt, 0, [
      metrics(0, [10], { accuracy: 0.5 }), metrics(0, [5, 10], { val_accuracy: (step) => (step === 5 ? 0.4 : 0.5) }),
      { type: "evaluation", epoch: 1, step: 10, samples: 40, accuracy: 0.5, loss: 1.5, secs: 1.5 },
    ]);
    await until("the page says that the accuracy improves", async () => (await page.locator("#diagnosis").textContent()) === "Validation accuracy improves: the newest, 50.0 % ± 7.9 of 40 pictures, is the best so far; the best before was 40.0 %.");
    await end(job, 10);
    await until("the notification is shown", async () => (await page.evaluate(() => window.notified)).length > 0);
    assert.deepEqual((await page.evaluate(() => window.notified)).map(([title]) => title), ["while you are away: succeeded"]);
    await until("the diagnosis is shown", async () => /^The network began with random weights .* Training accuracy is low \(50\.0 %\).* The validation accuracy, 50\.0 % ± 7\.9 of 40 pictures, is uncertain: /.test(await page.locator("#diagnosis").textContent()));
    // The job has no epochs to double.
    const links = () => page.locator("#diagnosis a").evaluateAll((all) => all.map((link) => `${link.textContent}: ${link.getAttribute("href")}`));
    for (const reload of [false, true]) {
      if (reload) await page.reload();
      await until("links lead to clones with trained weights and with another learning rate", async () => (await links()).join() === `try model.pretrained = resnet18: /jobs/new?from=${job.id}&set=model.pretrained=resnet18,try train.lr = 0.02: /jobs/new?from=${job.id}&set=train.lr=0.02`);
    }
  });

  testInFullRun("notifies of an end once in every list, while it is hidden and draws no frame", async () => {
    for (const [where, path] of Object.entries({ all: "/jobs", running: "/jobs?state=running", groups: "/jobs?group_by=project&open=%5B%5B%22default%22%5D%5D" })) {
      const job = await startJob(`ends in the list of ${where}`, 10), page = await browser.page(server, "/static/icon.svg");
      await recordNotifications(page);
      await page.goto(server.url + path);
      const state = page.locator(`tr[data-id="${job.id}"] [data-f=state]`), expected = [`${job.name}: succeeded`];
      await until("the job runs", async () => (await page.locator("#live").textContent()) === "live" && (await state.textContent()) === "running");
      await page.evaluate(() => { window.isAway = true; });
      await end(job, 10);
      await until("the notification is shown", async () => (await page.evaluate(() => window.notified)).length > 0, 20_000);
      assert.deepEqual(await page.evaluate(() => window.notified), expected);
      // The connection is renewed, and the list is read again.
      await page.evaluate(() => dispatchEvent(new Event("online")));
      await until("the list has been read", async () => (await state.allTextContents()).every((text) => text === "succeeded"));
      assert.deepEqual(await page.evaluate(() => window.notified), expected, "no end is notified twice");
      await page.end();
    }
  });

  testInFullRun("notifies of an end that the list shows before the stream reports it, and of an end before the list is first read", async () => {
    for (const wasRead of [true, false]) {
      const job = await startJob(`ends ${wasRead ? "between two readings" : "before any reading"}`, 10), page = await browser.page(server, "/static/icon.svg"), heldMessages = [];
      let holdsEnd = false, socket = null;
      await recordNotifications(page);
      await page.routeWebSocket(/\/stream/, (ws) => {
        socket = ws;
        ws.connectToServer().onMessage((message) => { if (holdsEnd && JSON.parse(message).job?.id === job.id) heldMessages.push(message); else ws.send(message); });
      });
      // Without an answer, the page has only the list that the server has rendered.
      if (!wasRead) await page.route("**/api/v1/jobs?*", () => {});
      await page.goto(`${server.url}/jobs?state=running`);
      const row = page.locator(`tr[data-id="${job.id}"]`);
      await until("the page is live", async () => (await page.locator("#live").textContent()) === "live" && (await row.getAttribute("data-state")) === "running");
      if (wasRead) await until("the list is read", () => page.evaluate(() => performance.getEntriesByName("jobs listed").length > 0));
      await page.evaluate(() => { window.isAway = true; });
      holdsEnd = wasRead;
      await end(job, 10);
      if (wasRead) {
        await until("the stream has the job's end", () => heldMessages.some((message) => JSON.parse(message).job.state === "succeeded"));
        // At this message, the page reads the list again.
        socket.send(JSON.stringify({ type: "live" }));
        await until("the list is read again without the job", async () => (await row.count()) === 0);
        for (const message of heldMessages) socket.send(message);
      }
      await until("the notification is shown", async () => (await page.evaluate(() => window.notified)).length > 0, 20_000);
      assert.deepEqual(await page.evaluate(() => window.notified), [`${job.name}: succeeded`]);
      await page.end();
    }
  });

  testInFullRun("follows a job's end in a browser without local storage", async () => {
    const job = await startJob("nothing is kept", 10), page = await browser.page(server, "/static/icon.svg");
    await page.context().addInitScript(() => Object.defineProperty(window, "localStorage", { get() { throw new DOMException("blocked", "SecurityError"); } }));
    await page.goto(`${server.url}/jobs`);
    const state = page.locator(`tr[data-id="${job.id}"] [data-f=state]`);
    await until("the job runs", async () => (await page.locator("#live").textContent()) === "live" && (await state.textContent()) === "running");
    await end(job, 10);
    await until("the job's end is shown", async () => (await state.textContent()) === "succeeded", 20_000);
  });

  testInFullRun("says why notifications are unavailable, and what to do", async () => {
    const cases = [
      ["the browser denies notifications", () => { window.Notification = class { static permission = "denied"; static async requestPermission() { return "denied"; } }; }, /has been told not to.*Allow them in its settings/],
      ["the page comes over plain HTTP from another machine", () => Object.defineProperty(window, "isSecureContext", { value: false }), /over HTTPS or from this machine\..*--tls-own-ca/],
    ];
    for (const [cause, setUp, explanation] of cases) {
      const page = await browser.page(server, "/machines");
      await page.context().addInitScript(setUp);
      for (const path of ["/jobs", "/compare"]) {
        await page.goto(server.url + path);
        const button = page.getByRole("button", { name: "Notify me when jobs end" });
        await button.click();
        const dialog = page.getByRole("dialog", { name: "No notifications" });
        await until(cause, () => dialog.isVisible());
        assert.match(await dialog.innerText(), explanation);
        await page.keyboard.press("Escape");
        assert.ok(await button.isVisible(), "notifications are still off");
      }
      await page.end();
    }
  });
});
