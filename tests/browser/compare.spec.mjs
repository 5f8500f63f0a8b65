// The page Compare: several charts, groups of seeds as a mean with a band, a scatter plot and parallel coordinates that share a
// selection, and long names.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { metrics, range, simulateAgent, spec } from "./agent.mjs";
import { queryOf } from "./five-jobs.mjs";
import { assertViews } from "./looks.mjs";
import { Browser, TestServer, saveChart, testInFullRun, until } from "./test-server.mjs";

const LONG = "resnet20-on-made-up-pictures-with-a-name-that-is-very-long-and-goes-on-lr-0.4-cosine-warmup-5-seed-number-2";
let server, browser, agent;
const jobs = [];

/** Reports steps with a constant loss, so that means are known, and validation loss (1 higher) at the last step. */
const train = (attempt, loss, from, to) => agent.report(attempt, 0, [metrics(0, range(from, to), { loss, lr: 0.1, step_ms: 20.5 }), metrics(0, [to], { val_loss: loss + 1 })]);

before(async () => {
  [server, browser] = await Promise.all([TestServer.open({ dataset: false, agent: false }), Browser.open()]);
  agent = await simulateAgent(browser.chromium, server, 4);
  for (const [name, lr, seed, loss, tags] of [["fast", 0.4, 1, 1, ["good"]], [LONG, 0.4, 2, 3, ["good"]], ["slow", 0.1, 1, 5, []]]) {
    const body = spec(name, 1, 100);
    Object.assign(body.train, { lr, seed });
    const { id } = await server.ask("/jobs", { ...body, tags }), attempt = await agent.attempt(id);
    await agent.begin(attempt, { total_steps: 100, steps_per_epoch: 50 });
    await train(attempt, loss, 1, 50);
    await agent.report(attempt, 0, [{ type: "evaluation", epoch: 1, step: 50, samples: 100, accuracy: 1 / (loss + 1), loss: loss + 1, secs: 1.5 }]);
    jobs.push({ id, attempt, name });
  }
  for (const { attempt } of jobs.slice(0, 2)) await agent.endAttempt(attempt, { how: "succeeded", step: 100 });
});
after(async () => { await browser?.close(); await server?.close(); });

const comparePath = (query = "") => `/compare?jobs=${jobs.map((j) => j.id).join(",")}${query.includes("metric=") ? "" : "&metric=loss"}${query}`;
const untilDrawn = (page) => until("the charts are drawn", () => page.evaluate(() => Number(document.querySelector("#curves .chart")?.dataset.drawn) > 0 && document.querySelectorAll("#parallel .job").length === 3 && document.getElementById("scatter").dataset.points === "3"));
/** First letters of the selected jobs' names: f (fast), r (`LONG`), s (slow). */
const selected = (page) => page.evaluate(() => [...window.lockstep.selection.ids()].map((id) => window.lockstep.jobs().find((j) => j.id === id).name[0]).join(""));
/** First letters of the names of jobs whose lines are faint in the parallel coordinates. */
const faint = (page) => page.locator("#parallel .job.out").evaluateAll((lines) => lines.map((line) => line.getAttribute("aria-label")[0]).join(""));

describe("charts", () => {
  test("are drawn for each chosen metric, are named in the URL, and are live", async () => {
    const page = await browser.page(server, comparePath());
    await untilDrawn(page);
    assert.deepEqual(await page.locator("#curves .curve h3").allTextContents(), ["loss (cross-entropy)"]);
    await page.locator("button[data-metric=val_loss]").click();
    await page.locator("#more-metrics").selectOption("grad_norm");
    assert.equal(queryOf(page).get("metric"), "loss,val_loss,grad_norm");
    await page.reload();
    await untilDrawn(page);
    assert.deepEqual(await page.locator("#curves .curve").evaluateAll((all) => all.map((one) => one.dataset.metric)), ["loss", "val_loss", "grad_norm"]);
    assert.equal(await page.locator(".curve[data-metric=grad_norm] .chart").getAttribute("data-empty"), "None of these jobs has a value of this metric yet.");
    const points = (metric) => page.evaluate((metric) => window.lockstep.charts[metric].snapshot().map((s) => s.points).join(), metric);
    await until("validation loss is drawn", async () => (await points("val_loss")) === "1,1,1");
    await train(jobs[2].attempt, 5, 51, 60);
    await until("both charts follow the running job", async () => (await points("loss")) === "50,50,60" && (await points("val_loss")) === "1,1,2");
    await page.locator("button[data-metric=loss]").click();
    assert.equal(queryOf(page).get("metric"), "val_loss,grad_norm");
    assert.equal(await page.locator("#curves .curve").count(), 2);
  });

  testInFullRun("remove their listeners when they are switched off", async () => {
    const page = await browser.page(server, comparePath());
    await untilDrawn(page);
    const tools = await page.context().newCDPSession(page);
    /** Counts the listeners of the page and of the view that its charts share. */
    const listeners = async () => {
      let count = 0;
      for (const expression of ["document", "lockstep.chart.view"]) {
        const { result } = await tools.send("Runtime.evaluate", { expression });
        count += (await tools.send("DOMDebugger.getEventListeners", { objectId: result.objectId })).listeners.length;
      }
      return count;
    };
    const listenersBefore = await listeners();
    await page.locator("button[data-metric=val_loss]").click();
    assert.ok((await listeners()) > listenersBefore, "the second chart adds listeners");
    await page.locator("button[data-metric=val_loss]").click();
    assert.equal(await page.locator("#curves .curve").count(), 1);
    assert.equal(await listeners(), listenersBefore);
  });
});

describe("a metric", () => {
  testInFullRun("has the same name, unit and number format as on a job's page", async () => {
    const { id } = await server.ask("/jobs", spec("measured", 1, 100)), attempt = await agent.attempt(id);
    await agent.begin(attempt, { total_steps: 100, steps_per_epoch: 50 });
    await agent.reportSteps(attempt, 0, range(1, 20), { accuracy: (step) => 0.005 + step / 25, gpu_memory_bytes: (step) => step * 1e8, gpu_power_watts: (step) => 300 + step, step_ms: 20.5 });
    const page = await browser.page(server, `/compare?jobs=${id}&metric=accuracy,gpu_memory_bytes,gpu_power_watts`);
    const card = (metric) => page.locator(`.curve[data-metric=${metric}]`);
    await until("the three charts are drawn", () => page.evaluate(() => [...document.querySelectorAll("#curves .chart")].filter((chart) => Number(chart.dataset.drawn) > 0).length === 3));
    const names = ["training accuracy (%)", "GPU memory (bytes)", "GPU power (W)"];
    assert.deepEqual(await page.locator("#curves .curve h3").allTextContents(), names);
    assert.ok((await page.locator("#more-metrics option").allTextContents()).includes("✓ GPU power (W)"), "the list of metrics has the same name");
    for (const [metric, name, tick] of [["accuracy", names[0], /^\d+ %$/], ["gpu_memory_bytes", names[1], /^[\d.]+ GB$/], ["gpu_power_watts", names[2], /^\d+ W$/]]) {
      const texts = [...(await saveChart(page, card(metric), "SVG")).matchAll(/>([^<>]*)<\/text>/g)].map(([, text]) => text);
      assert.ok(texts.includes(name) && texts.some((text) => tick.test(text)), `${metric}: ${texts.join(" | ")}`);
    }
    // A range of accuracies is entered in percent, as the axis shows it.
    const accuracy = card("accuracy");
    await accuracy.locator("summary", { hasText: "Range" }).click();
    await accuracy.getByLabel("from").fill("20");
    await accuracy.getByLabel("to", { exact: true }).fill("60");
    await accuracy.getByLabel("to", { exact: true }).press("Enter");
    await until("the axis goes from 20 % to 60 %", async () => (await page.evaluate(() => { const { low, high } = window.lockstep.charts.accuracy.y; return [low.toFixed(3), high.toFixed(3)].join(); })) === "0.200,0.600");
    assert.equal(queryOf(page).get("compare-accuracy-range"), "20~60");
    const jobPage = await page.tab(`/jobs/${id}?metric=gpu_power_watts`);
    await until("the job's page has drawn the metric", () => jobPage.evaluate(() => window.lockstep?.charts.lr.firstDrawnAt > 0));
    assert.deepEqual(await jobPage.evaluate(() => ["accuracy", "lr"].map((name) => window.lockstep.charts[name].yName())), ["accuracy (%)", names[2]]);
    await agent.endAttempt(attempt, { how: "succeeded", step: 100 });
  });
});

describe("jobs with the same name", () => {
  testInFullRun("are distinguished by their different settings, or by their ids", async () => {
    const ids = [];
    for (const lr of [0.3, 0.6, 0.6]) {
      const body = spec("twin", 1, 100);
      Object.assign(body.train, { lr });
      ids.push((await server.ask("/jobs", body)).id);
    }
    const page = await browser.page(server, `/compare?jobs=${ids.join(",")}`);
    const names = () => page.locator("#compare-legend li").allTextContents();
    await until("the jobs are listed", async () => (await names()).length === 3);
    assert.deepEqual(await names(), ["twin · lr 0.3", ...ids.slice(1).map((id) => `twin · lr 0.6, ${id.slice(-5)}`)]);
    for (const id of ids) await server.ask(`/jobs/${id}/cancel`, {});
  });
});

describe("groups", () => {
  test("are drawn as a mean with a chosen band, each in its own colour", async () => {
    const page = await browser.page(server, comparePath());
    await untilDrawn(page);
    await until("the curves of all jobs are read", () => page.evaluate(() => window.lockstep.chart.snapshot().length === 3));
    const offered = await page.locator("#group-by option").allTextContents();
    for (const key of ["tag", "train.lr", "train.seed"]) assert.ok(offered.includes(key), `${key} in ${offered}`);
    await page.locator("#group-by").selectOption("train.lr");
    assert.equal(queryOf(page).get("group"), "train.lr");
    assert.deepEqual(await page.locator("#compare-legend li").allTextContents(), ["train.lr 0.1 (n = 1)", "train.lr 0.4 (n = 2)"]);
    assert.match(await page.locator("#group-note").textContent(), /mean over the n jobs of a group.*one standard deviation/);
    const lines = () => page.evaluate(() => window.lockstep.chart.layers().map(({ label, band, series: { segments: [g] } }) => ({ label, hasBand: band > 0, mean: g.mean[10], low: g.min[10], high: g.max[10] })));
    const lineOfTwoJobs = async () => (await lines()).find(({ label }) => label.startsWith("train.lr 0.4"));
    // Losses of 1 and 3: the mean is 2, the sample standard deviation is the square root of 2.
    const deviation = await lineOfTwoJobs();
    assert.ok(deviation.hasBand && deviation.mean === 2 && Math.abs(deviation.high - 2 - Math.SQRT2) < 1e-6 && Math.abs(deviation.low - 2 + Math.SQRT2) < 1e-6, JSON.stringify(deviation));
    await page.getByRole("button", { name: "lowest to highest" }).click();
    const extremes = await lineOfTwoJobs();
    assert.deepEqual([extremes.mean, extremes.low, extremes.high], [2, 1, 3]);
    assert.match(await page.locator("#group-note").textContent(), /the lowest to the highest value/);
    for (const axis of ["epoch", "time"]) {
      await page.locator(`button[data-axis=${axis}]`).click();
      await until(`the groups are drawn by ${axis}`, async () => (await lines()).every(({ mean }) => mean > 0));
    }
    const colours = () => page.locator("#compare-legend i").evaluateAll((all) => all.map((i) => i.className));
    const coloursBefore = await colours();
    await page.reload();
    await untilDrawn(page);
    assert.deepEqual(await colours(), coloursBefore, "a group keeps its colour");
    assert.equal(new Set(coloursBefore).size, 2);
    await page.locator("#group-by").selectOption("tag");
    assert.deepEqual(await page.locator("#compare-legend li").allTextContents(), ["#good (n = 2)", "no tag (n = 1)"]);
    await page.locator("#group-by").selectOption("");
    assert.equal(await page.locator("#compare-legend li").count(), 3);

    // One job has more steps than the others: the crosshair shows the number of jobs in the mean.
    await train(jobs[2].attempt, 5, 51, 90);
    await page.goto(`${server.url}${comparePath("&group=model.arch")}`);
    await untilDrawn(page);
    const box = await page.locator("#curves .chart").first().boundingBox(), tip = page.locator("#curves .tip").first();
    await until("the tooltip shows the mean of 3 jobs at the left, and of 1 at the right", async () => {
      await page.mouse.move(box.x + box.width * 0.4, box.y + box.height / 2);
      const left = await tip.innerText();
      await page.mouse.move(box.x + box.width * 0.95, box.y + box.height / 2);
      return /\(n = 3\)/.test(left) && /\(n = 1 of 3\)/.test(await tip.innerText());
    }, 20_000);
  });
});

describe("a file of groups", () => {
  testInFullRun("has a column named after the axis", async () => {
    const page = await browser.page(server, comparePath("&group=train.lr"));
    await untilDrawn(page);
    const card = page.locator(".curve[data-metric=loss]");
    // The first step of 50 per epoch took 20.5 ms.
    for (const [axis, column, start] of [["step", "step", 1], ["epoch", "epoch", 1 / 50], ["time", "time_secs", 0.0205]]) {
      await page.locator(`button[data-axis=${axis}]`).click();
      const drawnFrom = () => page.evaluate(() => window.lockstep.chart.layers()[0].series.segments[0].steps[0]);
      await until(`the chart is drawn by ${axis}`, async () => Math.abs(await drawnFrom() - start) < 1e-6, 20_000);
      const [head, row] = (await saveChart(page, card, "CSV")).split("\n");
      assert.equal(head, `line,attempt,${column},points,min,max,mean`);
      assert.ok(Math.abs(Number(row.split(",")[2]) - start) < 1e-6, row);
    }
  });
});

describe("the selection", () => {
  test("combines brushes on axes and in the scatter plot", async () => {
    const page = await browser.page(server, comparePath());
    await untilDrawn(page);
    // Brushes the upper half of the axis of learning rates.
    await page.locator("#parallel").scrollIntoViewIfNeeded();
    const axis = async (key) => page.locator(`#parallel [data-axis="${key}"]`).boundingBox();
    const box = await axis("train.lr");
    await page.mouse.move(box.x + 14, box.y + 12);
    await page.mouse.down();
    await page.mouse.move(box.x + 14, box.y + box.height / 2, { steps: 5 });
    await page.mouse.up();
    assert.equal(await selected(page), "fr");
    assert.equal(await faint(page), "s");
    assert.match(await page.locator("#selection-count").textContent(), /2 of 3 jobs selected/);
    assert.equal(await page.locator("#results tr.out").count(), 1);
    assert.deepEqual(await page.evaluate(() => window.lockstep.chart.layers().map(({ alpha }) => alpha)), [1, 1, 0.15]);
    // Brushes low losses in the scatter plot of loss by seed.
    await page.locator("#scatter-x").selectOption("train.seed");
    await page.locator("#scatter-y").selectOption("result:loss");
    assert.deepEqual([queryOf(page).get("scatter-x"), queryOf(page).get("scatter-y")], ["train.seed", "result:loss"]);
    await page.locator("#scatter").scrollIntoViewIfNeeded();
    const plot = await page.locator("#scatter").boundingBox();
    const drag = async (from, to) => { await page.mouse.move(plot.x + from[0] * plot.width, plot.y + from[1] * plot.height); await page.mouse.down(); await page.mouse.move(plot.x + to[0] * plot.width, plot.y + to[1] * plot.height, { steps: 5 }); await page.mouse.up(); };
    // The axis of losses is inverted: low losses are at the top.
    await drag([0.05, 0.02], [0.5, 0.3]);
    assert.equal(await selected(page), "f", "both brushes count");
    assert.equal(await page.locator("#parallel .brush").count(), 3, "the scatter plot's brush also appears on the two axes");
    await page.getByRole("button", { name: "Clear", exact: true }).click();
    assert.equal(await selected(page), "frs");
    assert.equal(await page.locator("#selection").isVisible(), false);
    // Brushes the axis of learning rates by keyboard.
    await page.locator('#parallel [data-axis="train.lr"]').focus();
    await page.keyboard.press("ArrowUp");
    assert.equal(await selected(page), "fr");
    await page.keyboard.press("Escape");
    assert.equal(await selected(page), "frs");
    await page.locator("#scatter").focus();
    await page.keyboard.press("ArrowRight");
    await until("the tooltip shows a job", () => page.locator("#scatter .tip").isVisible());
    await page.keyboard.press("Enter");
    assert.equal((await selected(page)).length, 1);
    await page.getByRole("button", { name: "Compare only these" }).click();
    await until("one job is left", async () => (await page.locator("#compare-about").textContent()) === "1 job: choose a second job to compare");
    assert.equal(await page.locator("#settings-none").textContent(), "Choose a second job.");
  });

  testInFullRun("has a scatter plot in the jobs' colours, which is saved as SVG, PNG and CSV", async () => {
    const page = await browser.page(server, comparePath("&scatter-x=train.lr&scatter-y=result%3Aloss"));
    await untilDrawn(page);
    const legend = await page.evaluate(() => [...document.querySelectorAll("#compare-legend i")].map((mark) => getComputedStyle(mark).backgroundColor));
    for (const [i, colour] of legend.entries()) {
      const line = page.locator(`#parallel .job[data-job="${jobs[i].id}"]`);
      assert.equal(await line.evaluate((g) => getComputedStyle(g).color), colour);
      assert.equal(await page.locator(`#picker li:has(input[value="${jobs[i].id}"]) i`).evaluate((node) => getComputedStyle(node).backgroundColor), colour);
    }
    const card = page.locator("section", { has: page.locator("#scatter") });
    const svg = await saveChart(page, card, "SVG");
    for (const text of ["loss by train.lr", "train.lr", "loss", "fast", "slow", LONG]) assert.ok(svg.includes(`>${text}</text>`), `${text} in the picture`);
    for (const colour of legend) assert.ok(svg.includes(`fill="${colour}" opacity="0.9"`), `a point of ${colour}`);
    assert.equal((await saveChart(page, card, "PNG")).subarray(1, 4).toString(), "PNG");
    const rows = (await saveChart(page, card, "CSV")).trim().split("\n");
    assert.equal(rows[0], "id,name,train.lr,loss");
    assert.equal(rows[1], `${jobs[0].id},fast,0.4,1`);
  });
});

describe("results", () => {
  test("have a column for each axis, are sorted by validation loss, and have a note if accuracies do not show which job is better", async () => {
    const page = await browser.page(server, comparePath());
    await untilDrawn(page);
    assert.deepEqual(await page.locator("#results-head button").allTextContents(), ["job", "state", "loss", "val. loss", "accuracy of the last batch", "val. accuracy", "best accuracy", "images/s", "steps", "ran for"]);
    assert.equal(await page.locator("#results [data-column='val. loss']").count(), 3);
    assert.equal(await page.locator("#results-note").textContent(), "", "the accuracies are of the same pictures and differ clearly");
    const job = (value, val_pictures, dataset, { validation = "test", id = `${value} of ${dataset}` } = {}) => ({ id, name: `${dataset}${val_pictures ?? ""}`, best: { value }, last: { val_pictures }, spec: { data: { dataset, validation, validation_seed: 0 } } });
    const otherPictures = "These accuracies may not have been measured on the same validation pictures.";
    const notes = [
      [[job(0.525, 40, "pets"), job(0.615, 78, "pets")], "These accuracies were not measured on the same validation pictures."],
      [[job(0.1, 100, "a"), job(0.9, 100, "b")], otherPictures], [[job(0.1, 100, "a"), job(0.9, 100, "a", { validation: 0.1 })], otherPictures], [[job(0.1, 100, "a"), job(0.995, undefined, "own")], "The number of validation pictures of these jobs is unknown, so their differences to other jobs may be chance: own."],
      [[job(0.6, 40, "pets", { id: "j0aaaaa" }), job(0.6, 40, "pets", { id: "j0bbbbb" })], "The best accuracies of pets40 · aaaaa and pets40 · bbbbb are equal (60.0 %), so these results do not show which is better."],
      [[job(0.525, 78, "pets", { id: "j0aaaaa" }), job(0.615, 78, "pets", { id: "j0bbbbb" })], "pets78 · bbbbb (61.5 %) and pets78 · aaaaa (52.5 %) differ by 9.0 points, which is less than two standard errors of the difference (15.8 points), so these results do not show which is better."],
    ];
    for (const [pair, note] of notes) assert.equal(await page.evaluate(async (pair) => (await import("/static/compare/caution.js")).caution(pair), pair), note);
    await page.locator("button[data-settings=all]").click();
    assert.match(await page.locator("#settings tr").first().getAttribute("class"), /different/, "different settings come first");
    const sort = page.locator("#results-head button", { hasText: /^val\. loss$/ });
    await sort.click();
    const values = () => page.locator("#results [data-column='val. loss']").evaluateAll((all) => all.map((cell) => Number(cell.title)));
    assert.deepEqual(await values(), [6, 4, 2]);
    await sort.click();
    assert.deepEqual(await values(), [2, 4, 6]);
    await page.setViewportSize({ width: 390, height: 844 });
    await page.goto(server.url + comparePath());
    await untilDrawn(page);
    const { x, width } = await until("the sorted column is shown", () => page.locator("#results-head [aria-sort]").boundingBox());
    assert.ok(x > 0 && x + width <= 390, `best accuracy is in view on a small screen: ${x} to ${x + width}`);
  });

  testInFullRun("have no axis for a setting with a single value, and begin with a setting that most of the jobs have", async () => {
    const body = spec("fashion-resnet20 seed=3", 1, 100);
    body.train = { epochs: 2, batch_size: 8, lr: 0.2, seed: 3 };
    const { id } = await server.ask("/jobs", body);
    await server.ask(`/jobs/${id}/cancel`, {});
    const page = await browser.page(server, `/compare?jobs=${[...jobs.map((j) => j.id), id].join(",")}`);
    await until("the jobs' lines are drawn", async () => (await page.locator("#parallel .job").count()) === 4);
    assert.equal(await page.locator(".picker label", { hasText: "fashion-resnet20" }).locator(".cut-tail").textContent(), "seed=3", "the part of the name with the seed is not cut");
    const axes = await page.locator("#parallel .name").evaluateAll((all) => all.map((text) => text.querySelector("title").textContent));
    assert.ok(axes.includes("train.lr") && axes.includes("train.seed"), axes.join());
    assert.ok(!axes.includes("train.epochs") && !axes.includes("train.steps"), `settings with at most one value have no axis: ${axes}`);
    assert.equal(await page.locator("#scatter-x").inputValue(), "train.lr");
    assert.equal(await page.locator("#scatter").getAttribute("data-points"), "3");
  });

  testInFullRun("show whole names in the table of settings, except the longest", async () => {
    const page = await browser.page(server, comparePath());
    await untilDrawn(page);
    const names = page.locator("#settings-head .job-name a");
    await until("the names are shown", async () => (await names.count()) === 3);
    for (const [i, { name }] of jobs.entries()) assert.equal(await names.nth(i).textContent(), name);
    assert.deepEqual(await names.evaluateAll((all) => all.filter((a) => a.scrollWidth > a.clientWidth || a.scrollHeight > a.clientHeight + 1).map((a) => a.textContent.length)), [LONG.length], "only the longest name is cut");
  });

  testInFullRun("have axes that all fit on a screen; on a phone a note says that they scroll", async () => {
    const page = await browser.page(server, comparePath());
    await untilDrawn(page);
    const note = page.locator("section", { has: page.locator("#parallel-title") }).locator(".card-head .small");
    const hidden = () => page.locator("#parallel").evaluate((root) => root.parentElement.scrollWidth - root.parentElement.clientWidth);
    for (const width of [1440, 1920]) {
      await page.setViewportSize({ width, height: 900 });
      await until(`all axes fit at ${width}`, async () => (await hidden()) <= 0);
      assert.doesNotMatch(await note.textContent(), /scroll/);
    }
    await page.setViewportSize({ width: 390, height: 900 });
    await until("the axes scroll on a phone, and the note says so", async () => (await hidden()) > 0 && /scroll sideways for all \d+ axes/.test(await note.textContent()));
    assert.ok(await page.locator(".more-beside:has(#parallel)").isVisible(), "a shadow marks the hidden axes");
  });
});

describe("on a phone and a screen", () => {
  test("charts with long names and a selection fit, and axe finds nothing", async () => {
    const page = await browser.page(server, comparePath("&metric=loss,val_loss,lr"));
    await untilDrawn(page);
    await page.evaluate(() => { const { selection } = window.lockstep; selection.brushes.set("train.lr", { from: 0.3, to: 1 }); selection.dispatchEvent(new Event("change")); });
    await assertViews(page, "charts");
    const widest = await page.locator(".job-name, #compare-legend li, .picker label").evaluateAll((all) => Math.max(...all.map((node) => node.scrollWidth)));
    assert.ok(widest <= 360, `a name is ${widest} wide`);
  });
});
