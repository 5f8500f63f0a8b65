// An open page during many changes: more events than the stream sends again, and more deletions than the page has rows.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { range, simulateAgent, spec } from "../agent.mjs";
import { Browser, TestServer, until, untilLive } from "../test-server.mjs";

const RANKS = 2;
let server, browser, agent;
before(async () => {
  [server, browser] = await Promise.all([TestServer.open({ dataset: false, agent: false }), Browser.open()]);
  agent = await simulateAgent(browser.chromium, server, RANKS);
});
after(async () => { await browser?.close(); await server?.close(); });

/** Starts a job that occupies all slots. Returns its attempt. */
async function startJob(name) {
  const attempt = await agent.attempt((await server.ask("/jobs", spec(name, RANKS, 1000))).id);
  await agent.begin(attempt);
  return attempt;
}
const end = (attempt) => agent.endAttempt(attempt, { how: "succeeded", step: 10 });

describe("a page that stays open", () => {
  test("has all log lines and checkpoints after missing more events than the stream sends again", async () => {
    const EVENTS = 21_000, attempt = await startJob("far behind"), page = await browser.page(server, "/machines", { expectedErrors: [/WebSocket/] });
    // While `isCut` is set, the page's sockets cannot connect.
    await page.addInitScript(() => {
      const Real = window.WebSocket, sockets = [];
      let isCut = false;
      window.WebSocket = class extends Real {
        constructor(url) { super(isCut ? new URL("/nowhere", url) : url); sockets.push(this); }
      };
      window.connection = { cut() { isCut = true; sockets.splice(0).forEach((s) => s.close()); }, repair() { isCut = false; } };
    });
    await page.goto(`${server.url}/jobs/${attempt.job}`);
    await untilLive(page);
    await page.evaluate(() => { window.sameDocument = true; });
    await page.evaluate(() => window.connection.cut());
    await until("the page reconnects", async () => (await page.locator("#live").textContent()) === "reconnecting");
    // Each event has one log line. A checkpoint comes between the lines.
    const line = (number, text = `line ${number} of many`) => ({ type: "log", rank: 0, lines: [{ number, at: new Date().toISOString(), text }] });
    for (let from = 1; from <= EVENTS; from += 1000) await agent.report(attempt, 0, range(from, from + 999).map((number) => line(number)));
    await agent.report(attempt, 1, [{ type: "checkpoint", epoch: 1, step: 5, val_accuracy: 0.5, val_loss: 1.5, best: true, size_bytes: 1234567 }]);
    await agent.report(attempt, 0, range(EVENTS + 1, EVENTS + 1000).map((number) => line(number)));
    await page.evaluate(() => window.connection.repair());
    const isShown = (text) => async () => (await page.locator("#log-lines").innerText()).includes(text);
    await until("the newest line is shown", isShown(`line ${EVENTS + 1000} of many`));
    await until("the checkpoint is listed", async () => (await page.locator("#checkpoints tr").count()) === 1);
    assert.match(await page.locator("#checkpoints tr").innerText(), /1-5/);
    // A new line is shown once.
    await agent.report(attempt, 0, [line(EVENTS + 1001, "and one more")]);
    await until("the next line is shown", isShown("and one more"));
    assert.equal((await page.locator("#log-lines").innerText()).split("and one more").length, 2);
    assert.ok(await page.evaluate(() => window.sameDocument), "the page was not reloaded");
    await end(attempt);
    await page.end();
  });

  test("lists older jobs in place of deleted jobs", async () => {
    // All slots are occupied, so that the other jobs wait.
    const holder = await startJob("holds the slots");
    for (let i = 0; i < 60; i++) await server.ask("/jobs", spec(`many ${i}`, RANKS, 1000));
    const { jobs } = await server.ask("/jobs?limit=50&name=many"), page = await browser.page(server, "/jobs?name=many");
    await until("the first jobs are listed", async () => (await page.locator("#rows tr").count()) >= 25);
    for (const { id } of jobs) {
      await server.ask(`/jobs/${id}/cancel`, null);
      await server.ask(`/jobs/${id}`, undefined, "DELETE");
    }
    await until("the ten older jobs are listed", async () => (await page.locator("#rows tr").count()) === 10);
    assert.ok(await page.locator("#no-jobs").isHidden() && await page.locator("#none-match").isHidden());
    for (const { id } of (await server.ask("/jobs?limit=50&name=many")).jobs) await server.ask(`/jobs/${id}/cancel`, null);
    await end(holder);
    await page.end();
  });
});
