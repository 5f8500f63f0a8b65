// The page Queue: waiting jobs, their reasons, and slots that are kept for a job. The agent is simulated.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { simulateAgent, spec } from "./agent.mjs";
import { TWO_VIEWS, setView } from "./looks.mjs";
import { Browser, TestServer, until, untilLive } from "./test-server.mjs";

const LONG = `large-${"with-a-very-long-name-".repeat(4)}`;
let server, browser, agent;
const jobs = {};
const submit = async (name, ranks, changes = {}) => { jobs[name] = await server.ask("/jobs", { ...spec(name, ranks, 100), ...changes }); return jobs[name].id; };
before(async () => {
  [server, browser] = await Promise.all([TestServer.open({ agent: false, dataset: false }), Browser.open()]);
  agent = await simulateAgent(browser.chromium, server, 2);
});
after(async () => { await browser?.close(); await server?.close(); });

const names = (page) => page.locator(".queue .q-name a").allTextContents();
const row = (page, name) => page.locator(".queue tbody tr").filter({ has: page.locator(".q-name a", { hasText: name }) });

describe("the queue", () => {
  test("fills and empties without a reload", async () => {
    const page = await browser.page(server, "/queue", { expectedErrors: [/422/] });
    assert.ok(await page.getByRole("heading", { name: "Nothing waits" }).isVisible());
    assert.equal(await page.locator("#summary").textContent(), "0 jobs wait");
    assert.equal(await page.getByRole("navigation", { name: "Pages" }).getByRole("link", { name: "Queue" }).getAttribute("aria-current"), "page");
    await untilLive(page);
    const running = await submit("running", 1);
    await agent.attempt(running);
    await submit(LONG, 2, { project: "vision" });
    await submit("small", 1);
    await until("both jobs appear, the large job first", async () => (await names(page)).join() === [LONG, "small"].join());
    await until("the large job's row gives its reason and the kept slot", async () => /waits for 2 slots: 1 of 2 on "simulated" free.*1 slot kept/s.test(await row(page, LONG).locator(".q-reason").textContent()));
    assert.doesNotMatch(await row(page, "small").textContent(), /slots? kept/);
    await until("the small job's row names the job that the slot is kept for", async () => /1 of 2 on "simulated" free, kept for "large-/.test(await row(page, "small").locator(".q-reason").textContent()));
    assert.equal(await page.locator("#summary").textContent(), "2 jobs wait · 1 slot kept");
    assert.match(await page.locator(".reservations li").textContent(), /simulated kept for large-.*: slot 1, and every other slot that becomes free/);
    await submit("urgent", 1);
    await until("the new job is the last", async () => (await names(page)).join() === [LONG, "small", "urgent"].join());
    const priority = page.getByLabel("Priority of urgent");
    await priority.fill("5000");
    await priority.press("Enter");
    const error = page.locator("#queue-error");
    await until("the error names the field", async () => (await error.textContent()) === "priority: must be from -1000 to 1000");
    await priority.fill("5");
    await priority.press("Enter");
    await until("the error is gone", async () => (await error.textContent()) === "");
    await until("the change is confirmed", async () => (await page.locator("#queue-status").textContent()) === "Saved: priority 5 for urgent.");
    // The kept slot goes to the job with the higher priority, which starts immediately.
    const urgent = await agent.attempt(jobs.urgent.id);
    await until("no slot is free", async () => /0 of 2/.test(await row(page, LONG).locator(".q-reason").textContent()));
    await until("only slots that become free are kept", async () => /: every slot that becomes free/.test(await page.locator(".reservations li").textContent()));
    await row(page, "small").getByRole("button", { name: "Move small to the front" }).click();
    await until("the small job is the first", async () => (await names(page)).join() === ["small", LONG].join());
    // The focused link stays the same element when the page is updated.
    const link = row(page, "small").getByRole("link");
    await link.focus();
    await link.evaluate((node) => { node.marked = true; });
    await row(page, LONG).getByRole("button", { name: /^Cancel large/ }).evaluate((button) => button.click());
    await page.getByRole("button", { name: "Cancel the job" }).click();
    await until("the cancelled job is gone", async () => (await names(page)).join() === "small");
    await until("the focus returns to the same element", () => page.evaluate(() => document.activeElement.marked === true));
    assert.equal(await row(page, "small").locator(".q-place").textContent(), "1");
    await link.press("Enter");
    await page.waitForURL(new RegExp(jobs.small.id));
    const banner = page.locator("#banner-link");
    await until("the job's page links to the queue", async () => (await banner.textContent()) === "Queue");
    await banner.click();
    await page.waitForURL(/\/queue$/);
    await server.ask(`/jobs/${jobs.small.id}/cancel`, {});
    await until("no job waits", () => page.getByRole("heading", { name: "Nothing waits" }).isVisible());
    await agent.endAttempt(urgent, { how: "succeeded", step: 1 });
  });

  test("is filtered by its URL, and the page Machines names the job that a slot is kept for", async () => {
    await submit(LONG, 2, { project: "vision" });
    await submit("small", 1);
    const page = await browser.page(server, "/queue?project=vision");
    await until("the project's job is listed", async () => (await names(page)).join() === LONG);
    // The link removes the filter.
    await page.getByRole("link", { name: "project vision" }).click();
    await until("all jobs are listed", async () => (await names(page)).join() === [LONG, "small"].join());
    for (const view of TWO_VIEWS) {
      await setView(page, view);
      const over = await page.locator(".queue").evaluate((node) => node.scrollWidth - node.clientWidth);
      assert.ok(over <= 0, `the table is ${over} pixels too wide: ${view}`);
    }
    await page.goto(`${server.url}/queue?owner=nobody`);
    assert.ok(await page.getByRole("heading", { name: "No waiting job matches" }).isVisible());
    await page.goto(`${server.url}/machines`);
    await until("the slot names the job", async () => /kept for large-/.test(await page.locator('.slots [data-slot="1"]').textContent()));
    assert.match(await page.locator('.slots [data-slot="0"]').textContent(), /running/);
  });
});
