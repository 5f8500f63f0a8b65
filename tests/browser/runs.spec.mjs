// The page of a run that another program trains: metrics as panels, settings, and no ranks or checkpoints.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { assertViews } from "./looks.mjs";
import { Browser, TestServer, until, untilAsRendered } from "./test-server.mjs";

let server, browser;
before(async () => { [server, browser] = await Promise.all([TestServer.open({ dataset: false, agent: false }), Browser.open()]); });
after(async () => { await browser?.close(); await server?.close(); });

/** Returns the titles of the panels, and the number of points of each line. */
const panels = (page) => page.evaluate(() => [...document.querySelectorAll("#custom-grid .panel")].map((card) => {
  const lines = window.lockstep.charts[card.querySelector(".chart").dataset.chart].snapshot();
  return [card.querySelector("h3").textContent, lines.map((line) => line.points)];
}));

test("metrics of any name have panels, also if they arrive later; the summary's numbers come first", async () => {
  const run = await server.ask("/runs", { id: "r", name: "elsewhere", config: { lr: 0.1, net: { depth: 3 } } });
  const log = (first, values) => server.ask("/runs/r/records", { first, records: values.map((each, i) => ({ step: first + i, values: each })) });
  await log(1, [{ "train/loss": 2, "top 1, %": 10 }, { "train/loss": 1, "top 1, %": 20 }]);
  const file = `${server.url}/api/v1/runs/r/file?path=weights/model.safetensors`;
  assert.ok((await server.fetch(file, { method: "PUT", headers: server.headers, body: "0123456789" })).ok);
  const page = await browser.page(server, `/jobs/${run.id}`);
  const results = () => page.locator("#facts > div:visible").evaluateAll((all) => all.map((node) => node.innerText.replace(/\s+/g, " ").trim()));
  const untilShown = (...expected) => until(`the row of numbers shows ${expected}`, async () => { assert.deepEqual((await results()).sort(), expected.sort()); return true; });
  await until("the job's panels are drawn", async () => JSON.stringify(await panels(page)) === JSON.stringify([["train/loss", [2]], ["top 1, %", [2]]]));
  await untilShown("Step 2", "top 1, % 20", "train/loss 1");
  await untilAsRendered(page);
  // The charts are as high as those of a job, and no card is empty: a run has no log, so the settings are shown in its place, and there is no
  // card for a summary until the run has one.
  for (const chart of await page.locator(".panel .chart").all()) assert.ok((await chart.boundingBox()).height >= 300);
  assert.deepEqual(await page.locator(".own-settings dt:visible").allTextContents(), ["lr", "net.depth"]);
  assert.equal(await page.locator("#summary-title").count(), 0);
  const link = page.locator('section[aria-labelledby="files-title"] a');
  assert.equal(await link.textContent(), "weights/model.safetensors");
  const [download] = await Promise.all([page.waitForEvent("download"), link.click()]);
  assert.equal(download.suggestedFilename(), "model.safetensors");
  for (const hidden of ["#ranks", "#checkpoint-table", "#loss-chart", "#pause", "#retry", "#evaluation-title", "#log-title", "#log-search", "#progress"]) assert.equal(await page.locator(hidden).isVisible(), false, hidden);
  await log(3, [{ "train/loss": 0.5, constructor: 1 }]);
  await until("the new metric has a panel", async () => JSON.stringify(await panels(page)) === JSON.stringify([["train/loss", [3]], ["top 1, %", [2]], ["constructor", [1]]]));
  await untilShown("Step 3", "top 1, % 20", "train/loss 0.5000", "constructor 1");
  await log(4, [{ "train/loss": "NaN" }]);
  await server.ask("/runs/r", { state: "succeeded", summary: { accuracy: 0.75 } }, "PATCH");
  await until("the summary's numbers come first", async () => / · accuracy 75\.0 % · .*train\/loss 0\.5000/.test((await results()).join(" · ")));
  await page.reload();
  await until("a metric whose newest value is not finite has its panel", async () => (await panels(page)).some(([title]) => title === "train/loss"));
  assert.equal(await page.locator("#accuracy").isVisible(), false, "accuracy is shown once");
  const [cards, summary] = [await page.locator("#cards").boundingBox(), await page.locator(".summary-card").boundingBox()];
  assert.ok(summary.width > cards.width / 3, "the summary's card is wide enough for its text");
  await assertViews(page, "a run's page");
  await page.goto(`${server.url}/jobs`);
  await until("the list says why the run has no loss", async () => /“loss”, which the run has not logged/.test(await page.locator("#rows .c-loss").getAttribute("title") ?? ""));
  // The links that MLflow's client prints lead to Lockstep's pages.
  await page.goto(`${server.url}/#/experiments/0/runs/${run.id}`);
  await page.waitForURL(new RegExp(`/jobs/${run.id}$`));
  await page.goto(`${server.url}/#/experiments/0`);
  await page.waitForURL(/\/jobs\?project=default$/);
  // A comparison opens on a metric that the runs share, and lists the metrics that the runs have logged before Lockstep's own metrics.
  const otherRun = await server.ask("/runs", { id: "s", name: "other" });
  await server.ask("/runs/s/records", { first: 1, records: [{ step: 1, values: { batch: 8, "train/loss": 3 } }] });
  await page.goto(`${server.url}/compare?jobs=${run.id},${otherRun.id}`);
  await until("the shared loss has a chart", async () => (await page.locator("#curves .curve").evaluateAll((all) => all.map((one) => one.dataset.metric))).join() === "train/loss");
  assert.deepEqual((await page.locator("#more-metrics option").allTextContents()).slice(1, 5), ["constructor", "top 1, %", "✓ train/loss", "batch"]);
  const rows = await page.locator("#settings tr").evaluateAll((all) => all.map((row) => [...row.cells].map((cell) => cell.textContent)));
  assert.deepEqual(rows, [["config.lr", "0.1", "–"], ["config.net.depth", "3", "–"], ["summary.accuracy", "0.75", "–"]]);
  await page.goto(`${server.url}/compare?jobs=${run.id},${otherRun.id}&group=config.lr`);
  await until("a setting groups the runs", async () => (await page.locator("#compare-legend li").allTextContents()).sort().join() === "config.lr 0.1 (n = 1),config.lr – (n = 1)");
});
