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
