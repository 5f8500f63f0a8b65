// Custom panels, histograms of layers and the picture of the network. The agent is simulated, so no test waits for
// training.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { loss, noise, range, simulateAgent, spec } from "./agent.mjs";
import { assertAccessible, assertViews } from "./looks.mjs";
import { Browser, TestServer, testInFullRun, losses, saveChart, until } from "./test-server.mjs";

const STEPS = 60;
let server, browser, agent, job, otherJob;
before(async () => {
  [server, browser] = await Promise.all([TestServer.open({ dataset: false, agent: false }), Browser.open()]);
  agent = await simulateAgent(browser.chromium, server, 4);
  job = await startJob("with panels");
  otherJob = await startJob("beside it");
});
after(async () => { await browser?.close(); await server?.close(); });

/** Starts a job of two ranks and reports its losses, its network and the histograms of three steps. */
async function startJob(name) {
  const job = await server.ask("/jobs", spec(name, 2, 1000)), attempt = job.attempt = await agent.attempt(job.id);
  await agent.begin(attempt);
  for (let rank = 0; rank < 2; rank++) await agent.reportSteps(attempt, rank, range(1, STEPS), {
    loss: (s) => loss(s * 3000, rank), accuracy: (s) => 0.3 + s / 120 + rank / 50, step_ms: (s) => 40.5 + 5 * noise(s), data_ms: (s) => 3.5 + noise(s + rank),
    ...(rank ? {} : { grad_norm: (s) => (s === 30 ? 90.5 : 1.5 + noise(s)), lr: (s) => 0.1 * Math.cos(s / 50), memory_used_bytes: (s) => 3.5e9 + s * 1e6 }),
  });
  await agent.report(attempt, 0, [{ type: "network", layers: LAYERS, timed_steps: 5 }, ...[10, 20, 30].map(histograms)]);
  return job;
}

const layer = (name, kind, output_shape, parameters, time_us) => ({ name, kind, output_shape, parameters, time_us });
const LAYERS = [
  layer("conv1", "conv 3x3", [16, 32, 32], 432, 310.5), layer("bn1", "batch_norm", [16, 32, 32], 32, 55.5),
  ...[["layer1", 16, 32], ["layer2", 32, 16], ["layer3", 64, 8]].flatMap(([stage, channels, size]) => range(0, 2).flatMap((block) => ["conv1", "conv2"].map((conv) => (
    layer(`${stage}.${block}.${conv}`, "conv 3x3", [channels, size, size], channels * channels * 9, 210.5 * (1 + block)))))),
  layer("fc", "linear", [10], 650, null),
];
/** The record of the histograms of all layers at a step. */
const histograms = (step) => ({ type: "histograms", step, layers: LAYERS.filter((l) => l.kind !== "batch_norm").flatMap((l, place) => ["weight", "gradient"].map((kind) => {
  const bound = (kind === "weight" ? 0.31 : 0.011) * (1 + place / 10 + step / 40);
  return { name: `${l.name}.weight`, kind, min: -bound, max: bound * 0.9, counts: range(0, 63).map((i) => Math.round(1000 * Math.exp(-(((i - 34) / (8 + step / 10)) ** 2)))) };
})) });

/** Opens the job's page and waits until its chart is drawn. */
async function open(path = `/jobs/${job.id}`, options = {}) {
  const page = await browser.page(server, path, options);
  await until("the chart is drawn", async () => (await losses(page))["rank 0"]?.points === STEPS);
  return page;
}
const titles = (page) => page.locator("#custom-grid h3").allTextContents();
const storedTitles = async () => (await server.ask(`/jobs/${job.id}/panels`)).panels.map((panel) => panel.title);
const savePanels = (panels, path = `/jobs/${job.id}/panels`) => server.ask(path, { panels }, "PUT");
const panel = (title, metrics, options = {}) => ({ title, metrics, ...options });
/** Returns labels and numbers of points of the lines of the panel at position `index`. */
const lines = (page, index) => page.evaluate((index) => {
  const key = document.querySelectorAll("#custom-grid .chart")[index]?.dataset.chart;
  return window.lockstep.charts[key]?.snapshot().map((line) => [line.label, line.points]);
}, index);

describe("panels", () => {
  test("are added, shown to other people, changed and removed", async () => {
    const page = await open(undefined, { expectedErrors: [/422/] }), dialog = page.locator("#panel-dialog");
    assert.match(await page.locator("#custom-note").textContent(), /None yet/);
    await page.getByRole("button", { name: "Add a panel" }).click();
    await dialog.getByRole("button", { name: "Save", exact: true }).click();
    assert.equal(await page.locator("#panel-error").textContent(), "Choose at least one metric.");
    await dialog.getByLabel("Title").fill("Loss and rate");
    for (const name of ["Loss", "Learning rate", "Step time"]) await dialog.getByLabel(name, { exact: true }).check();
    assert.equal(await dialog.getByLabel("GPU power").isVisible(), false, "a job on CPUs has no GPU metrics");
    await dialog.getByRole("button", { name: "Save", exact: true }).click();
    await until("the form refuses three quantities", async () => /3 quantities.*two axes/.test(await page.locator("#panel-error").textContent()));
    await dialog.getByLabel("Step time", { exact: true }).uncheck();
    await dialog.getByRole("button", { name: "Save", exact: true }).click();
    await until("the panel is shown", async () => (await titles(page)).join() === "Loss and rate");
    await until("the panel has both metrics", async () => { assert.deepEqual(await lines(page, 0), [["loss", STEPS], ["learning rate", STEPS]]); return true; });
    assert.deepEqual(await page.locator("#custom-grid .chart-legend li").allTextContents(), ["Loss", "Learning rate (right)"]);
    await until("the panel has two axes", () => page.evaluate(() => { const all = window.lockstep.charts, key = Object.keys(all).find((k) => k.startsWith("panel-")); return all[key].y2 && all[key].y2.high <= 0.2 && all[key].y.high >= 2; }));

    // Another person sees the panel in another browser.
    const stranger = await open();
    assert.deepEqual(await titles(stranger), ["Loss and rate"]);
    await until("the other person's panel has both metrics", async () => (await lines(stranger, 0))?.length === 2);
    await stranger.end();

    await page.getByRole("button", { name: "Edit Loss and rate" }).click();
    await dialog.getByLabel("Lines").selectOption("ranks");
    await dialog.getByLabel("Axis").selectOption("log");
    const slider = dialog.getByRole("slider", { name: "Smoothing" });
    assert.equal(await dialog.locator("#panel-smoothing-value").textContent(), "off");
    await slider.fill("0.49");
    await slider.press("ArrowRight");
    assert.equal(await dialog.locator("#panel-smoothing-value").textContent(), "0.5");
    await dialog.getByLabel("ignore outliers").check();
    await dialog.getByLabel("From", { exact: true }).fill("0.5");
    await dialog.getByLabel("To", { exact: true }).fill("4");
    await dialog.getByLabel("Width").selectOption("2");
    await dialog.getByLabel("Height").selectOption("2");
    await dialog.getByRole("button", { name: "Save", exact: true }).click();
    await until("the panel has a line per rank", async () => (await lines(page, 0))?.map(([label]) => label).join() === "loss, rank 0,loss, rank 1,learning rate");
    await page.reload();
    await until("the lines are kept after a reload", async () => (await lines(page, 0))?.length === 3);
    const { y_min, y_max, log, smoothing, robust } = (await server.ask(`/jobs/${job.id}/panels`)).panels[0];
    assert.deepEqual({ y_min, y_max, log, smoothing, robust }, { y_min: 0.5, y_max: 4, log: true, smoothing: 0.5, robust: true });
    await until("the panel's axis has the fixed range", () => page.evaluate(() => { const all = window.lockstep.charts, key = Object.keys(all).find((k) => k.startsWith("panel-")); const { y } = all[key]; return y?.kind === "log" && y.low === 0.5 && y.high === 4; }));
    const box = await page.locator("#custom-grid .panel").boundingBox(), grid = await page.locator("#custom-grid").boundingBox();
    assert.ok(Math.abs(box.width / grid.width - 2 / 3) < 0.02 && box.height > 380, JSON.stringify(box));

    await page.getByRole("button", { name: "Edit Loss and rate" }).click();
    await dialog.getByRole("button", { name: "Remove" }).click();
    await until("the panel is gone", async () => (await titles(page)).length === 0 && (await storedTitles()).length === 0);
  });

  testInFullRun("ignore outliers, and are saved with units on their axes", async () => {
    const axisEnd = {};
    for (const robust of [false, true]) {
      await savePanels([panel("Both", ["grad_norm", "step_ms"], { robust })]);
      const page = await open();
      axisEnd[robust] = await until("the chart is drawn", () => page.evaluate(() => { const all = window.lockstep.charts, key = Object.keys(all).find((k) => k.startsWith("panel-")); return all[key]?.y?.high; }));
      if (robust) {
        const svg = await saveChart(page, page.locator("#custom-grid .panel"), "SVG");
        for (const text of ["gradient norm (L2) · step time (ms) (right)", "optimizer step"]) assert.ok(svg.includes(`>${text}</text>`), `${text} in the picture`);
      }
      await page.end();
    }
    assert.ok(axisEnd.false > 90 && axisEnd.true < 10, `the axis ends at ${axisEnd.true} without outliers, at ${axisEnd.false} with them`);
    await server.ask(`/jobs/${job.id}/panels`, undefined, "DELETE");
  });

  test("are moved by arrow keys and by dragging", async () => {
    await savePanels(["a", "b", "c"].map((title) => panel(title, ["loss"])));
    const page = await open(), handle = (title) => page.getByRole("button", { name: new RegExp(`^Move ${title},`) });
    await handle("a").focus();
    await page.keyboard.press("ArrowRight");
    await until("panel a is the second", async () => (await titles(page)).join("") === "bac" && (await storedTitles()).join("") === "bac");
    assert.equal(await page.evaluate(() => document.activeElement.getAttribute("aria-label")), "Move a, panel 2 of 3. Arrow keys move it.");
    await until("the note names the position", async () => (await page.locator("#custom-note").textContent()) === "a is panel 2 of 3.");
    // Keys in quick succession: the response to an earlier move must not undo a later move.
    for (const key of ["End", "ArrowRight", "Home", "ArrowDown"]) {
      await until("the handle keeps the focus", () => page.evaluate(() => document.activeElement.getAttribute("aria-label")?.startsWith("Move a,")));
      await page.keyboard.press(key);
    }
    await until("panel a is the second again", async () => (await titles(page)).join("") === "bac" && (await storedTitles()).join("") === "bac");
    const from = await handle("c").boundingBox(), to = await page.locator("#custom-grid .panel").first().boundingBox();
    await page.mouse.move(from.x + 5, from.y + 5);
    await page.mouse.down();
    await page.mouse.move(to.x + 30, to.y + 60, { steps: 5 });
    assert.equal(await page.locator("#custom-grid .panel").first().getAttribute("data-drop"), "before");
    await page.mouse.up();
    await until("panel c is the first", async () => (await titles(page)).join("") === "cba" && (await storedTitles()).join("") === "cba");
    await page.reload();
    await until("the order is kept after a reload", async () => (await titles(page)).join("") === "cba");
    await until("every chart is drawn", async () => (await page.locator("#custom-grid .chart[data-drawn]:not([data-drawn='0'])").count()) === 3);
  });

  testInFullRun("return to their order when the server refuses a move", async () => {
    await savePanels(["a", "b"].map((title) => panel(title, ["loss"])));
    const page = await open(undefined, { expectedErrors: [/503|Failed to load/] });
    await page.route("**/panels", (route) => route.fulfill({ status: 503, contentType: "application/problem+json", body: JSON.stringify({ detail: "the database is away" }) }));
    await page.getByRole("button", { name: /^Move a,/ }).focus();
    await page.keyboard.press("ArrowRight");
    await until("the note shows the server's error", async () => (await page.locator("#custom-note").textContent()) === "the database is away");
    assert.deepEqual([await titles(page), await storedTitles()], [["a", "b"], ["a", "b"]]);
  });

  test("of a project are shown for its jobs without their own panels", async () => {
    await savePanels([panel("for all", ["accuracy"], { columns: 3 })]);
    const page = await open();
    await page.getByRole("button", { name: "Save for the project" }).click();
    await until("the note confirms it", async () => /without panels of their own now show these panels/.test(await page.locator("#custom-note").textContent()));
    const otherPage = await open(`/jobs/${otherJob.id}`);
    assert.deepEqual(await titles(otherPage), ["for all"]);
    assert.equal(await otherPage.locator("#custom-note").textContent(), "of the project default");
    assert.equal(await otherPage.getByRole("button", { name: "Use the project's" }).isVisible(), false, "the job already shows the project's panels");
    await until("the project's panel is drawn", async () => (await lines(otherPage, 0))?.[0]?.join() === `mean of ranks,${STEPS}`);
    await otherPage.getByRole("button", { name: "Edit for all" }).click();
    await otherPage.locator("#panel-dialog").getByLabel("Title").fill("mine");
    await otherPage.locator("#panel-dialog").getByRole("button", { name: "Save", exact: true }).click();
    await until("the job has its own panel", async () => (await titles(otherPage)).join() === "mine");
    assert.deepEqual(await storedTitles(), ["for all"], "the other job's panels are unchanged");
    await otherPage.getByRole("button", { name: "Use the project's" }).click();
    await otherPage.getByRole("button", { name: "Remove them" }).click();
    await until("the job shows the project's panels again", async () => (await titles(otherPage)).join() === "for all");
    await otherPage.end();
    await savePanels([], "/projects/default/panels");
  });
});

describe("layers", () => {
  test("show histograms of their values, by step and by layer", async () => {
    const page = await open(`/jobs/${job.id}?tab=histograms`), heat = page.locator("#histogram-chart");
    await until("the picture has three steps", async () => (await heat.getAttribute("data-steps")) === "3");
    await until("each layer has a row", async () => (await page.locator("#histogram-rows tr").count()) === 20);
    assert.equal(await page.locator("#histogram-title").textContent(), "Every layer at step 30");
    assert.match(await heat.locator("canvas").getAttribute("aria-label"), /^Weights of conv1.weight over 3 steps; at the newest, 30, from -0.542 to 0.488$/);
    await heat.focus();
    for (const key of ["End", "ArrowLeft"]) await page.keyboard.press(key);
    await until("a step is described", async () => /^step 20, attempt 1: [\d,]+ values from -0.465 to 0.418, median 0.0\d+, nine of ten from -0.\d+ to 0.\d+$/.test(await page.locator("#histogram-at").textContent()));
    await until("the table shows the same step", async () => (await page.locator("#histogram-title").textContent()) === "Every layer at step 20");
    await page.getByRole("button", { name: "layer2.1.conv2.weight" }).click();
    await until("another layer is shown", async () => /^Weights of layer2.1.conv2.weight/.test(await heat.locator("canvas").getAttribute("aria-label")));
    await page.getByRole("button", { name: "gradients" }).click();
    await until("the layer's gradients are shown", async () => /^Gradients of layer2.1.conv2.weight/.test(await heat.locator("canvas").getAttribute("aria-label")));
    assert.equal(new URL(page.url()).searchParams.get("values"), "gradient");
    await page.keyboard.press("End");
    // The job reports another step while the page is open.
    await agent.report(job.attempt, 0, [histograms(40)]);
    await until("the next step is drawn", async () => (await heat.getAttribute("data-steps")) === "4");
  });

  test("are shown as a picture and a table of the network", async () => {
    const page = await open(`/jobs/${job.id}?tab=network`);
    await until("the summary is shown", async () => (await page.locator("#network-sum").textContent()) === "21 layers · 291,418 parameters · 7.9 ms in a step, median of 5 steps");
    assert.equal(await page.locator("#network-time").textContent(), "time, median of 5 steps");
    assert.deepEqual(await page.locator("#network-stages b").allTextContents(), ["conv1 to bn1", "layer1", "layer2", "layer3", "fc"]);
    assert.match(await page.locator("#network-stages li").nth(2).innerText(), /32 × 16 × 16\s+6 layers\s+55,296 parameters\s+2.5 ms/);
    const row = page.locator("#network-rows tr").filter({ hasText: "layer3.2.conv1" });
    assert.deepEqual(await row.locator("th, td").allTextContents(), ["layer3.2.conv1", "conv 3x3", "64 × 8 × 8", "36,864", "632 µs"]);
  });

  testInFullRun("show a plan's predicted figures, and each rank its position in the mesh", async () => {
    const planned = (name, placement) => ({ ...layer(name, "linear", [10], 650, 210.5), plan: { placement, memory_bytes: 2_500_000, sent_bytes: 0, time_us: 200.5 } });
    const plan = {
      words: "1 (data) x 1 (height) x 2 (model) ranks, fc split by its outputs", pipeline: 1, data: 1, height: 1, model: 2, shard: [{ match: "fc", split: "out" }], measured_step_ms: 13.5, measured_memory_bytes: 3.3e9,
      predicted: { step_ms: 12.5, images_per_second: 1280, memory_bytes: 3e9, limited_by: "computing", why: "data parallel takes 20.0 ms a step" },
    };
    await agent.report(otherJob.attempt, 0, [{ type: "network", layers: [planned("conv1", "own pictures"), planned("fc", "1/2 of the channels")], plan }]);
    const page = await open(`/jobs/${otherJob.id}?tab=network`);
    await until("the plan is shown", async () => /fc split by its outputs · limited by computing/.test(await page.locator("#plan-words").textContent()));
    const figures = await page.locator("#plan-rows tr").evaluateAll((rows) => rows.map((row) => [...row.cells].map((cell) => cell.textContent).join(" ")));
    assert.deepEqual(figures, ["time of a step 12.5 ms 13.5 ms +8 %", "images a second 1,280 1,185 −7 %", "memory of a rank 3.0 GB 3.3 GB +10 %"]);
    assert.deepEqual(await page.locator("#mesh .mesh-rank").evaluateAll((all) => all.map((rank) => rank.title)), ["rank 0 · data 0 · model 0: part 1 of 2 of fc", "rank 1 · data 0 · model 1: part 2 of 2 of fc"]);
    assert.equal(await page.locator("#mesh .own").last().getAttribute("x"), "14");
    const row = page.locator("#network-rows tr").last();
    assert.deepEqual(await row.locator("th, td").allTextContents(), ["fc", "linear", "10", "650", "211 µs", "201 µs", "1/2 of the channels", "2.5 MB", "0 B"]);
    await until("the list of ranks shows the positions", async () => /data 0\s*model 1: part 2 of 2 of fc/.test(await page.locator("#ranks [data-rank='1']").innerText()));
  });

  testInFullRun("have no tab on the page of a job that has not reported them", async () => {
    const { id } = await server.ask("/jobs", spec("quiet", 2, 10));
    const page = await browser.page(server, `/jobs/${id}?tab=network`);
    await until("the log is open instead", () => page.locator("#log-panel").isVisible());
    for (const name of ["Histograms", "Network"]) assert.equal(await page.getByRole("tab", { name }).isVisible(), false, name);
    const groups = (hidden) => page.locator("#other-metric optgroup").evaluateAll((all, hidden) => all.filter((g) => g.hidden === hidden).map((g) => g.label), hidden);
    await until("metrics that the job cannot have are not offered", async () => (await groups(true)).join() === "float16,GPU");
    assert.deepEqual(await groups(false), ["Training", "Time of a step", "Machine"]);
    await server.ask(`/jobs/${id}/cancel`, {});
  });
});

describe("a page with panels and histograms", () => {
  test("fits, passes axe, and moves the focus to the form and back", async () => {
    await savePanels([
      panel("Loss and learning rate", ["loss", "lr"], { columns: 2, smoothing: 0.6 }), panel("Times", ["step_ms", "data_ms"]),
      panel("A title that is as long as somebody in a hurry makes it, and then a bit longer", ["accuracy"], { lines: "ranks" }),
      panel("Memory", ["memory_used_bytes"], { columns: 3, rows: 2 }),
    ]);
    const page = await open(`/jobs/${job.id}?tab=histograms`, { reducedMotion: "reduce" });
    await until("panels are drawn", async () => (await page.locator("#custom-grid .chart[data-drawn]:not([data-drawn='0'])").count()) === 4);
    await until("the histograms are listed", async () => (await page.locator("#histograms-panel tbody tr").count()) >= 20);
    await assertViews(page, "histograms");
    await page.getByRole("button", { name: "Edit Times" }).focus();
    await page.keyboard.press("Enter");
    await until("the form opens", () => page.locator("#panel-dialog").isVisible());
    await assertAccessible(page, "the form");
    await page.keyboard.press("Escape");
    assert.equal(await page.evaluate(() => document.activeElement.getAttribute("aria-label")), "Edit Times");
  });
});
