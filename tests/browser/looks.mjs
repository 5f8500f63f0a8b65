// What every page must be: wide enough for what is on it, and without a finding of axe, in both themes.

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { createRequire } from "node:module";
import { until } from "./test-server.mjs";

const axe = await readFile(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");

/** Nothing stands out of the page to the right. */
export async function assertFits(page, where) {
  const over = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  assert.ok(over <= 0, `${where}: ${over} pixels too wide`);
}

/** Every control can be pressed where it stands, and words that are cut can be read in whole: by a tooltip, or by scrolling; on a phone none are cut. */
export async function assertReadable(page, where) {
  const { width, height } = page.viewportSize();
  // As high as the page: only what is on the screen can be asked for.
  await page.setViewportSize({ width, height: await page.evaluate(() => document.documentElement.scrollHeight + 200) });
  const wrong = await page.evaluate(() => {
    const name = (node) => `${node.tagName.toLowerCase()}${node.id && `#${node.id}`} ${(node.getAttribute("aria-label") ?? node.textContent).trim().slice(0, 40)}`;
    const shown = (node) => node.checkVisibility({ visibilityProperty: true }) && !node.closest(".sr, .skip, dialog, [hidden]");
    const scrolls = (node) => { for (let up = node.parentElement; up; up = up.parentElement) if (/auto|scroll/.test(getComputedStyle(up).overflowX + getComputedStyle(up).overflowY)) return up; return null; };
    const wrong = [];
    for (const node of document.querySelectorAll("button, a[href], select, input, summary, textarea")) {
      const box = node.getClientRects()[0];
      if (!box?.width || !shown(node)) continue;
      const x = box.left + box.width / 2, y = box.top + box.height / 2, pane = scrolls(node)?.getBoundingClientRect();
      if (pane && (x < pane.left || x > pane.right || y < pane.top || y > pane.bottom)) continue;
      // A list may have grown meanwhile.
      if (y > innerHeight) continue;
      if (x < 0 || y < 0 || x > innerWidth) { wrong.push(`${name(node)} is off the page`); continue; }
      const top = document.elementFromPoint(x, y);
      if (!top || !(node.contains(top) || top.contains(node) || top.closest("label")?.contains(node))) wrong.push(`${name(node)} is covered by ${top && name(top)}`);
    }
    for (const node of document.querySelectorAll("main :not(input, textarea, thead)")) {
      if (node.scrollWidth <= node.clientWidth + 1 || !node.clientWidth || !shown(node)) continue;
      const { overflowX } = getComputedStyle(node);
      if (!["hidden", "clip"].includes(overflowX)) continue;
      // No finger opens a tooltip. Charts are pictures, whose words a crosshair and a saved picture have.
      if (innerWidth <= 720 && !node.closest(".chart, .heat, .lane, svg, select")) wrong.push(`${name(node)} is cut`);
      else if (!node.closest("[title], select, .tip") && !node.querySelector("[title]")) wrong.push(`${name(node)} is cut without a tooltip`);
    }
    // The same of lines: the end of what is clamped to a few.
    for (const node of innerWidth > 720 ? [] : document.querySelectorAll("main *")) {
      if (node.scrollHeight > node.clientHeight + 1 && getComputedStyle(node).webkitLineClamp !== "none" && shown(node)) wrong.push(`${name(node)} is cut below`);
    }
    return [...new Set(wrong)];
  });
  await page.setViewportSize({ width, height });
  assert.deepEqual(wrong, [], where);
}

/** axe finds nothing. */
export async function assertAccessible(page, where) {
  if (!await page.evaluate(() => "axe" in window)) await page.evaluate(axe);
  const { violations } = await page.evaluate(() => window.axe.run(document, { preload: false, resultTypes: ["violations"], runOnly: ["wcag2a", "wcag2aa", "wcag21aa", "best-practice"] }));
  assert.deepEqual(violations.map((v) => `${v.id}: ${v.nodes.map((n) => n.target.join(" ")).join(", ")}`), [], where);
}

/** A dialog that is open lies on the screen, and every control in it can be pressed where it stands, or is scrolled to. */
export async function assertDialogUsable(page, where) {
  const wrong = await page.evaluate(() => {
    const dialog = document.querySelector("dialog[open]"), box = dialog.getBoundingClientRect(), wrong = [];
    if (box.left < 0 || box.top < 0 || box.right > innerWidth || box.bottom > innerHeight) wrong.push(`it goes beyond the screen: ${JSON.stringify(box)}`);
    if (dialog.scrollWidth > dialog.clientWidth + 1) wrong.push("it is wider than it may be");
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

const WIDTHS = [390, 1024, 1440, 1920];
/** Every way a page is looked at, and the two that show most of what can be wrong: a screen by day, a phone by night. */
export const ALL_VIEWS = ["light", "dark"].flatMap((theme) => WIDTHS.map((width) => [theme, width]));
export const TWO_VIEWS = [["light", 1440], ["dark", 390]];
/** Where axe looks: what it reads (roles, names, colours) differs between a phone and a screen, not by how wide a screen is. */
const EXAMINED = process.env.LOCKSTEP_PICTURES ? WIDTHS : [390, 1440];

/** Shows an open page in a theme at a width, drawn. */
export async function setView(page, [theme, width]) {
  await page.emulateMedia({ colorScheme: theme });
  await page.setViewportSize({ width, height: 900 });
  await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
}

/** In each view an open page is wide enough and axe finds nothing. */
export async function assertViews(page, where, views = TWO_VIEWS) {
  for (const view of views) {
    await setView(page, view);
    await assertFits(page, `${where}, ${view}`);
    await assertAccessible(page, `${where}, ${view}`);
  }
}

/**
 * Opens a page and looks at it in each view. `prepare(page)`: before it is opened. `ready(page)`: it shows all. `act(page)`: what a person
 * does then; a dialog that it opens is looked at instead of the page.
 */
export async function checkPage(browser, where, path, name, { views = ALL_VIEWS, ready, prepare, act, options = {} } = {}) {
  const [colorScheme, width] = views[0], opened = { colorScheme, viewport: { width, height: 900 }, reducedMotion: "reduce", expected: [/404|422/] };
  const page = await browser.page(where, prepare ? "/docs" : path, { ...opened, ...options });
  if (prepare) { await prepare(page); await page.goto(where.url + path); }
  await until("it has a heading", () => page.locator("h1").first().isVisible());
  if (ready) await until(`${name} is there`, () => ready(page));
  if (act) await act(page);
  const read = new Set();
  for (const view of views) {
    await setView(page, view);
    const [theme, width] = view, at = `${name} at ${width}, ${theme}`, hasDialog = await page.locator("dialog[open]").count() > 0;
    await assertFits(page, at);
    // What is covered or cut does not depend on colours.
    if (hasDialog) await assertDialogUsable(page, at);
    // Texts are cut anew when a width or a list changes.
    else if (!read.has(width) || process.env.LOCKSTEP_PICTURES) await until(at, () => assertReadable(page, at).then(() => true), 5000);
    read.add(width);
    if (EXAMINED.includes(width)) await assertAccessible(page, at);
    await savePicture(page, `${name}-${width}-${theme}`, !hasDialog);
  }
  await page.end();
}

/** A picture of the whole page, where pictures are asked for. */
export async function savePicture(page, name, fullPage = true) {
  if (process.env.LOCKSTEP_PICTURES) await page.screenshot({ path: `${process.env.LOCKSTEP_PICTURES}/${name}.png`, fullPage });
}
