// Every page at every width in both themes, with what a year of use leaves behind: names as long as they may be, many jobs, none, failed and
// queued ones. Nothing stands out to the right, nothing covers a control, and words that are cut can be read in whole.
// With LOCKSTEP_PICTURES set to a folder, pictures of the pages are kept there.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { join, spec } from "./agent.mjs";
import { look as lookAt } from "./looks.mjs";
import { Browser, TestServer, until } from "./test-server.mjs";

/** 120 characters, the most that a name may have, with nowhere to break it. */
const LONG = "resnet50-imagenet-with-a-name-that-says-all-lr-0.4-cosine-warmup-5-label-smoothing-0.1-mixup-0.2-cutmix-1.0-ema-0.9999-x";
const MANY = 60;
let server, empty, browser;
const jobs = {};

before(async () => {
  [server, empty, browser] = await Promise.all([TestServer.open({ dataset: false, agent: false }), TestServer.open({ dataset: false, agent: false }), Browser.open()]);
  const agent = await join(browser.chromium, server, 8);
  const call = (method, ...given) => agent.evaluate(([method, given]) => window.it[method](...given), [method, given]);
  const submit = (name, ranks, more = {}) => server.ask("/jobs", { ...spec(name, ranks, 1000), ...more });
  const about = { project: "a-project-with-a-long-name-of-forty-chars", tags: ["a-tag-that-is-forty-characters-long-truly", "b"].map((tag) => tag.slice(0, 40)), notes: `${"a-word-without-an-end".repeat(12)}\n\nand a second line` };
  const train = async (id, ranks, last) => {
    const attempt = await call("attempt", id);
    await call("report", attempt, 0, [{ type: "running", total_steps: 1000, steps_per_epoch: 100, start_step: 0 }]);
    await agent.evaluate(async ([attempt, ranks, last]) => {
      const steps = Array.from({ length: last }, (_, i) => i + 1), column = (name, of) => ({ name, steps, values: steps.map(of) });
      for (let rank = 0; rank < ranks; rank++) await window.it.report(attempt, rank, [
        { type: "metrics", rank, columns: [column("loss", (s) => window.agent.loss(s * 3000, rank)), column("accuracy", (s) => 0.3 + s / 900), column("step_ms", (s) => 40.5 + window.agent.noise(s)), ...(rank ? [] : [column("lr", () => 0.1), { name: "val_accuracy", steps: [last], values: [0.875] }, { name: "val_loss", steps: [last], values: [0.5] }])] },
        { type: "log", rank, lines: steps.slice(-20).map((n) => ({ number: n, at: new Date().toISOString(), text: n % 5 ? `rank ${rank} did step ${n}` : `a/path/that/has/no/end/${"directory/".repeat(20)}file-${n}.safetensors` })) },
      ]);
      const layer = (name, kind, output_shape, parameters, time_us) => ({ name, kind, output_shape, parameters, time_us });
      await window.it.report(attempt, 0, [{ type: "network", layers: Array.from({ length: 20 }, (_, i) => layer(`layer${1 + (i >> 3)}.${i % 8}.a_block_with_a_long_name.conv1`, "conv 3x3", [64, 32, 32], 36_864, 310.5)) },
        ...[10, 20, 30].map((step) => ({ type: "histograms", step, layers: Array.from({ length: 20 }, (_, i) => ({ name: `layer${1 + (i >> 3)}.${i % 8}.a_block_with_a_long_name.conv1.weight`, kind: "weight", min: -0.3, max: 0.3, counts: Array.from({ length: 64 }, (_, k) => 40 - Math.abs(k - 32)) })) }))]);
    }, [attempt, ranks, last]);
    return attempt;
  };
  jobs.running = (await submit(LONG, 4, about)).id;
  await train(jobs.running, 4, 200);
  jobs.done = (await submit("done", 1)).id;
  await call("end", await train(jobs.done, 1, 300), 300);
  jobs.failed = (await submit(`failed-${LONG}`.slice(0, 120), 1, about)).id;
  const lost = await train(jobs.failed, 1, 50);
  const message = `rank 0 cannot read /data/${"a-directory-with-a-long-name/".repeat(6)}train-images-idx3-ubyte.gz: No such file or directory (os error 2)`;
  await agent.evaluate(([attempt, message]) => window.it.say({ type: "report", attempt, source: "agent", first: 0, events: [{ type: "ended", how: "failed", step: 50, retriable: false, reason: { code: "dataset_unusable", words: message } }] }), [lost, message]);
  for (const id of [jobs.done, jobs.failed]) await until("it is over", async () => ["succeeded", "failed"].includes((await server.job(id)).state));
  jobs.queued = (await submit(`queued-${LONG}`.slice(0, 120), 8, about)).id;
  for (let n = 0; n < MANY; n++) { const { id } = await submit(`many ${n}`, 8, n % 2 ? about : {}); if (n % 3) await server.ask(`/jobs/${id}/cancel`, {}); }
  const panels = ["loss", "lr", "step_ms"].map((metric) => ({ title: `${metric}, and a title as long as it may be, which is eighty characters and no more`.slice(0, 80), metrics: [metric] }));
  const kept = await fetch(`${server.url}/api/v1/jobs/${jobs.running}/panels`, { method: "PUT", headers: { "content-type": "application/json" }, body: JSON.stringify({ panels }) });
  assert.ok(kept.ok, await kept.text());
});
after(async () => { await browser?.close(); await Promise.all([server?.close(), empty?.close()]); });

const look = (where, path, name, ready) => lookAt(browser, where, path, name, { ready });
const drawn = (page) => page.evaluate(() => Number(document.querySelector("#loss-chart")?.dataset.drawn) > 0);

describe("with everything", () => {
  test("lists fit, and are sorted on a phone", async () => {
    const page = await browser.page(server, "/jobs", { viewport: { width: 390, height: 844 }, hasTouch: true, isMobile: true });
    await page.getByRole("button", { name: "Images/s" }).tap();
    await until("the fastest comes first", async () => (await page.locator("#rows tr").first().getAttribute("data-id")) === jobs.running);
    assert.equal(new URL(page.url()).searchParams.get("sort"), "-speed");
    await page.end();
    await look(server, "/jobs", "jobs", async (page) => (await page.locator("#rows tr").count()) >= 50);
    await look(server, "/jobs?columns=progress,loss,best,speed,age,train.lr,data.dataset,val_loss&state=running,failed,queued", "jobs-columns", async (page) => (await page.locator("#rows tr").count()) >= 3);
    await look(server, "/jobs?group_by=tag", "jobs-groups", async (page) => (await page.locator(".group-head").count()) >= 3);
    await look(server, "/jobs?q=there+is+none", "jobs-no-match");
  });
  for (const [tab, ready] of [["log", (page) => page.locator("#log-lines p").first().isVisible()], ["history", (page) => page.locator("#history-rows li").first().isVisible()], ["notes"], ["settings"], ["classify"],
    ["histograms", (page) => page.locator("#histogram-rows tr").first().isVisible()], ["network", (page) => page.locator("#network-rows tr").first().isVisible()]]) {
    test(`a running job's ${tab} fits`, () => look(server, `/jobs/${jobs.running}?tab=${tab}`, `job-${tab}`, async (page) => (await drawn(page)) && (!ready || ready(page))));
  }
  test("failed, queued and finished jobs fit", async () => {
    await look(server, `/jobs/${jobs.failed}`, "job-failed", drawn);
    await look(server, `/jobs/${jobs.failed}?tab=history`, "job-failed-history", (page) => page.locator("#history-rows li").first().isVisible());
    await look(server, `/jobs/${jobs.queued}`, "job-queued", (page) => page.evaluate(() => Boolean(document.querySelector("#loss-chart")?.dataset.empty)));
    await look(server, `/jobs/${jobs.done}`, "job-done", drawn);
  });
  test("jobs compared fit", async () => {
    await look(server, `/compare?jobs=${Object.values(jobs).join(",")}&metric=loss,val_loss,lr`, "compare", (page) => page.evaluate(() => document.querySelectorAll("#parallel .job").length === 4));
    await look(server, "/compare", "compare-none");
  });
  test("all other pages fit", async () => {
    for (const path of ["/jobs/new", "/datasets", "/machines", "/people", "/audit", "/docs", "/docs/reference/job-file", "/nowhere"]) await look(server, path, path.slice(1).replaceAll("/", "-"));
  });
});

describe("with nothing", () => {
  test("all pages fit", async () => {
    for (const path of ["/jobs", "/jobs/new", "/compare", "/datasets", "/machines", "/audit"]) await look(empty, path, `empty${path.replaceAll("/", "-")}`);
  });
});
