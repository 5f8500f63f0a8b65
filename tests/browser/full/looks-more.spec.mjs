// Pages that looks.spec.mjs does not check, at every width in both themes; menus of the list; and every page on the smallest phone.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { MORE_PAGES, PAGES, fillServer } from "../crowded.mjs";
import { assertFits, assertViews, checkPage } from "../looks.mjs";
import { Browser, TestServer, until } from "../test-server.mjs";

let server, browser, jobs;
before(async () => {
  [server, browser] = await Promise.all([TestServer.open({ dataset: false, agent: false }), Browser.open()]);
  jobs = await fillServer(server, browser);
});
after(async () => { await browser?.close(); await server?.close(); });

describe("a page of a crowded server fits, is readable and accessible:", () => {
  for (const [name, path, ready] of MORE_PAGES) test(name, () => checkPage(browser, server, path(jobs), name, { ready }));

  test("the list with a menu open", async () => {
    const page = await browser.page(server, "/jobs?where=train.lr%3E%3D0.01&sort=-loss&columns=loss,train.lr", { reducedMotion: "reduce" });
    await until("the jobs are listed", async () => (await page.locator("#rows tr").count()) >= 5);
    for (const menu of [".narrow", ".saved-views", "#columns", ".grouping"]) {
      await page.locator(`${menu} > summary`).click();
      await assertViews(page, menu);
      await page.locator(`${menu} > summary`).click();
    }
  });

  for (const path of ["/docs/reference/command-line", "/docs/reference/rest"]) {
    test(`the long page ${path}`, async () => {
      const page = await browser.page(server, path, { reducedMotion: "reduce" });
      await assertViews(page, path);
    });
  }

  test("a phone of 360 pixels", async () => {
    const page = await browser.page(server, "/docs", { viewport: { width: 360, height: 740 }, expectedErrors: [/404|422/] });
    for (const [name, path, ready] of [...PAGES, ...MORE_PAGES]) {
      await page.goto(server.url + path(jobs));
      if (ready) await until(`${name} is complete`, () => ready(page));
      for (const control of ["h1", "#theme", "#keys"]) await until(`${control} is on ${name}`, () => page.locator(control).first().isVisible());
      await assertFits(page, name);
    }
    await page.goto(`${server.url}/docs/team`);
    await page.getByLabel("Search the documentation").fill("learning rate");
    await page.waitForURL(/\/docs\?q=learning%20rate$/);
    const top = async (selector) => (await page.locator(selector).first().boundingBox()).y;
    assert.ok(await top("article li") < await top(".docs nav ul"), "results come before the list of pages");
    assert.equal(await page.locator("article li a").nth(1).getAttribute("href"), "/docs/reference/job-file#train");
  });
});

describe("the list on a phone", () => {
  test("can be sorted by its buttons", async () => {
    const page = await browser.page(server, "/jobs", { viewport: { width: 390, height: 844 }, hasTouch: true, isMobile: true });
    await page.getByRole("button", { name: "Images/s" }).tap();
    await until("the fastest job comes first", async () => (await page.locator("#rows tr").first().getAttribute("data-id")) === jobs.running);
    assert.equal(new URL(page.url()).searchParams.get("sort"), "-speed");
  });
});
