// A server after much use: names of maximum length, many jobs, failed and queued jobs. And the pages that show them.

import { loss, metrics, noise, range, simulateAgent, spec } from "./agent.mjs";
import { sql } from "./five-jobs.mjs";
import { until } from "./test-server.mjs";

/** A name of the maximum length, 120 characters, without a place for a line break. */
export const LONG = "resnet50-imagenet-with-a-name-that-says-all-lr-0.4-cosine-warmup-5-label-smoothing-0.1-mixup-0.2-cutmix-1.0-ema-0.9999-x";

/** Fills a server that has no agent yet, through a simulated agent. Returns the ids of a running, a finished, a failed and a queued job and of a sweep, and the name of a
 *  model. `furtherJobs`: number of further jobs, of which every third stays queued. */
export async function fillServer(server, browser, furtherJobs = 60) {
  const jobs = {};
  const agent = await simulateAgent(browser.chromium, server, 8);
  const submit = (name, ranks, fields = {}) => server.ask("/jobs", { ...spec(name, ranks, 1000), ...fields });
  const longTexts = { project: "a-project-with-a-long-name-of-forty-chars", tags: ["a-tag-that-is-forty-characters-long-truly", "b"].map((tag) => tag.slice(0, 40)), notes: `${"a-word-without-an-end".repeat(12)}\n\nand a second line` };
  const train = async (id, ranks, lastStep) => {
    const attempt = await agent.attempt(id), steps = range(1, lastStep), layers = range(0, 19).map((i) => `layer${1 + (i >> 3)}.${i % 8}.a_block_with_a_long_name.conv1`);
    await agent.begin(attempt);
    for (let rank = 0; rank < ranks; rank++) await agent.report(attempt, rank, [
      metrics(rank, steps, { loss: (s) => loss(s * 3000, rank), accuracy: (s) => 0.3 + s / 900, step_ms: (s) => 40.5 + noise(s), ...(rank ? {} : { lr: 0.1 }) }),
      ...(rank ? [] : [metrics(rank, [lastStep], { val_accuracy: 0.875, val_loss: 0.5 })]),
      { type: "log", rank, lines: steps.slice(-20).map((n) => ({ number: n, at: new Date().toISOString(), text: n % 5 ? `rank ${rank} did step ${n}` : `a/path/that/has/no/end/${"directory/".repeat(20)}file-${n}.safetensors` })) },
    ]);
    await agent.report(attempt, 0, [
      { type: "network", layers: layers.map((name) => ({ name, kind: "conv 3x3", output_shape: [64, 32, 32], parameters: 36_864, time_us: 310.5 })) },
      ...[10, 20, 30].map((step) => ({ type: "histograms", step, layers: layers.map((name) => ({ name: `${name}.weight`, kind: "weight", min: -0.3, max: 0.3, counts: range(0, 63).map((k) => 40 - Math.abs(k - 32)) })) })),
    ]);
    return attempt;
  };
  jobs.running = (await submit(LONG, 4, longTexts)).id;
  await train(jobs.running, 4, 200);
  jobs.done = (await submit("done", 1)).id;
  const done = await train(jobs.done, 1, 300);
  await agent.report(done, 0, [{ type: "checkpoint", epoch: 3, step: 300, val_accuracy: 0.875, val_loss: 0.5, validation: { pictures: 187, fingerprint: "5f3a" }, best: true, size_bytes: 188743680 }]);
  await agent.endAttempt(done, { how: "succeeded", step: 300 });
  // A request can register only a checkpoint with files, so the versions of the model are inserted by SQL.
  jobs.model = LONG.slice(0, 100);
  sql(server, `INSERT INTO model_versions (model, version, job_id, checkpoint_id, programs, description, registered_by, registered_at)
    SELECT '${jobs.model}', number, id, id || '-3-300', '{"lockstep": "0.1.0"}', '${longTexts.notes}', 'ada', created_at FROM jobs, (SELECT 1 AS number UNION SELECT 2) WHERE id = '${jobs.done}';
    INSERT INTO model_aliases (model, alias, version) VALUES ('${jobs.model}', 'champion', 2), ('${jobs.model}', 'challenger', 2)`);
  jobs.failed = (await submit(`failed-${LONG}`.slice(0, 120), 1, longTexts)).id;
  const failing = await train(jobs.failed, 1, 50);
  const message = `rank 0 cannot read /data/${"a-directory-with-a-long-name/".repeat(6)}train-images-idx3-ubyte.gz: No such file or directory (os error 2)`;
  await agent.endAttempt(failing, { how: "failed", step: 50, retriable: false, reason: { code: "dataset_unusable", words: message } });
  // Two trials of the sweep have ended, and two train.
  const sweep = { method: "grid", parameters: { "train.lr": { values: [0.1, 0.05] }, "train.momentum": { values: [0.5, 0.9] } } };
  jobs.sweep = (await server.ask("/sweeps", { ...spec(LONG.slice(0, 80), 1, 1000), ...longTexts, sweep })).id;
  const trials = await until("all trials have jobs", async () => { const { trials } = await server.ask(`/sweeps/${jobs.sweep}`); return trials.every(({ job }) => job) && trials; });
  for (const { number, job } of trials) {
    const attempt = await train(job, 1, 100 * number);
    await agent.report(attempt, 0, [{ type: "evaluation", epoch: 1, step: 100, samples: 187, accuracy: number / 10, loss: 1 / number, secs: 1.5 }]);
    await until("the newest trial is the best so far", async () => (await server.ask(`/sweeps/${jobs.sweep}`)).best?.number === number);
    if (number <= 2) await agent.endAttempt(attempt, { how: "succeeded", step: 1000 });
  }
  jobs.queued = (await submit(`queued-${LONG}`.slice(0, 120), 8, longTexts)).id;
  for (let n = 0; n < furtherJobs; n++) { const { id } = await submit(`many ${n}`, 8, n % 2 ? longTexts : {}); if (n % 3) await server.ask(`/jobs/${id}/cancel`, {}); }
  const panels = ["loss", "lr", "step_ms"].map((metric) => ({ title: `${metric}, and a title as long as it may be, which is eighty characters and no more`.slice(0, 80), metrics: [metric] }));
  await server.ask(`/jobs/${jobs.running}/panels`, { panels }, "PUT");
  return jobs;
}

const isDrawn = (page) => page.evaluate(() => Number(document.querySelector("#loss-chart")?.dataset.drawn) > 0);
const has = (selector, count = 1) => async (page) => (await page.locator(selector).count()) >= count;
const every = (...checks) => async (page) => (await Promise.all(checks.map((check) => check(page)))).every(Boolean);
const columns = "progress,loss,best,speed,age,train.lr,data.dataset,val_loss";
const ids = ({ running, done, failed, queued }) => [running, done, failed, queued].join(",");
const hasFourJobs = (page) => page.evaluate(() => document.querySelectorAll("#parallel .job").length === 4);

/** Each page: name, path for the ids of `fillServer`, and a check that the page is complete. */
export const PAGES = [
  ["jobs", () => "/jobs", has("#rows tr", 20)],
  ["job-log", (jobs) => `/jobs/${jobs.running}?tab=log`, every(isDrawn, has("#log-lines p"))],
  ["compare", (jobs) => `/compare?jobs=${ids(jobs)}&metric=loss,val_loss,lr`, hasFourJobs],
  ["new", () => "/jobs/new"], ["datasets", () => "/datasets"], ["machines", () => "/machines"], ["queue", () => "/queue", has(".queue tbody tr", 6)],
  ["people", () => "/people"],
  ["sweep", (jobs) => `/sweeps/${jobs.sweep}`, has("#parallel .job", 4)], ["models", () => "/models", has("[data-model]")], ["model", (jobs) => `/models/${jobs.model}`, has("[data-version]", 2)],
];

/** Further pages in the format of `PAGES`, which only the full test run opens. */
export const MORE_PAGES = [
  ["audit", () => "/audit"], ["sweeps", () => "/sweeps", has("tbody tr")], ["docs", () => "/docs"], ["webhooks", () => "/webhooks"], ["nowhere", () => "/nowhere"],
  ["jobs-groups", () => "/jobs?group_by=tag", has(".group-head", 3)],
  ["job-failed", (jobs) => `/jobs/${jobs.failed}?tab=history`, every(isDrawn, has("#history-rows li"))],
  ["jobs-columns", () => `/jobs?columns=${columns}&state=running,failed,queued`, has("#rows tr", 3)],
  ["jobs-no-match", () => "/jobs?q=there+is+none"],
  ["job-history", (jobs) => `/jobs/${jobs.running}?tab=history`, every(isDrawn, has("#history-rows li"))],
  ["job-histograms", (jobs) => `/jobs/${jobs.running}?tab=histograms`, every(isDrawn, has("#histogram-rows tr"))],
  ["job-network", (jobs) => `/jobs/${jobs.running}?tab=network`, every(isDrawn, has("#network-rows tr"))],
  ...["notes", "settings", "classify"].map((tab) => [`job-${tab}`, (jobs) => `/jobs/${jobs.running}?tab=${tab}`, isDrawn]),
  ["job-queued", (jobs) => `/jobs/${jobs.queued}`, (page) => page.locator(".instead").isVisible()],
  ["job-done", (jobs) => `/jobs/${jobs.done}`, isDrawn],
  ["compare-groups", (jobs) => `/compare?jobs=${ids(jobs)}&metric=loss&group=train.lr`, hasFourJobs],
  ["compare-none", () => "/compare"],
  ...["team", "reference/job-file"].map((page) => [`docs-${page.replace("/", "-")}`, () => `/docs/${page}`]),
];
