// The keyboard only, on a server without datasets.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { focused, trainByKeyboard } from "./by-keys.mjs";
import { Browser, TestServer, testInFullRun, losses, until } from "./test-server.mjs";

let server, browser;
before(async () => { [server, browser] = await Promise.all([TestServer.open({ dataset: false }), Browser.open()]); });
after(async () => { await browser?.close(); await server?.close(); });

test("a job is submitted, followed and cancelled by keyboard only", () => trainByKeyboard(server, browser, { width: 1440, height: 900 }));

testInFullRun("a tab of a job scrolls into view when a key or a link opens it", async () => {
  const { jobs: [job] } = await server.ask("/jobs"), viewport = { width: 1440, height: 700 };
  const page = await browser.page(server, `/jobs/${job.id}`, { viewport });
  const isInView = (panel) => page.locator(panel).evaluate((node) => { const { top } = node.getBoundingClientRect(); return !node.hidden && top >= 0 && top < innerHeight * 0.8; });
  await until("the chart is drawn", async () => (await losses(page))["rank 0"]?.points > 0);
  assert.equal(await isInView("#log-panel"), false, "the tabs are below the screen");
  await page.keyboard.press("2");
  await until("the second panel is in view", () => isInView("#evaluation-panel"));
  assert.equal((await focused(page)).name, "Evaluation");
  await page.goto(`${server.url}/jobs/${job.id}?tab=history`);
  await until("the linked panel is in view", () => isInView("#history-panel"));
  await page.end();
});
