// The checks of looks.spec.mjs for pages in rare states: an account, an evaluation, pictures, GPUs, paused, cancelled and restarting jobs,
// dialogs, and a form with errors.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { machineSample, metrics, range, simulateAgent, spec } from "../agent.mjs";
import { LONG } from "../crowded.mjs";
import { checkPage } from "../looks.mjs";
import { Browser, signIn, TestServer, until } from "../test-server.mjs";

const CLASSES = ["tench", "goldfish", "great white shark, man-eater", "tiger shark", "hammerhead, hammerhead shark", "electric ray, crampfish", "stingray", "cock", "hen", "ostrich, Struthio camelus", "brambling", "goldfinch"];
let server, authServer, trainingServer, browser, agent;
const jobs = {};
/** Starts a job and reports 50 steps and a checkpoint. */
async function startJob(name) {
  const { id } = await server.ask("/jobs", { ...spec(name, 1, 1000), tags: ["a-tag-of-its-own"] });
  const attempt = await agent.attempt(id);
  await agent.begin(attempt, { steps_per_epoch: 50 });
  await agent.report(attempt, 0, [metrics(0, range(1, 50), { loss: (s) => 2.5 / s + 0.5, step_ms: 40.5 }), { type: "checkpoint", epoch: 1, step: 50, val_accuracy: 0.5, val_loss: 1.5, best: true, size_bytes: 1234567 }]);
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
  for (const [state, id] of Object.entries(jobs)) await until(`a job is ${state}`, async () => (await server.job(id)).state === state);
});
after(async () => { await browser?.close(); await Promise.all([server?.close(), authServer?.close(), trainingServer?.close()]); });

const isDrawn = (page) => page.evaluate(() => Number(document.querySelector("#loss-chart")?.dataset.drawn) > 0);
const checkPath = (path, name, options) => checkPage(browser, server, path, name, options);

/** The response of an evaluation with many confused classes, a class without pictures, and mistakes with pictures. */
function evaluation() {
  const confusion = CLASSES.map((name, i) => CLASSES.map((_, j) => (name === "goldfinch" ? 0 : i === j ? 400 + 7 * i : (i * j) % 13)));
  const classes = CLASSES.map((name, i) => ({ name, samples: confusion[i].reduce((a, b) => a + b), precision: 0.9 - i / 40, recall: 0.95 - i / 50, f1: 0.92 - i / 45 }));
  const mistakes = Array.from({ length: 12 }, (_, i) => ({ index: i, label: i, predicted: (i + 3) % 12, confidence: 0.99 - i / 100 }));
  return { accuracy: 0.8765, interval: [0.868, 0.885], loss: 0.4321, samples: 5823, secs: 12.3, confusion, classes, mistakes, right: [] };
}
const PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";

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
    for (const [button, state] of [["fork", "paused"], ["cancel", "running"], ["delete", "cancelled"]]) {
      const act = async (page) => { await page.locator(`#${button}`).click(); await until("the dialog is open", () => page.locator("dialog[open]").isVisible()); };
      await checkPath(`/jobs/${jobs[state]}`, `dialog-${button}`, { ready: isDrawn, act });
    }
  });
});

describe("other pages", () => {
  test("a person's account fits", () => checkPage(browser, { url: authServer.url }, "/account", "account", {
    prepare: (page) => signIn(page.context(), authServer, "member"), ready: async (page) => new URL(page.url()).pathname === "/account", options: { expectedErrors: [/401|404/] },
  }));

  test("the form fits with errors", async () => {
    const act = async (page) => {
      for (const [label, value] of [["Learning rate", "fast"], ["Ranks", "4096"], ["Epochs", "-1"]]) await page.getByLabel(label, { exact: true }).fill(value);
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
      await gpuAgent.attempt(id);
      await gpuAgent.say(machineSample(0.75, range(0, 7).map((slot) => ({ slot, utilization: 0.75, memory_used_bytes: 60e9, temperature_celsius: 61.5, power_watts: 412.5 }))));
      await gpuAgent.say({ type: "findings", findings: [{ problem: true, text: "NCCL is missing: pip install nvidia-nccl-cu12" }, { problem: false, text: `Shared memory is small: /dev/${"a-long-name/".repeat(8)}shm` }] });
      await checkPage(browser, gpuServer, "/machines", "machines-gpus", { ready: async (page) => /75 %/.test(await page.locator('[data-slot="0"]').innerText()) && (await page.locator(".warnings li.bad").count()) > 0 });
      assert.equal((await gpuServer.job(id)).ranks, 4);
    } finally { await gpuServer.close(); }
  });
});
