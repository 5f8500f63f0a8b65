// The pages in a real Firefox, by WebDriver BiDi: finds features that work only in Chromium. Details are tested in Chromium.

import assert from "node:assert/strict";
import { existsSync } from "node:fs";
import { after, before, describe, test } from "node:test";
import puppeteer from "puppeteer-core";
import { TestServer, until } from "../test-server.mjs";

const FIREFOX = process.env.FIREFOX ?? ["/usr/bin/firefox-esr", "/usr/bin/firefox"].find((path) => existsSync(path));
const skip = FIREFOX ? false : "there is no Firefox on this machine: install firefox-esr, or name one as FIREFOX";
let server, firefox, jobs;
before(async () => {
  if (skip) return;
  [server, firefox] = await Promise.all([
    TestServer.open(),
    puppeteer.launch({ browser: "firefox", executablePath: FIREFOX, headless: true, timeout: 120_000, args: ["--no-remote"] }),
  ]);
  jobs = [await server.submit({ name: "first", tags: ["a"], train: { lr: 0.05 } }), await server.submit({ name: "second", tags: ["b"], train: { lr: 0.1 } })];
  for (const { id } of jobs) await until("the job has succeeded", async () => (await server.job(id)).state === "succeeded");
  const page = await firefox.newPage();
  await page.goto((await server.ask("/login-links", {})).url);
  await page.close();
});
after(async () => { await firefox?.close(); await server?.close(); });

/** Opens a page. `end` fails the test if the page has logged errors or warnings. */
async function open(path, width = 1440) {
  const page = await firefox.newPage(), faults = [];
  page.on("console", (message) => { if (["error", "warn"].includes(message.type())) faults.push(message.text()); });
  page.on("pageerror", (error) => faults.push(String(error)));
  // Ranks that train use both cores, so a page may load slowly.
  page.setDefaultNavigationTimeout(120_000);
  await page.setViewport({ width, height: 1000 });
  await page.goto(server.url + path);
  return { page, end: async ({ expected = /$^/ } = {}) => { await page.close(); assert.deepEqual(faults.filter((fault) => !expected.test(fault)), [], `${path} must log no errors`); } };
}

const text = (page, selector) => page.$eval(selector, (node) => node.textContent.trim());
const jobNames = (page) => page.$$eval("#rows tr [data-f=name]", (links) => links.map((a) => a.title || a.textContent).join());
const untilLive = (page) => until("the stream is live", async () => (await text(page, "#live")) === "live");
/** Whether a canvas shows more than its background. */
const isDrawn = (page, selector) => page.$eval(selector, (canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return new Set(new Uint32Array(data.buffer)).size > 1;
});

describe("Firefox", { skip }, () => {
  test("shows every page without horizontal scrolling, on a screen and on a phone", async () => {
    for (const path of ["/jobs", "/jobs?group_by=tag", `/jobs/${jobs[0].id}`, `/compare?jobs=${jobs.map((job) => job.id).join(",")}`, "/datasets", "/machines", "/jobs/new", "/people", "/audit", "/docs"]) {
      for (const width of [390, 1440]) {
        const { page, end } = await open(path, width);
        await until(`${path} has a heading`, () => page.$("main h1, main h2"));
        const over = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
        assert.ok(over <= 0, `${path} is ${over} pixels too wide at ${width}`);
        await end();
      }
    }
  });

  test("sorts and filters the list, which follows new jobs", async () => {
    const { page, end } = await open("/jobs?columns=loss,train.lr");
    await untilLive(page);
    assert.equal(await jobNames(page), "second,first");
    await page.click("th[data-key='train.lr'] button");
    await until("the list is sorted", async () => (await jobNames(page)) === "first,second");
    assert.equal(await page.$eval("th[data-key='train.lr']", (th) => th.getAttribute("aria-sort")), "ascending");
    await page.goto(`${server.url}/jobs?where=train.lr%3E0.07`);
    await until("one job is left", async () => (await jobNames(page)) === "second");
    await untilLive(page);
    const { id } = await server.submit({ name: "third", train: { lr: 0.2 } });
    await until("the new job appears without a reload", async () => (await jobNames(page)) === "third,second");
    await until("the new job's row shows its end", async () => (await text(page, `tr[data-id="${id}"] [data-f=state]`)) === "succeeded");
    await end();
  });

  test("draws a job's charts, and follows a running job", async () => {
    const { page, end } = await open(`/jobs/${jobs[0].id}`);
    await until("the chart is drawn", () => isDrawn(page, "#loss-chart canvas"));
    await page.click("#spec-title");
    await until("the tab opens", () => page.$eval("#spec-panel", (panel) => panel.checkVisibility()));
    await end();
    const { id } = await server.submit({ name: "watched", ranks: 1, train: { steps: 100_000 } });
    const watched = await open(`/jobs/${id}`);
    const facts = () => text(watched.page, "#facts");
    await until("the job trains", async () => (await server.job(id)).step > 0);
    const factsBefore = await facts();
    await until("the job's figures change", async () => (await facts()) !== factsBefore);
    await until("the job's loss is drawn", () => isDrawn(watched.page, "#loss-chart canvas"));
    await watched.page.click("#cancel");
    await until("the confirmation dialog opens", () => watched.page.$eval("#confirm", (dialog) => dialog.open));
    await watched.page.click("#confirm-yes");
    await until("the job is cancelled", async () => (await text(watched.page, "#state")) === "cancelled");
    await watched.end();
  });

  test("compares jobs", async () => {
    const { page, end } = await open(`/compare?jobs=${jobs.map((job) => job.id).join(",")}`);
    await until("curves are drawn", () => isDrawn(page, "main canvas"));
    await end();
  });

  test("selects jobs by dragging along an axis", async () => {
    const { page, end } = await open(`/compare?jobs=${jobs.map((job) => job.id).join(",")}`);
    // Finds the axis anew at each use: it is drawn again when the page is resized and when the page becomes live.
    const axis = () => page.$('#parallel [data-axis="train.lr"]'), chosen = () => page.evaluate(() => [...window.lockstep.selection.ids()].map((id) => window.lockstep.jobs().find((job) => job.id === id).name).join());
    await untilLive(page);
    await until("the axis is drawn", async () => { await (await axis()).scrollIntoView(); return true; });
    assert.equal(await chosen(), "first,second");
    // Brushes the lower half of the axis, with the smaller learning rate.
    const { x, y, width, height } = await until("the axis has a position", async () => (await axis()).boundingBox());
    await page.mouse.move(x + width / 2, y + height - 4);
    await page.mouse.down();
    await page.mouse.move(x + width / 2, y + height * 0.8, { steps: 4 });
    await page.mouse.move(x + width / 2, y + height * 0.6, { steps: 4 });
    await page.mouse.up();
    await until("one job is selected", async () => (await chosen()) === "first");
    assert.match(await text(page, "#selection-count"), /1 of 2 jobs/);
    await page.click("#selection-clear");
    await until("both jobs are selected again", async () => (await chosen()) === "first,second");
    await end();
  });

  test("adds a panel to a job, which is kept after a reload", async () => {
    const { page, end } = await open(`/jobs/${jobs[0].id}`);
    await until("the chart is drawn", () => isDrawn(page, "#loss-chart canvas"));
    await page.click("#panel-add");
    await until("the form of the panel opens", () => page.$eval("#panel-dialog", (dialog) => dialog.open));
    await page.click('#panel-dialog input[value="lr"]');
    await page.click("#panel-save");
    await until("the panel's chart is drawn", () => isDrawn(page, ".panel canvas"));
    await page.reload();
    await until("the chart is drawn after a reload", () => isDrawn(page, ".panel canvas"));
    await end();
  });

  test("shows the queue, which is updated without a reload", async () => {
    const holder = await server.submit({ name: "holds both", train: { steps: 100_000 } }), { page, end } = await open("/queue");
    await untilLive(page);
    const waits = await server.submit({ name: "waits for it" });
    await until("the job is listed", async () => /waits for it/.test(await text(page, "#queue")));
    await server.ask(`/jobs/${waits.id}/cancel`, {});
    await until("the job is gone", async () => !/waits for it/.test(await text(page, "#queue")));
    await server.ask(`/jobs/${holder.id}/cancel`, {});
    await end();
  });

  test("reconnects after the server was down", async () => {
    const { page, end } = await open("/jobs");
    await untilLive(page);
    await page.evaluate(() => { window.sameDocument = true; });
    await server.crash();
    await until("the page reconnects", async () => (await text(page, "#live")) === "reconnecting");
    await server.start();
    await untilLive(page);
    await server.submit({ name: "after it was away" });
    await until("the new job is listed", async () => (await jobNames(page)).startsWith("after it was away"));
    assert.ok(await page.evaluate(() => window.sameDocument), "the page was not reloaded");
    await end({ expected: /can.t establish a connection|connection.*was interrupted|NetworkError|WebSocket/i });
  });

  test("submits a job by the form", async () => {
    const { page, end } = await open("/jobs/new");
    await until("the dataset is chosen", async () => (await page.$eval("[name='data.dataset']", (field) => field.value)) === "fashion-mnist");
    await page.$eval("[name=name]", (field) => { field.value = ""; });
    await page.type("[name=name]", "by the form");
    await page.click("#send");
    await until("the job's page opens", () => /\/jobs\/j\w+$/.test(page.url()));
    const id = page.url().split("/").at(-1);
    assert.equal((await server.job(id)).name, "by the form");
    await server.ask(`/jobs/${id}/cancel`, {});
    await end();
  });
});
