// Pages by keyboard only, on a server without datasets. The focused element must be on the screen, have a visible focus outline, and have a
// name.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { Browser, TestServer, testInFullRun, losses, until } from "./test-server.mjs";

let server, browser;
before(async () => { [server, browser] = await Promise.all([TestServer.open({ dataset: false }), Browser.open()]); });
after(async () => { await browser?.close(); await server?.close(); });

const MAX_TABS = 120;

/** Describes the focused element: its name, and whether it is in view and has a focus outline. */
const focused = (page) => page.evaluate(() => {
  const node = document.activeElement, box = node.getBoundingClientRect(), style = getComputedStyle(node);
  const name = (node.getAttribute("aria-label") ?? (node.labels?.[0] ?? node).textContent ?? "").trim().replace(/\s+/g, " ");
  return {
    name, isBody: node === document.body,
    isInView: box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth,
    hasOutline: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1,
  };
});

/** Presses `key` until an element whose name matches `name` has the focus. Checks every element on the way. */
async function tabTo(page, name, key = "Tab") {
  const passed = [];
  for (let n = 0; n < MAX_TABS; n++) {
    await page.keyboard.press(key);
    const current = await focused(page);
    if (current.isBody) continue;
    passed.push(current.name);
    assert.ok(current.name, `an element without a name follows ${passed.at(-2)}`);
    assert.ok(current.isInView, `${current.name} has the focus but is not on the screen`);
    assert.ok(current.hasOutline, `${current.name} has the focus but no outline`);
    if (name.test(current.name)) return;
  }
  assert.fail(`${name} is not reached; passed: ${passed.join(" | ")}`);
}

/** Submits a job from the empty list, adds a panel and cancels the job, by Tab, Enter and arrow keys. */
async function trainByKeyboard(server, viewport) {
  const page = await browser.page(server, "/jobs", { viewport, expectedErrors: [/422/], reducedMotion: "reduce" });
  await until("the page's scripts have run", () => page.locator("#keys").isVisible());
  await page.keyboard.press("Tab");
  assert.equal((await focused(page)).name, "Skip to content", "the first stop");
  await tabTo(page, /^New job$/);
  await page.keyboard.press("Enter");
  await page.waitForURL(/\/jobs\/new$/);
  await until("the page's scripts have run", () => page.locator("#keys").isVisible());
  await tabTo(page, /^Use the bundled pictures$/);
  await page.keyboard.press("Enter");
  await until("the plan is known", async () => /8,000 pictures/.test(await page.locator("#plan").textContent()));
  await tabTo(page, /^Name/);
  await page.keyboard.press("Control+A");
  await page.keyboard.type("by keys");
  // Small steps leave the CPU to the page.
  await tabTo(page, /^Global batch size$/);
  await page.keyboard.press("Control+A");
  await page.keyboard.type("16");
  await tabTo(page, /^Submit job$/);
  await page.keyboard.press("Enter");
  await page.waitForURL(/\/jobs\/j\w+$/);
  const id = page.url().split("/").at(-1);
  await until("the job trains", async () => (await losses(page))["rank 0"]?.points > 2);

  // The keyboard moves a chart's crosshair.
  await tabTo(page, /^Loss of each rank/);
  await page.keyboard.press("ArrowRight");
  await until("the chart's values are announced", async () => /step \d+.*rank 0/.test(await page.locator("#loss-chart [role=status]").textContent()));
  // A panel is added and made higher.
  await tabTo(page, /^Add a panel$/);
  await page.keyboard.press("Enter");
  const dialog = page.locator("#panel-dialog");
  await until("the form opens", () => dialog.isVisible());
  await tabTo(page, /^Loss$/);
  await page.keyboard.press("Space");
  await tabTo(page, /^Save$/);
  await page.keyboard.press("Enter");
  await until("the panel is shown", async () => !(await dialog.isVisible()) && (await page.locator("#custom-grid h3").allTextContents()).join() === "Loss");
  await tabTo(page, /^Size of Loss/);
  await page.keyboard.press("ArrowDown");
  await until("the panel's height is stored", async () => (await server.ask(`/jobs/${id}/panels`)).panels[0].rows === 2);
  // The key End opens the last tab.
  await tabTo(page, /^Log$/);
  await page.keyboard.press("End");
  await until("the last tab is open", () => page.locator("#history-panel").isVisible());
  await tabTo(page, /^Cancel$/, "Shift+Tab");
  await page.keyboard.press("Enter");
  await until("the confirmation dialog opens", () => page.locator("#confirm").isVisible());
  await tabTo(page, /^Cancel/);
  await page.keyboard.press("Enter");
  await until("the job ends", async () => (await server.job(id)).state === "cancelled");
  await until("the page shows the job's end, and the focus is not lost", async () => (await page.locator("#state").textContent()) === "cancelled" && !(await focused(page)).isBody);
  await page.end();
}

test("a job is submitted, followed and cancelled by keyboard only", () => trainByKeyboard(server, { width: 1440, height: 900 }));

testInFullRun("a job is submitted, followed and cancelled by keyboard only in a narrow window", async (t) => {
  const emptyServer = await TestServer.open({ dataset: false });
  t.after(() => emptyServer.close());
  await trainByKeyboard(emptyServer, { width: 390, height: 844 });
});

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
});
