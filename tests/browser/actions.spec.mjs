// A user's actions: job files in the form, actions on several jobs, notes, machines, keyboard shortcuts, Compare.

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { after, before, describe, test } from "node:test";
import { Browser, TestServer, testInFullRun, until } from "./test-server.mjs";

let server, browser, finished;
before(async () => {
  [server, browser] = await Promise.all([TestServer.open(), Browser.open()]);
  finished = [await server.submit({ name: "slow learner", train: { steps: 60, lr: 0.001 }, log: { every_steps: 10 } }), await server.submit({ name: "fast learner", train: { steps: 60, lr: 0.1 }, log: { every_steps: 10 } })];
  await until("two jobs have finished", async () => (await Promise.all(finished.map((j) => server.job(j.id)))).every((j) => j.state === "succeeded"));
});
after(async () => { await browser?.close(); await server?.close(); });

const annotations = async () => (await server.ask("/annotations")).jobs;

describe("a job as text", () => {
  test("pasted as TOML or JSON fills the form, and its errors are shown while typing", async () => {
    const page = await browser.page(server, "/jobs/new", { expectedErrors: [/422/] });
    const area = page.getByLabel("Specification");
    assert.match(await area.inputValue(), /^name = /, "the text shows the form's job file");
    await area.fill('name = "pasted"\nproject = "vision"\nnotes = "one\\ntwo"\n[model]\narch = "resnet32"\n[data]\ndataset = "fashion-mnist"\nmean = [0.25]\n[train]\nepochs = 3\nlr = 0.07\n');
    await until("the form has the pasted name", async () => (await page.getByLabel("Name", { exact: true }).inputValue()) === "pasted");
    assert.equal(await page.getByLabel("Learning rate", { exact: true }).inputValue(), "0.07");
    assert.equal(await page.getByLabel("Epochs", { exact: true }).inputValue(), "3");
    assert.equal(await page.getByLabel("Project", { exact: true }).inputValue(), "vision");
    assert.equal(await page.locator("textarea#f-notes").inputValue(), "one\ntwo");
    await area.fill('name = "pasted"\n[data]\ndataset = "fashion-mnist"\n[train]\nlrr = 0.07\n');
    await until("the error is shown", async () => /train\.lrr.*did you mean/s.test(await page.locator("#spec-error").textContent()));
    await area.fill("[train\n");
    await until("a syntax error is shown", async () => (await page.locator("#spec-error").textContent()) !== "" && !/lrr/.test(await page.locator("#spec-error").textContent()));
    await page.getByRole("button", { name: "Submit job" }).click();
    await until("the job is not submitted", async () => /was not read/.test(await page.locator("#plan").textContent()));
    await area.fill(JSON.stringify({ name: "as json", model: { arch: "resnet20" }, project: "by-hand", notes: "first line\nsecond line", data: { dataset: "fashion-mnist", validation: 0.02, image_size: 8 }, train: { steps: 100_000, batch_size: 8 }, parallel: { ranks: 2, device: "cpu" } }));
    await until("JSON is recognised", async () => (await page.getByLabel("Name", { exact: true }).inputValue()) === "as json");
    assert.equal(await page.getByRole("button", { name: "JSON", exact: true }).getAttribute("aria-pressed"), "true");
    await page.getByRole("button", { name: "Submit job" }).click();
    await page.waitForURL(/\/jobs\/j\w+$/);
    const id = new URL(page.url()).pathname.split("/").pop();
    const submitted = await server.job(id);
    assert.deepEqual([submitted.spec.train.steps, submitted.project, submitted.notes], [100_000, "by-hand", "first line\nsecond line"]);
    assert.equal(await page.locator("#project-name").textContent(), "by-hand");
    await page.getByRole("link", { name: "Clone", exact: true }).click();
    await page.waitForURL(/from=/);
    assert.equal(await page.getByLabel("Name", { exact: true }).inputValue(), "as json (2)", "a clone has a name that no job has");
    const jobFile = page.locator("#spec-text"), cloned = await jobFile.inputValue(), recipe = page.getByLabel("Recipe", { exact: true });
    assert.match(cloned, /^validation = 0\.02$/m, "a clone has the job's settings");
    await recipe.selectOption("finetune");
    await until("the form names the changed settings", async () => /Image size \(was 8\)/.test(await page.locator("#replaced").textContent()));
    assert.match(await jobFile.inputValue(), /^validation = 0\.02$/m, "a recipe keeps the validation pictures");
    assert.match(await recipe.locator("option:checked").textContent(), /^finetune: your own pictures from trained weights/);
    await until("the form asks for the weights", async () => /models:\/NAME@ALIAS/.test(await page.locator("#f-model-pretrained-error").textContent()));
    await recipe.selectOption("cifar-fast");
    await recipe.selectOption("");
    await until("the settings return", async () => (await jobFile.inputValue()) === cloned);
    await server.ask(`/jobs/${id}/cancel`, {});
  });
});

describe("jobs", () => {
  test("are paused and resumed together", async () => {
    const page = await browser.page(server, "/jobs"), bulk = page.locator("#bulk");
    const jobs = [await server.submit({ name: "first of two", train: { steps: 100_000 } }), await server.submit({ name: "second of two", train: { steps: 100_000 } })];
    const states = async () => (await Promise.all(jobs.map((j) => server.job(j.id)))).map((j) => j.state).join();
    const shownStates = async () => (await Promise.all(jobs.map((j) => page.locator(`tr[data-id="${j.id}"] [data-f=state]`).textContent()))).join();
    /** Selects both jobs, presses the button `action`, and waits until the states on the server and on the page match `expected` and no job is selected. */
    const applyToBoth = async (action, expected) => {
      for (const job of jobs) await page.locator(`tr[data-id="${job.id}"] [data-f=choose]`).check();
      await bulk.getByRole("button", { name: action, exact: true }).click();
      await until(`after ${action}: ${expected}`, async () => expected.test(await states()) && expected.test(await shownStates()) && bulk.isHidden());
    };
    await until("one job runs, the other waits", async () => (await shownStates()) === "running,queued");
    await applyToBoth("Pause", /^paused,paused$/);
    await applyToBoth("Resume", /running/);
    for (const job of jobs) await server.ask(`/jobs/${job.id}/cancel`, {});
    await until("both end", async () => (await shownStates()) === "cancelled,cancelled");
  });

  test("are selected, tagged, filtered, cancelled and deleted together", async () => {
    const page = await browser.page(server, "/jobs");
    const jobs = [await server.submit({ name: "one of many", train: { steps: 100_000 } }), await server.submit({ name: "two of many", train: { steps: 100_000 } })];
    for (const job of jobs) await until("the job is listed", () => page.locator(`tr[data-id="${job.id}"]`).isVisible());
    for (const job of jobs) await page.locator(`tr[data-id="${job.id}"] [data-f=choose]`).check();
    assert.equal(await page.locator("#bulk-count").textContent(), "2 jobs selected");
    await page.locator("#bulk").getByRole("button", { name: "Tag" }).click();
    await page.getByLabel("Tag", { exact: true }).fill("sweep");
    await page.getByRole("button", { name: "Add" }).click();
    await until("both have the tag", async () => { const known = await annotations(); return jobs.every((j) => known[j.id]?.tags.includes("sweep")); });
    await page.locator(`tr[data-id="${jobs[0].id}"]`).getByRole("link", { name: "sweep" }).click();
    await until("a tag filters", async () => (await page.locator("#rows tr").count()) === 2);
    for (const job of jobs) await page.locator(`tr[data-id="${job.id}"] [data-f=choose]`).check();
    await page.locator("#bulk").getByRole("button", { name: "Cancel" }).click();
    await page.getByRole("button", { name: "Cancel 2 jobs" }).click();
    await until("both end", async () => (await Promise.all(jobs.map((j) => server.job(j.id)))).every((j) => j.state === "cancelled"));
    await until("the selection is cleared", async () => (await page.locator("#rows [data-f=choose]:checked").count()) === 0);
    await until("the page shows both as cancelled", async () => (await page.locator("#rows tr").allTextContents()).every((row) => row.includes("cancelled")));
    // Repeats selecting both jobs and opening the dialog until the dialog offers to delete 2 jobs.
    await until("both are offered for deletion", async () => {
      await page.locator("#choose-all").setChecked(false);
      await page.locator("#choose-all").setChecked(true);
      await page.locator("#bulk").getByRole("button", { name: "Delete" }).click();
      const yes = page.getByRole("button", { name: "Delete 2 jobs" });
      if (await yes.waitFor({ timeout: 15_000 }).then(() => true, () => false)) return true;
      await page.keyboard.press("Escape");
      return false;
    });
    assert.match(await page.getByRole("dialog").textContent(), /\d kB|\d B|\d MB/, "the dialog shows the size");
    await page.getByRole("button", { name: "Delete 2 jobs" }).click();
    await until("both are gone", async () => (await page.locator("#rows tr").count()) === 0 && page.locator("#none-match").isVisible());
  });

  test("have notes, tags and a project, which are stored and shown on open pages", async () => {
    const { id } = finished[0], list = await browser.page(server, "/jobs"), otherPage = await list.tab(`/jobs/${id}?tab=notes`);
    const page = await browser.page(server, `/jobs/${id}?tab=notes`, { expectedErrors: [/422/] }), notes = page.locator("#note");
    // Each page has read the current values and is live.
    for (const open of [page, otherPage]) await until("the page is live", async () => (await open.locator("#live").textContent()) === "live" && (await open.locator("#project").inputValue()) === "default");
    await until("the job is listed", () => list.locator(`tr[data-id="${id}"]`).isVisible());
    await notes.fill("learned too slowly\nagain");
    await page.locator("#tags").fill("baseline, slow");
    await page.locator("#project").fill("vision");
    await notes.focus();
    await until("the changes are saved", async () => (await page.locator("#note-status").textContent()) === "Saved" && (await server.job(id)).project === "vision");
    await until("the other page shows the notes", async () => (await otherPage.locator("#note").inputValue()) === "learned too slowly\nagain");
    await until("the other page's title shows project and tags", async () => (await otherPage.locator("#project-name").textContent()) === "vision" && (await otherPage.locator("#job-tags a").allTextContents()).join() === "baseline,slow");
    await until("the list shows project and tags", async () => /· vision/.test(await list.locator(`tr[data-id="${id}"] [data-f=about]`).textContent()) && (await list.locator(`tr[data-id="${id}"] .tag`).count()) === 2);
    await page.reload();
    await until("the notes are kept after a reload", async () => (await notes.inputValue()) === "learned too slowly\nagain");
    assert.equal(await page.locator("#tags").inputValue(), "baseline, slow");
    await page.locator("#project").fill("no spaces");
    await notes.focus();
    await until("the error is shown", async () => /1 to 100 letters/.test(await page.locator("#project-error").textContent()));
    await page.locator("#project-name").click();
    await until("the project's jobs are listed", async () => page.url().endsWith("/jobs?project=vision") && (await page.locator("#rows tr").count()) === 1);
    await page.getByRole("button", { name: "Remove the filter project vision" }).click();
    await until("all jobs are listed", async () => (await page.locator("#rows tr").count()) > 1 && !(await page.locator("#chips").isVisible()));
  });
});

describe("Compare", () => {
  test("shows curves, results and different settings, and keeps its state in the URL", async () => {
    const page = await browser.page(server, "/compare");
    assert.ok(await page.getByText("Nothing to compare yet").isVisible());
    for (const job of finished) await page.locator("#picker").getByLabel(job.name).check();
    await until("Compare shows the validation accuracy first", async () => (await page.locator("#curves .curve").evaluateAll((all) => all.map((one) => one.dataset.metric))).join() === "val_accuracy");
    await page.getByRole("button", { name: "loss", exact: true }).first().click();
    await until("both curves are drawn", async () => (await page.evaluate(() => window.lockstep.chart.snapshot().map((s) => s.points))).join() === "60,60");
    await until("both results are shown", async () => (await page.locator("#results tr").count()) === 2);
    assert.equal(await page.locator("#settings tr").count(), 2, "learning rate and project differ");
    assert.match(await page.locator("#settings").textContent(), /train\.lr0\.0010\.1/);
    const order = async () => (await page.locator("#results th").allTextContents()).join();
    await page.locator("#results-head button", { hasText: /^loss$/ }).click();
    const orderBefore = await order();
    await page.locator("#results-head button", { hasText: /^loss$/ }).click();
    await until("the table is sorted", async () => (await order()) !== orderBefore);
    assert.equal(await page.locator("#parallel .job").count(), 2);
    assert.match(await page.locator("#parallel").textContent(), /train\.lr/);
    await page.getByRole("button", { name: "images/s", exact: true }).first().click();
    const link = page.url(), tab = await page.tab(new URL(link).pathname + new URL(link).search);
    await until("the URL shows the same comparison", async () => (await tab.locator("#results tr").count()) === 2);
    assert.equal(await tab.getByRole("button", { name: "images/s", exact: true }).first().getAttribute("aria-pressed"), "true");
    // A click is lost if the table is redrawn between mouse down and mouse up.
    await until("one job is left out", async () => {
      if ((await tab.locator("#results tr").count()) === 1) return true;
      await tab.locator("#results").getByRole("button", { name: "Leave out slow learner" }).click({ timeout: 1000 }).catch(() => {});
      return false;
    });
  });
});

describe("machines", () => {
  testInFullRun("start no new jobs while they are drained", async () => {
    const page = await browser.page(server, "/machines");
    await page.getByRole("button", { name: "Drain", exact: true }).click();
    await until("the machine is drained", () => page.getByText("drained", { exact: true }).isVisible());
    const job = await server.submit({ name: "waits", train: { steps: 100_000 } });
    await until("the job waits and says why", async () => { const j = await server.job(job.id); return j.state === "queued" && j.reason !== null; });
    await page.getByRole("button", { name: "Undrain" }).click();
    await until("the job runs after Undrain", async () => (await server.job(job.id)).state === "running");
    await server.ask(`/jobs/${job.id}/cancel`, {});
  });
});

describe("a run", () => {
  test("is paused and resumed, and is forked from its checkpoint with another learning rate", async () => {
    const { id } = await server.submit({ name: "paused", train: { steps: 100_000 } });
    const page = await browser.page(server, `/jobs/${id}`, { expectedErrors: [/422/] }), state = () => page.locator("#state").textContent();
    await until("the job trains", async () => (await server.job(id)).step > 5);
    await page.getByRole("button", { name: "Pause", exact: true }).click();
    await until("the job is paused", async () => (await state()) === "paused");
    await until("the banner says Paused", async () => /^Paused/.test(await page.locator("#banner-what").textContent()));
    const { step } = await server.job(id);
    await page.getByRole("button", { name: "Resume", exact: true }).click();
    await until("the job continues from its step", async () => { const job = await server.job(id); return job.state === "running" && job.attempt === 2 && job.step > step; });
    await until("the page shows the job as running", async () => (await state()) === "running");
    await page.locator("#log-attempt").selectOption("1");
    const shownAttempts = () => page.locator("#log-lines p[data-at] b").evaluateAll((all) => [...new Set(all.map((b) => b.title.split(",")[0]))].join());
    await until("only the log of attempt 1 is shown", async () => (await shownAttempts()) === "attempt 1");
    await page.locator("#log-attempt").selectOption("2");
    await until("only the log of attempt 2 is shown", async () => (await shownAttempts()) === "attempt 2");
    await page.getByRole("button", { name: "Pause", exact: true }).click();
    await until("the job is paused again", async () => (await state()) === "paused");

    await page.locator(".title").getByRole("button", { name: "Fork", exact: true }).click();
    const dialog = page.getByRole("dialog");
    await dialog.getByLabel("Settings to change").fill("train.lrr = 0.2");
    await dialog.getByRole("button", { name: "Fork", exact: true }).click();
    await until("the error is shown", async () => (await page.locator("#fork-error").textContent()) !== "");
    await dialog.getByLabel("Settings to change").fill('Learning rate = 0.2\nname = "its fork"');
    await dialog.getByRole("button", { name: "Fork", exact: true }).click();
    await page.waitForURL((url) => url.pathname !== `/jobs/${id}`);
    const fork = new URL(page.url()).pathname.split("/").pop();
    const made = await until("the fork continues from the checkpoint", async () => { const job = await server.job(fork); return job.state === "running" && job.step > step && job; });
    assert.deepEqual([made.spec.train.lr, made.name], [0.2, "its fork"]);
    await page.getByRole("tab", { name: "History" }).click();
    await until("the history links to the parent", () => page.locator("#history-panel").getByRole("link", { name: "paused", exact: true }).isVisible());
    for (const each of [id, fork]) await server.ask(`/jobs/${each}/cancel`, {});
  });
});

describe("on a job's page,", () => {
  testInFullRun("the log stops following its end when it is scrolled up, and follows again after Newest", async () => {
    const { id } = await server.submit({ name: "talks on", train: { steps: 100_000 } });
    const page = await browser.page(server, `/jobs/${id}`), lines = page.locator("#log-lines p[data-at]");
    const box = page.locator("#log-lines"), newest = page.getByRole("button", { name: "Newest", exact: true }), last = () => lines.last().getAttribute("data-at");
    await until("the log is longer than its box", async () => (await lines.count()) > 60);
    assert.ok(await page.locator("#log-follow").isChecked());
    // Scrolls to the top. Chromium scrolls in several steps, and a line that arrives during the first step scrolls the log back to its
    // end, so the scrolling is repeated.
    await until("the log no longer follows its end", async () => {
      if (!(await page.locator("#log-follow").isChecked()) && (await box.evaluate((b) => b.scrollTop)) === 0) return true;
      await box.hover();
      await page.mouse.wheel(0, -100_000);
      return false;
    });
    const lastBefore = await last();
    await until("new lines are counted", async () => /not following, \d+ new lines below/.test(await page.locator("#log-note").textContent()));
    assert.equal(await last(), lastBefore, "the shown lines do not move");
    await newest.click();
    await until("the newest line is shown", async () => (await last()) !== lastBefore && (await box.evaluate((b) => b.scrollHeight - b.scrollTop - b.clientHeight)) < 24);
    const newestBefore = await last();
    await until("the log follows its end", async () => (await last()) !== newestBefore && page.locator("#log-follow").isChecked());
    assert.equal(await newest.isVisible(), false);
    await server.ask(`/jobs/${id}/cancel`, {});
  });

  test("the URL keeps the axis, the smoothing, the ranks, the zoom and the tab", async () => {
    const page = await browser.page(server, `/jobs/${finished[1].id}`);
    await until("the chart is drawn", () => page.evaluate(() => window.lockstep?.charts.loss.firstDrawnAt));
    await page.locator("#smooth").fill("0.6");
    for (const name of ["log", "epoch", "mean"]) await page.getByRole("button", { name, exact: true }).click();
    await page.getByRole("button", { name: "rank 1" }).click();
    await page.evaluate(() => window.lockstep.view.setZoom([10, 40]));
    await page.getByRole("tab", { name: "Settings" }).click();
    await page.locator("#other-metric").selectOption("step_ms");
    await until("the URL has the settings", async () => { const q = new URL(page.url()).searchParams; return q.get("zoom") === "10~40" && q.get("ranks") === "1" && q.get("metric") === "step_ms"; });
    const tab = await page.tab(new URL(page.url()).pathname + new URL(page.url()).search);
    await until("the chart is drawn in another tab", () => tab.evaluate(() => window.lockstep?.charts.loss.firstDrawnAt));
    assert.deepEqual(await tab.evaluate(() => [window.lockstep.view.zoom, window.lockstep.view.axis, window.lockstep.charts.loss.scale, window.lockstep.charts.loss.smoothing]), [[10, 40], "epoch", "log", 0.6]);
    assert.ok(await tab.locator("#spec-panel").isVisible());
    assert.equal(await tab.getByRole("button", { name: "rank 1" }).getAttribute("aria-pressed"), "true");
  });

  test("a chart is saved as CSV with every point of both ranks", async () => {
    const page = await browser.page(server, `/jobs/${finished[1].id}`);
    await until("the chart is drawn", () => page.evaluate(() => window.lockstep?.charts.loss.firstDrawnAt));
    await page.getByLabel("Save Loss of each rank").click();
    const save = page.locator(".loss-card").getByRole("button", { name: "CSV", exact: true });
    const [file] = await Promise.all([page.waitForEvent("download"), save.click()]);
    assert.equal(file.suggestedFilename(), "fast-learner-loss.csv");
    assert.equal((await readFile(await file.path(), "utf8")).trim().split("\n").length, 1 + 2 * 60);
  });

  test("the log is searched, filtered and linked to by line", async () => {
    const page = await browser.page(server, `/jobs/${finished[1].id}`);
    const lines = page.locator("#log-lines p[data-at]");
    await until("the log is shown", async () => (await lines.count()) > 10);
    await page.getByLabel("Search the log").fill("VALIDATION ACCURACY");
    await until("one line is found", async () => (await lines.count()) === 1);
    assert.match(await page.locator("#log-note").textContent(), /1 line found/);
    await page.getByLabel("Search the log").fill("");
    await until("all lines are shown again", async () => (await lines.count()) > 10);
    await page.locator("#log-rank").selectOption("1");
    await until("only lines of rank 1 are shown", async () => { const ranks = await lines.locator("b").allTextContents(); return ranks.length > 1 && ranks.every((t) => t === "rank 1"); });
    await lines.nth(1).locator("time").click();
    const text = await lines.nth(1).textContent(), address = new URL(page.url());
    assert.match(address.searchParams.get("line"), /^\d+\.1\.1\.\d+$/);
    const tab = await page.tab(address.pathname + address.search);
    await until("the link shows the line", async () => (await tab.locator("#log-lines .marked").textContent()) === text);
    const file = await page.request.get(new URL(await page.locator("#log-download").getAttribute("href"), page.url()).href);
    assert.match(file.headers()["content-disposition"], /attachment; filename="fast-learner-rank1\.log"/);
    assert.match(await file.text(), /loss is/);
  });
});

describe("the keyboard", () => {
  test("opens help, search, pages, jobs and panels", async () => {
    const page = await browser.page(server, "/jobs");
    await until("the page's scripts have run", () => page.locator("#keys").isVisible());
    await page.keyboard.press("?");
    assert.match(await page.getByRole("dialog").textContent(), /next and previous job/);
    await page.keyboard.press("Escape");
    await page.getByRole("dialog").waitFor({ state: "hidden" });
    // Waits for the next frames, after which the page behind the dialog accepts keys.
    await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
    await page.keyboard.press("/");
    await until("the search has the focus", () => page.evaluate(() => document.activeElement.id === "search"));
    await page.keyboard.press("Escape");
    await until("the search has lost the focus", () => page.evaluate(() => document.activeElement.id !== "search"));
    // The second key must follow the first within 1.5 s.
    const pressTogether = (...keys) => Promise.all(keys.map((key) => page.keyboard.press(key)));
    await pressTogether("g", "m");
    await page.waitForURL(/\/machines$/);
    await until("the page's scripts have run", () => page.locator("#keys").isVisible());
    await pressTogether("g", "j");
    await page.waitForURL(/\/jobs$/);
    await page.goto(`${server.url}/jobs/${finished[1].id}`);
    await until("the page's scripts have run", () => page.locator("#keys").isVisible());
    const tabs = page.getByRole("tab");
    for (const place of [4, await tabs.count()]) {
      await page.keyboard.press(`${place}`);
      assert.equal(await tabs.nth(place - 1).getAttribute("aria-selected"), "true", `panel ${place}`);
    }
    await until("the last tab is the history", () => page.locator("#history-panel").isVisible());
    const before = page.url().split("?")[0];
    await page.keyboard.press("]");
    await until("the next job's page opens", async () => page.url().split("?")[0] !== before && /\/jobs\/j/.test(page.url()));
  });
});
