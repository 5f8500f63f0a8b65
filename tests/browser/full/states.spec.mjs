// The checks of looks.spec.mjs for pages in rare states: sign-in, an evaluation, pictures, the queue, GPUs, paused, cancelled and restarting
// jobs, dialogs, and a form with errors.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { simulateAgent, spec } from "../agent.mjs";
import { checkPage } from "../looks.mjs";
import { Browser, signIn, TestServer, until } from "../test-server.mjs";

const LONG = "resnet50-imagenet-with-a-name-that-says-all-lr-0.4-cosine-warmup-5-label-smoothing-0.1-mixup-0.2-cutmix-1.0-ema-0.9999-x";
const CLASSES = ["tench", "goldfish", "great white shark, man-eater", "tiger shark", "hammerhead, hammerhead shark", "electric ray, crampfish", "stingray", "cock", "hen", "ostrich, Struthio camelus", "brambling", "goldfinch"];
let server, authServer, trainingServer, browser, agent;
const jobs = {};
/** Starts a job and reports 50 steps and a checkpoint. */
async function startJob(name) {
  const { id } = await server.ask("/jobs", { ...spec(name, 1, 1000), tags: ["a-tag-of-its-own"] });
  const attempt = await agent.evaluate((id) => window.simulatedAgent.attempt(id), id), steps = Array.from({ length: 50 }, (_, i) => i + 1);
  await agent.evaluate(([attempt, events]) => window.simulatedAgent.report(attempt, 0, events), [attempt, [
    { type: "running", total_steps: 1000, steps_per_epoch: 50, start_step: 0 },
    { type: "metrics", rank: 0, columns: [{ name: "loss", steps, values: steps.map((s) => 2.5 / s + 0.5) }, { name: "step_ms", steps, values: steps.map(() => 40.5) }] },
    { type: "checkpoint", epoch: 1, step: 50, val_accuracy: 0.5, val_loss: 1.5, best: true, size_bytes: 1234567 },
  ]]);
  return { id, attempt };
}

before(async () => {
  [server, authServer, trainingServer, browser] = await Promise.all([TestServer.open({ dataset: false, agent: false }), TestServer.open({ dataset: false, agent: false, auth: true }), TestServer.open(), Browser.open()]);
  agent = await simulateAgent(browser.chromium, server, 4);
  const paused = await startJob(`paused-${LONG}`.slice(0, 120)), cancelled = await startJob("cancelled"), restarting = await startJob("starts again");
  await server.ask(`/jobs/${paused.id}/pause`, {});
  await agent.endAttempt(paused.attempt, { how: "stopped" });
  await server.ask(`/jobs/${cancelled.id}/cancel`, {});
  await agent.endAttempt(cancelled.attempt, { how: "stopped" });
  jobs.paused = paused.id;
  jobs.cancelled = cancelled.id;
  jobs.running = (await startJob(LONG)).id;
  // Jobs of higher priority occupy all slots, so that the restarting job waits.
  for (let n = 0; n < 3; n++) await server.ask("/jobs", { ...spec(`holds a slot ${n}`, 1, 1000), priority: 9 });
  await agent.endAttempt(restarting.attempt, { how: "failed", retriable: true, reason: { code: "rank_killed", rank: 0, step: 50, signal: 9, words: "rank 0 was killed by signal 9 at step 50" } });
  jobs.restarting = restarting.id;
  for (let n = 0; n < 6; n++) await server.ask("/jobs", { ...spec(`${n ? "waits" : LONG} ${n}`.slice(0, 120), 4, 1000), priority: -n, project: n % 2 ? "default" : "a-project-with-a-long-name" });
  for (const [state, id] of Object.entries(jobs)) await until(`a job is ${state}`, async () => (await server.job(id)).state === state);
});
after(async () => { await browser?.close(); await Promise.all([server?.close(), authServer?.close(), trainingServer?.close()]); });

const isDrawn = (page) => page.evaluate(() => Number(document.querySelector("#loss-chart")?.dataset.drawn) > 0);
const checkPath = (path, name, options) => checkPage(browser, server, path, name, options);
const untilDialogOpens = (page) => until("the dialog is open", () => page.locator("dialog[open]").isVisible());

/** The response of an evaluation with many confused classes, a class without pictures, and mistakes with pictures. */
function evaluation() {
  const confusion = CLASSES.map((name, i) => CLASSES.map((_, j) => (name === "goldfinch" ? 0 : i === j ? 400 + 7 * i : (i * j) % 13)));
  const classes = CLASSES.map((name, i) => ({ name, samples: confusion[i].reduce((a, b) => a + b), precision: 0.9 - i / 40, recall: 0.95 - i / 50, f1: 0.92 - i / 45 }));
  const mistakes = Array.from({ length: 12 }, (_, i) => ({ index: i, label: i, predicted: (i + 3) % 12, confidence: 0.99 - i / 100 }));
  return { accuracy: 0.8765, interval: [0.868, 0.885], loss: 0.4321, samples: 5823, secs: 12.3, confusion, classes, mistakes, right: [] };
}
const PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";

describe("the pages of a person", () => {
  test("fit: sign-in and account", async () => {
    await checkPage(browser, { url: authServer.url }, "/login?next=%2Fjobs", "login", { ready: (page) => page.locator("form").first().isVisible() });
    const prepare = async (page) => { await signIn(page.context(), authServer, "member"); };
    await checkPage(browser, { url: authServer.url }, "/account", "account", { prepare, ready: async (page) => new URL(page.url()).pathname === "/account", options: { expectedErrors: [/401|404/] } });
  });
});

describe("a job's page", () => {
  for (const state of ["paused", "cancelled", "restarting"]) {
    test(`fits when it is ${state}`, () => checkPath(`/jobs/${jobs[state]}`, `job-${state}`, { ready: async (page) => (await isDrawn(page)) && (await page.locator("#state").textContent()) === state }));
  }

  test("fits with an evaluation's confusion matrix", async () => {
    const prepare = async (page) => {
      await page.route("**/evaluation?*", (route) => route.fulfill({ json: evaluation() }));
      await page.route("**/samples?*", (route) => route.fulfill({ json: { samples: new URL(route.request().url()).searchParams.get("indices").split(",").map((index) => ({ index: Number(index), png: PNG })) } }));
    };
    await checkPath(`/jobs/${jobs.paused}?tab=evaluation`, "evaluation", {
      prepare, ready: (page) => page.locator("#behind figure").first().isVisible(),
      act: async (page) => assert.equal(await page.locator("#class-rows tr").last().textContent(), "goldfinch0–––"),
    });
  });

  test("asks in dialogs that fit", async () => {
    await checkPath(`/jobs/${jobs.paused}`, "dialog-fork", { ready: isDrawn, act: async (page) => { await page.locator("#fork").click(); await untilDialogOpens(page); } });
    await checkPath(`/jobs/${jobs.running}`, "dialog-cancel", { ready: isDrawn, act: async (page) => { await page.locator("#cancel").click(); await untilDialogOpens(page); } });
    await checkPath(`/jobs/${jobs.cancelled}`, "dialog-delete", { ready: isDrawn, act: async (page) => { await page.locator("#delete").click(); await untilDialogOpens(page); } });
  });
});

describe("other pages", () => {
  test("the queue fits", () => checkPath("/queue", "queue", { ready: async (page) => (await page.locator(".queue tbody tr").count()) >= 6 }));

  test("the form fits with errors", async () => {
    const act = async (page) => {
      for (const [label, words] of [["Learning rate", "fast"], ["Ranks", "4096"], ["Epochs", "-1"]]) await page.getByLabel(label, { exact: true }).fill(words);
      await page.getByRole("button", { name: "Submit job" }).click();
      await until("the errors are listed", async () => (await page.locator("#mistakes a").count()) >= 3);
    };
    await checkPath("/jobs/new", "form-mistakes", { act });
  });

  test("datasets fit with pictures open", () => checkPage(browser, trainingServer, "/datasets?pictures=fashion-mnist", "datasets-pictures", { ready: async (page) => (await page.locator("[data-g=grid] img").count()) >= 48 }));

  test("machines with GPUs fit", async () => {
    const gpuServer = await TestServer.open({ dataset: false, agent: false });
    try {
      const gpuAgent = await simulateAgent(browser.chromium, gpuServer, 8, { gpus: true }), body = spec(LONG, 4, 100);
      body.parallel.device = "cuda";
      const { id } = await gpuServer.ask("/jobs", body);
      await gpuAgent.evaluate((id) => window.simulatedAgent.attempt(id).then(() => {}), id);
      await gpuAgent.evaluate((share) => window.simulatedAgent.say({
        type: "sample", at: new Date().toISOString(), cpus: 8, host_cpus: 64, cpu_utilization: share, load: 3.5, memory_used_bytes: 3e9, memory_bytes: 64e9, host_memory_bytes: 256e9,
        disk_used_bytes: 97e9, disk_bytes: 100e9, disk_read_bytes_per_second: 5e6, disk_written_bytes_per_second: 12e6, network_received_bytes_per_second: 1e6, network_sent_bytes_per_second: 2e6,
        gpus: Array.from({ length: 8 }, (_, slot) => ({ slot, utilization: share, memory_used_bytes: Math.round(80e9 * share), temperature_celsius: 61.5, power_watts: 412.5 })),
      }), 0.75);
      await gpuAgent.evaluate(() => window.simulatedAgent.say({ type: "findings", findings: [{ problem: true, text: "NCCL is missing: pip install nvidia-nccl-cu12" }, { problem: false, text: `Shared memory is small: /dev/${"a-long-name/".repeat(8)}shm` }] }));
      await checkPage(browser, gpuServer, "/machines", "machines-gpus", { ready: async (page) => /75 %/.test(await page.locator('[data-slot="0"]').innerText()) && (await page.locator(".warnings li.bad").count()) > 0 });
      assert.equal((await gpuServer.job(id)).ranks, 4);
    } finally { await gpuServer.close(); }
  });
});
