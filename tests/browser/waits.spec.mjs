// Pages of jobs that wait for a start or a restart: place, reason, filter, and the length of reasons. The agent is simulated.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { simulateAgent, spec } from "./agent.mjs";
import { assertFits } from "./looks.mjs";
import { Browser, TestServer, testInFullRun, until, untilLive } from "./test-server.mjs";

const PATH = `/data/imagenet-subset/train/${"n01440764-with-a-long-name/".repeat(4)}n01440764_10026.JPEG`;
let server, browser, agent;
const jobs = {};
const submit = async (name, ranks, fields = {}) => { jobs[name] = await server.ask("/jobs", { ...spec(name, ranks, 600), ...fields }); return jobs[name].id; };
const killed = { how: "failed", retriable: true, reason: { code: "rank_killed", rank: 1, step: 300, signal: 9, words: "rank 1 was killed by signal 9 at step 300" } };
const untilShows = (page, selector, pattern) => until(`${selector} shows ${pattern}`, async () => { const shown = (await page.locator(selector).first().textContent()).replace(/\s+/g, " "); return pattern.test(shown) || Promise.reject(new Error(shown)); });

before(async () => {
  [server, browser] = await Promise.all([TestServer.open({ dataset: false, agent: false }), Browser.open()]);
  agent = await simulateAgent(browser.chromium, server, 2);
  const attempt = await agent.attempt(await submit("killed", 2));
  await agent.begin(attempt, { total_steps: 600 });
  const urgent = await submit("urgent", 2, { priority: 5 });
  await agent.endAttempt(attempt, killed);
  await agent.begin(await agent.attempt(urgent), { total_steps: 600 });
});
after(async () => { await browser?.close(); await server?.close(); });

describe("a job that starts again", () => {
  test("shows on its page its place in the queue, its reason, and how its last attempt ended", async () => {
    const page = await browser.page(server, `/jobs/${jobs.killed.id}`);
    const banner = /Starting again, number 1 in the queue: waits for 2 slots: 0 of 2 on "simulated" free\. Before: rank 1 was killed by signal 9/;
    await untilShows(page, "#banner", banner);
    await untilLive(page);
    await untilShows(page, "#banner", banner);
    assert.equal(await page.locator("#banner-link").getAttribute("href"), "/queue");
    // Another job overtakes, although no field of this job has changed.
    await submit("first", 2, { priority: 3 });
    await untilShows(page, "#banner", /number 2 in the queue/);
    await server.ask(`/jobs/${jobs.first.id}/cancel`, {});
    await untilShows(page, "#banner", /number 1 in the queue/);
  });

  test("is found by the filter Restarting", async () => {
    const page = await browser.page(server, "/jobs");
    await page.locator("#filters").locator("[data-state=restarting]").click();
    await until("only the restarting job is listed", async () => (await page.locator("#rows tr").evaluateAll((rows) => rows.map((row) => row.dataset.id))).join() === jobs.killed.id);
    assert.equal(new URL(page.url()).searchParams.get("state"), "restarting");
    await page.locator("#filters").locator("[data-state=queued]").click();
    assert.equal(new URL(page.url()).searchParams.get("state"), "restarting,queued", "jobs in either state are listed");
    const counts = () => page.locator("#filters [data-state]").allTextContents();
    await until("each state shows its number of jobs, whatever states are selected", async () => { const all = await counts(); return all[0] === "all 3" && all.includes("running 1") && all.includes("restarting 1") && all.includes("cancelled 1") && all.includes("failed "); });
  });
});

describe("a job that waits", () => {
  test("can get another priority on its page", async () => {
    const id = await submit("overtaken", 2, { priority: 1 }), page = await browser.page(server, `/jobs/${id}`, { expectedErrors: [/422/] });
    const priority = page.locator(".title").getByLabel("Priority");
    await untilShows(page, "#banner", /number 1 in the queue/);
    assert.equal(await priority.inputValue(), "1");
    await priority.fill("-5");
    await priority.press("Enter");
    await untilShows(page, "#banner", /number 2 in the queue/);
    await untilShows(page, "#priority-status", /Saved/);
    assert.equal((await server.job(id)).spec.priority, -5);
    await priority.fill("5000");
    await priority.press("Enter");
    await untilShows(page, "#priority-status", /from -1000 to 1000/);
    await page.getByRole("button", { name: "Cancel", exact: true }).click();
    await page.getByRole("button", { name: "Cancel the job" }).click();
    await until("the open page shows the job as cancelled", async () => (await page.locator("#state").textContent()) === "cancelled");
    assert.ok(!await priority.isVisible());
  });
});

describe("a reason", () => {
  testInFullRun("has precedence over tags in a narrow row", async () => {
    const tags = ["a-tag-that-is-forty-characters-long-trul", "another-of-the-same-length-or-about-that"];
    const { id } = await server.ask("/jobs", { ...spec("tagged", 1, 600), tags });
    for (const width of [1024, 1440, 1920]) {
      const page = await browser.page(server, "/jobs", { viewport: { width, height: 1000 } }), row = page.locator(`tr[data-id="${id}"]`);
      await until("the row says what the job waits for", async () => /waits for 1 slot/.test(await row.locator("[data-f=reason]").textContent()));
      const size = await row.evaluate((tr) => {
        const reason = tr.querySelector("[data-f=reason]"), available = tr.querySelector(".more-line").clientWidth;
        return { isWhole: [reason, ...reason.children].every((n) => n.scrollWidth <= n.clientWidth + 1), hasHalfTheLine: reason.clientWidth > available / 2 };
      });
      assert.ok(size.isWhole || size.hasHalfTheLine, `the reason is cut to less than half of its line at ${width}`);
      await page.end();
    }
    await server.ask(`/jobs/${id}/cancel`, {});
  });

  test("is not cut in the list if it fits", async () => {
    await submit("waits", 2);
    for (const width of [390, 1440, 1920]) {
      const page = await browser.page(server, "/jobs?state=queued", { viewport: { width, height: 1000 } });
      const reason = page.locator(`tr[data-id="${jobs.waits.id}"] [data-f=reason]`);
      await until("the row says what the job waits for", async () => /^place 2 in the queue · waits for 2 slots: 0 of 2 on "simulated" free$/.test(await reason.textContent()));
      assert.equal(await reason.locator("*").count(), 0, "the reason is not shortened");
      const cut = () => reason.evaluate((node) => [node, ...node.children].filter((n) => n.scrollWidth > n.clientWidth + 1 && getComputedStyle(n).display !== "inline").map((n) => `${n.className}: ${n.scrollWidth} in ${n.clientWidth}`));
      assert.deepEqual(await cut(), [], `at ${width}`);
      await assertFits(page, `at ${width}`);
      const overlapping = await page.locator(`tr[data-id="${jobs.waits.id}"]`).evaluate((row) => {
        const box = (name) => row.querySelector(`[data-f=${name}]`).getBoundingClientRect(), reason = box("reason");
        return ["name", "bar", "age"].filter((name) => { const b = box(name); return b.bottom > reason.top + 1 && b.top < reason.bottom - 1 && b.right > reason.left && b.left < reason.right; });
      });
      assert.deepEqual(overlapping, [], `nothing overlaps the reason at ${width}`);
      await page.end();
    }
  });

  testInFullRun("has long paths cut between two folders, and whole in the tooltip", async () => {
    await agent.endAttempt(await agent.attempt(jobs.urgent.id), { how: "succeeded", step: 600 });
    const attempt = await agent.attempt(jobs.killed.id, 2);
    await agent.begin(attempt, { total_steps: 600 });
    const words = `${PATH} cannot be read: unexpected end of file`;
    await agent.endAttempt(attempt, { how: "failed", retriable: false, reason: { code: "dataset_unusable", words } });
    const page = await browser.page(server, `/jobs/${jobs.killed.id}`), why = page.locator("#banner-why");
    const assertPathCut = async () => {
      const shown = await why.textContent();
      assert.match(shown, /^\/data\/imagenet-subset[^ ]*…[/_.-][^ ]*\.JPEG cannot be read: unexpected end of file$/);
      assert.ok(shown.split(" ")[0].length <= 48, shown);
      assert.equal(await why.getAttribute("title"), words);
    };
    await until("the reason is shown", async () => (await why.textContent()).includes("cannot be read"));
    await untilLive(page);
    await assertPathCut();
    const withoutScripts = await browser.page(server, `/jobs/${jobs.killed.id}`, { javaScriptEnabled: false });
    const rendered = withoutScripts.locator("#banner-why");
    assert.deepEqual([await rendered.textContent(), await rendered.getAttribute("title")], [await why.textContent(), words], "the server renders the same text");
    await withoutScripts.end();
    await page.setViewportSize({ width: 390, height: 800 });
    await assertFits(page, "at 390");
    await page.end();
    await server.ask(`/jobs/${jobs.waits.id}/cancel`, {});
  });
});
