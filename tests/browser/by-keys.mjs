// Somebody without a mouse: what has the focus is on the screen, is marked, and has a name.

import assert from "node:assert/strict";
import { losses, until } from "./test-server.mjs";

const MOST_TABS = 120;

/** What has the focus: its words, and whether a reader finds it. */
export const focused = (page) => page.evaluate(() => {
  const node = document.activeElement, box = node.getBoundingClientRect(), style = getComputedStyle(node);
  const words = (node.getAttribute("aria-label") ?? (node.labels?.[0] ?? node).textContent ?? "").trim().replace(/\s+/g, " ");
  return {
    words, body: node === document.body,
    inView: box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth,
    marked: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1,
  };
});

/** Tab until something with these words has the focus; everything on the way is looked at. */
async function tabTo(page, words, key = "Tab") {
  const seen = [];
  for (let n = 0; n < MOST_TABS; n++) {
    await page.keyboard.press(key);
    const at = await focused(page);
    if (at.body) continue;
    seen.push(at.words);
    assert.ok(at.words, `something without a name follows ${seen.at(-2)}`);
    assert.ok(at.inView, `${at.words} has the focus and is not on the screen`);
    assert.ok(at.marked, `${at.words} has the focus and no mark`);
    if (words.test(at.words)) return;
  }
  assert.fail(`${words} is not reached; passed: ${seen.join(" | ")}`);
}

/** From the empty list to a job that trains, its panels, and its end, by Tab, Enter and arrow keys. */
export async function trainByKeys(server, browser, viewport) {
  const page = await browser.page(server, "/jobs", { viewport, expected: [/422/], reducedMotion: "reduce" });
  await until("its scripts have run", () => page.locator("#keys").isVisible());
  await page.keyboard.press("Tab");
  assert.equal((await focused(page)).words, "Skip to content", "the first stop");
  await tabTo(page, /^New job$/);
  await page.keyboard.press("Enter");
  await page.waitForURL(/\/jobs\/new$/);
  await until("its scripts have run", () => page.locator("#keys").isVisible());
  await tabTo(page, /^Use the bundled pictures$/);
  await page.keyboard.press("Enter");
  await until("the plan is known", async () => /8,000 pictures/.test(await page.locator("#plan").textContent()));
  await tabTo(page, /^Name/);
  await page.keyboard.press("Control+A");
  await page.keyboard.type("by keys");
  // Small steps, which leave the processors to the page.
  await tabTo(page, /^Global batch size$/);
  await page.keyboard.press("Control+A");
  await page.keyboard.type("16");
  await tabTo(page, /^Submit job$/);
  await page.keyboard.press("Enter");
  await page.waitForURL(/\/jobs\/j\w+$/);
  const id = page.url().split("/").at(-1);
  await until("it trains", async () => (await losses(page))["rank 0"]?.points > 2);

  // A chart, by its keys.
  await tabTo(page, /^Loss of each rank/);
  await page.keyboard.press("ArrowRight");
  await until("its values are said", async () => /step \d+.*rank 0/.test(await page.locator("#loss-chart [role=status]").textContent()));
  // A panel is added, made wider, and taken away.
  await tabTo(page, /^Add a panel$/);
  await page.keyboard.press("Enter");
  const dialog = page.locator("#panel-dialog");
  await until("the form opens", () => dialog.isVisible());
  await tabTo(page, /^Loss$/);
  await page.keyboard.press("Space");
  await tabTo(page, /^Save$/);
  await page.keyboard.press("Enter");
  await until("it is there", async () => !(await dialog.isVisible()) && (await page.locator("#custom-grid h3").allTextContents()).join() === "Loss");
  await tabTo(page, /^Size of Loss/);
  await page.keyboard.press("ArrowDown");
  await until("it is kept", async () => (await server.ask(`/jobs/${id}/panels`)).panels[0].rows === 2);
  // Tabs: arrow keys go from one to the next.
  await tabTo(page, /^Log$/);
  await page.keyboard.press("End");
  await until("the last tab is open", () => page.locator("#history-panel").isVisible());
  await tabTo(page, /^Cancel$/, "Shift+Tab");
  await page.keyboard.press("Enter");
  await until("it asks", () => page.locator("#confirm").isVisible());
  await tabTo(page, /^Cancel the job|^Cancel/);
  await page.keyboard.press("Enter");
  await until("it ends", async () => (await server.job(id)).state === "cancelled");
  assert.equal((await focused(page)).body, false, "the focus is not lost");
  await page.end();
}
