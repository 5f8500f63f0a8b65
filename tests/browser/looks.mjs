// What every page must be: wide enough for what is on it, and without a finding of axe, in both themes.

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { createRequire } from "node:module";

const axe = await readFile(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");

/** Nothing stands out of the page to the right. */
export async function fits(page, where) {
  const over = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  assert.ok(over <= 0, `${where}: ${over} pixels too wide`);
}

/** Every control can be pressed where it stands, and words that are cut can be read in whole: by a tooltip, or by scrolling. */
export async function readable(page, where) {
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
      if (!node.closest("[title], select, .tip") && !node.querySelector("[title]")) wrong.push(`${name(node)} is cut without a tooltip`);
    }
    return [...new Set(wrong)];
  });
  await page.setViewportSize({ width, height });
  assert.deepEqual(wrong, [], where);
}

/** axe finds nothing. */
export async function clean(page, where) {
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => window.axe.run(document, { runOnly: ["wcag2a", "wcag2aa", "wcag21aa", "best-practice"] }));
  assert.deepEqual(violations.map((v) => `${v.id}: ${v.nodes.map((n) => n.target.join(" ")).join(", ")}`), [], where);
}

/** A picture of the whole page, where pictures are asked for. */
export async function picture(page, name) {
  if (process.env.LOCKSTEP_PICTURES) await page.screenshot({ path: `${process.env.LOCKSTEP_PICTURES}/${name}.png`, fullPage: true });
}
