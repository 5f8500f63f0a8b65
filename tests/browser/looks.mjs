// Checks for every page: the content fits, controls can be reached, and axe finds nothing, in both themes.

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { createRequire } from "node:module";
import { until } from "./test-server.mjs";

const axe = await readFile(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");

/** The page does not scroll sideways. */
export async function assertFits(page, where) {
  const over = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  assert.ok(over <= 0, `${where}: ${over} pixels too wide`);
}

/** No control is covered or off the page. Cut texts can be read by a tooltip or by scrolling; on a phone no text is cut. */
export async function assertReadable(page, where) {
  const { width, height } = page.viewportSize();
  // Makes the screen as high as the page, as `elementFromPoint` finds only elements on the screen.
  await page.setViewportSize({ width, height: await page.evaluate(() => document.documentElement.scrollHeight + 200) });
  const problems = await page.evaluate(() => {
    const name = (node) => `${node.tagName.toLowerCase()}${node.id && `#${node.id}`} ${(node.getAttribute("aria-label") ?? node.textContent).trim().slice(0, 40)}`;
    const isShown = (node) => node.checkVisibility({ visibilityProperty: true }) && !node.closest(".sr, .skip, dialog, [hidden]");
    const scrollParent = (node) => { for (let up = node.parentElement; up; up = up.parentElement) if (/auto|scroll/.test(getComputedStyle(up).overflowX + getComputedStyle(up).overflowY)) return up; return null; };
    const wrong = [];
    for (const node of document.querySelectorAll("button, a[href], select, input, summary, textarea")) {
      const box = node.getClientRects()[0];
      if (!box?.width || !isShown(node)) continue;
      const x = box.left + box.width / 2, y = box.top + box.height / 2, pane = scrollParent(node)?.getBoundingClientRect();
      if (pane && (x < pane.left || x > pane.right || y < pane.top || y > pane.bottom)) continue;
      // The list may have grown since the screen was resized.
      if (y > innerHeight) continue;
      if (x < 0 || y < 0 || x > innerWidth) { wrong.push(`${name(node)} is off the page`); continue; }
      const top = document.elementFromPoint(x, y), firstCell = top?.closest("tr > :first-child");
      // A table that is scrolled sideways has columns below its sticky first column.
      if (firstCell && scrollParent(node)?.scrollLeft && getComputedStyle(firstCell).position === "sticky") continue;
      if (!top || !(node.contains(top) || top.contains(node) || top.closest("label")?.contains(node))) wrong.push(`${name(node)} is covered by ${top && name(top)}`);
    }
    for (const node of document.querySelectorAll("main :not(input, textarea, thead)")) {
      if (node.scrollWidth <= node.clientWidth + 1 || !node.clientWidth || !isShown(node)) continue;
      const { overflowX } = getComputedStyle(node);
      if (!["hidden", "clip"].includes(overflowX)) continue;
      // A phone shows no tooltips. Texts of charts may be cut: the crosshair and saved pictures have them.
      if (innerWidth <= 720 && !node.closest(".chart, .heat, .lane, svg, select")) wrong.push(`${name(node)} is cut`);
      else if (!node.closest("[title], select, .tip") && !node.querySelector("[title]")) wrong.push(`${name(node)} is cut without a tooltip`);
    }
    // On a phone, texts that are clamped to a few lines must not be cut either.
    for (const node of innerWidth > 720 ? [] : document.querySelectorAll("main *")) {
      if (node.scrollHeight > node.clientHeight + 1 && getComputedStyle(node).webkitLineClamp !== "none" && isShown(node)) wrong.push(`${name(node)} is cut below`);
    }
    return [...new Set(wrong)];
  });
  await page.setViewportSize({ width, height });
  assert.deepEqual(problems, [], where);
}

/** axe finds no violation. */
export async function assertAccessible(page, where) {
  if (!await page.evaluate(() => "axe" in window)) await page.evaluate(axe);
  const { violations } = await page.evaluate(() => window.axe.run(document, { preload: false, resultTypes: ["violations"], runOnly: ["wcag2a", "wcag2aa", "wcag21aa", "best-practice"] }));
  assert.deepEqual(violations.map((v) => `${v.id}: ${v.nodes.map((n) => n.target.join(" ")).join(", ")}`), [], where);
}

/** The open dialog is on the screen, and each of its controls can be pressed, if necessary after scrolling. */
async function assertDialogUsable(page, where) {
  const wrong = await page.evaluate(() => {
    const dialog = document.querySelector("dialog[open]"), box = dialog.getBoundingClientRect(), wrong = [];
    if (box.left < 0 || box.top < 0 || box.right > innerWidth || box.bottom > innerHeight) wrong.push(`the dialog extends beyond the screen: ${JSON.stringify(box)}`);
    if (dialog.scrollWidth > dialog.clientWidth + 1) wrong.push("the dialog scrolls sideways");
    for (const node of dialog.querySelectorAll("button, a[href], select, input, summary, textarea")) {
      if (!node.checkVisibility({ visibilityProperty: true })) continue;
      node.scrollIntoView({ block: "nearest" });
      const { left, top, width, height } = node.getBoundingClientRect(), hit = document.elementFromPoint(left + width / 2, top + height / 2);
      if (!hit || !(node.contains(hit) || hit.closest("label")?.contains(node))) wrong.push(`${node.id || node.textContent} is covered`);
      if (node.tagName === "BUTTON" && node.scrollWidth > node.clientWidth + 1) wrong.push(`${node.textContent} is cut`);
    }
    return wrong;
  });
  assert.deepEqual(wrong, [], where);
}

const WIDTHS = [390, 768, 1024, 1440, 1920];
/** All combinations of theme and width, and the two that find most problems: a screen in the light theme, a phone in the dark theme. */
export const ALL_VIEWS = ["light", "dark"].flatMap((theme) => WIDTHS.map((width) => [theme, width]));
export const TWO_VIEWS = [["light", 1440], ["dark", 390]];
/** Widths at which axe runs: roles, names and colours differ between phone and screen, but not between widths of a screen.
 *  With LOCKSTEP_PICTURES, all checks run at every width. */
const AXE_WIDTHS = process.env.LOCKSTEP_PICTURES ? WIDTHS : [390, 1440];

/** Sets the theme and the width of an open page, and waits until the page is drawn. */
export async function setView(page, [theme, width]) {
  await page.emulateMedia({ colorScheme: theme });
  await page.setViewportSize({ width, height: 900 });
  await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
}

/** In each view, the open page fits and axe finds nothing. */
export async function assertViews(page, where, views = TWO_VIEWS) {
  for (const view of views) {
    await setView(page, view);
    await assertFits(page, `${where}, ${view}`);
    await assertAccessible(page, `${where}, ${view}`);
  }
}

/**
 * Opens a page and checks it in each view. `prepare(page)` runs on another page before the page is opened, `ready(page)` returns whether
 * the page is complete, and `act(page)` runs then. If `act` opens a dialog, the dialog is checked instead of the page.
 */
export async function checkPage(browser, server, path, name, { views = ALL_VIEWS, ready, prepare, act, options = {} } = {}) {
  const [colorScheme, width] = views[0], defaults = { colorScheme, viewport: { width, height: 900 }, reducedMotion: "reduce", expectedErrors: [/404|422/] };
  const page = await browser.page(server, prepare ? "/docs" : path, { ...defaults, ...options });
  if (prepare) { await prepare(page); await page.goto(server.url + path); }
  await until("the page has a heading", () => page.locator("h1").first().isVisible());
  if (ready) await until(`${name} is complete`, () => ready(page));
  if (act) await act(page);
  const checkedWidths = new Set();
  for (const view of views) {
    await setView(page, view);
    const [theme, width] = view, where = `${name} at ${width}, ${theme}`, hasDialog = await page.locator("dialog[open]").count() > 0;
    await assertFits(page, where);
    // Covered controls and cut texts do not depend on colours.
    if (hasDialog) await assertDialogUsable(page, where);
    // The page cuts texts again when a width or a list changes, so the check is repeated.
    else if (!checkedWidths.has(width) || process.env.LOCKSTEP_PICTURES) await until(where, () => assertReadable(page, where).then(() => true), 20_000);
    checkedWidths.add(width);
    if (AXE_WIDTHS.includes(width)) await assertAccessible(page, where);
    await savePicture(page, `${name}-${width}-${theme}`, !hasDialog);
  }
  await page.end();
}

/** Stores a screenshot of the page if LOCKSTEP_PICTURES is set. */
export async function savePicture(page, name, fullPage = true) {
  if (process.env.LOCKSTEP_PICTURES) await page.screenshot({ path: `${process.env.LOCKSTEP_PICTURES}/${name}.png`, fullPage });
}
