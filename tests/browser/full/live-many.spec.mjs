// A page that stays open while very much happens: more events than it reads one by one, more deletions than it has rows.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { simulateAgent, spec } from "../agent.mjs";
import { Browser, TestServer, until } from "../test-server.mjs";

const RANKS = 2;
let server, browser, agent;
before(async () => {
  [server, browser] = await Promise.all([TestServer.open({ dataset: false, agent: false }), Browser.open()]);
  agent = await simulateAgent(browser.chromium, server, RANKS);
});
after(async () => { await browser?.close(); await server?.close(); });

/** A running job that holds all slots. */
async function running(name) {
  const job = await server.ask("/jobs", spec(name, RANKS, 1000)), event = { type: "running", total_steps: 1000, steps_per_epoch: 100, start_step: 0 };
  await agent.evaluate(async ([id, event]) => window.simulatedAgent.report(await window.simulatedAgent.attempt(id), 0, [event]), [job.id, event]);
  return job;
}
const end = (job) => agent.evaluate(async (id) => window.simulatedAgent.end(await window.simulatedAgent.attempt(id), 10), job.id);

describe("a page that stays open", () => {
  test("has every line and checkpoint after it was away for more events than it reads one by one", async () => {
    const EVENTS = 21_000, job = await running("far behind"), page = await browser.page(server, "/machines", { expected: [/WebSocket/] });
    // The line breaks and stays broken while `away`; nothing stands between the page and the server otherwise.
    await page.addInitScript(() => {
      const Real = window.WebSocket, sockets = [];
      let away = false;
      window.WebSocket = class extends Real {
        constructor(url) { super(away ? new URL("/nowhere", url) : url); sockets.push(this); }
      };
      window.line = { cut() { away = true; sockets.splice(0).forEach((s) => s.close()); }, mend() { away = false; } };
    });
    await page.goto(`${server.url}/jobs/${job.id}`);
    await until("the page is live", async () => (await page.locator("#live").textContent()) === "live");
    await page.evaluate(() => { window.sameDocument = true; });
    await page.evaluate(() => window.line.cut());
    await until("it has noticed", async () => (await page.locator("#live").textContent()) === "reconnecting");
    // A line an event, and in their middle a checkpoint.
    await agent.evaluate(async ([id, events]) => {
      const attempt = await window.simulatedAgent.attempt(id), at = new Date().toISOString();
      const line = (number) => ({ type: "log", rank: 0, lines: [{ number, at, text: `line ${number} of many` }] });
      for (let from = 1; from <= events; from += 1000) await window.simulatedAgent.report(attempt, 0, Array.from({ length: 1000 }, (_, i) => line(from + i)));
      await window.simulatedAgent.report(attempt, 1, [{ type: "checkpoint", epoch: 1, step: 5, val_accuracy: 0.5, val_loss: 1.5, best: true, size_bytes: 1234567 }]);
      await window.simulatedAgent.report(attempt, 0, Array.from({ length: 1000 }, (_, i) => line(events + 1 + i)));
    }, [job.id, EVENTS]);
    await page.evaluate(() => window.line.mend());
    const shown = (text) => async () => (await page.locator("#log-lines").innerText()).includes(text);
    await until("the newest line", shown(`line ${EVENTS + 1000} of many`));
    await until("the checkpoint", async () => (await page.locator("#checkpoints tr").count()) === 1);
    assert.match(await page.locator("#checkpoints tr").innerText(), /1-5/);
    // What comes now comes once.
    await agent.evaluate(async ([id, number]) => {
      const at = new Date().toISOString();
      await window.simulatedAgent.report(await window.simulatedAgent.attempt(id), 0, [{ type: "log", rank: 0, lines: [{ number, at, text: "and one more" }] }]);
    }, [job.id, EVENTS + 1001]);
    await until("the next line", shown("and one more"));
    assert.equal((await page.locator("#log-lines").innerText()).split("and one more").length, 2);
    assert.ok(await page.evaluate(() => window.sameDocument), "without being loaded again");
    await end(job);
    await page.end();
  });

  test("lists older jobs in the place of those that were deleted", async () => {
    // All slots are taken, so that these wait.
    const first = await running("holds the slots");
    for (let i = 0; i < 60; i++) await server.ask("/jobs", spec(`many ${i}`, RANKS, 1000));
    const { jobs } = await server.ask("/jobs?limit=50&name=many"), page = await browser.page(server, "/jobs?name=many");
    await until("a part of them", async () => (await page.locator("#rows tr").count()) >= 25);
    for (const { id } of jobs) {
      await server.ask(`/jobs/${id}/cancel`, null);
      const response = await fetch(`${server.url}/api/v1/jobs/${id}`, { method: "DELETE" });
      assert.equal(response.status, 204);
    }
    await until("the ten older ones", async () => (await page.locator("#rows tr").count()) === 10);
    assert.ok(await page.locator("#no-jobs").isHidden() && await page.locator("#none-match").isHidden());
    for (const { id } of (await server.ask("/jobs?limit=50&name=many")).jobs) await server.ask(`/jobs/${id}/cancel`, null);
    await end(first);
    await page.end();
  });
});
