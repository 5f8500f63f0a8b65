// The page Machines with a real agent, which measures this machine.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { Browser, TestServer, until } from "./test-server.mjs";

const NAME = `a-job-with-${"a-very-".repeat(12)}long-name`;
let server, browser, job;
before(async () => {
  [server, browser] = await Promise.all([TestServer.open(), Browser.open()]);
  job = await server.submit({ name: NAME, train: { steps: 100_000 } });
});
after(async () => { await browser?.close(); await server?.close(); });

/** Returns the text of a gauge: `CPU` → `37 %`. */
const gaugeText = (page, name) => page.locator(".gauges > div", { has: page.getByText(name, { exact: true }) }).locator("dd").innerText();

describe("machines", () => {
  test("show measurements, which are updated in place", async () => {
    const page = await browser.page(server, "/machines");
    await until("the machine is measured", async () => /^\d+ %\s/.test(await gaugeText(page, "CPU")));
    assert.match(await gaugeText(page, "Memory"), /^[\d.]+ [GMT]B\sof [\d.]+ [GMT]B/);
    assert.match(await gaugeText(page, "Disk"), /^\d+ %\s[\d.]+ [GMT]B free of/);
    await until("the job uses both slots", async () => (await page.locator(".slots .busy").count()) === 2);
    assert.match(await page.locator(".slots .busy").nth(1).innerText(), /long-name\s*rank 1/);
    const slots = () => page.locator(".slots .busy").evaluateAll((all) => all.map((slot) => slot.innerText));
    await until("each slot shows its rank's use of CPUs and memory", async () => (await slots()).every((text) => /use\s*\d+ %/.test(text) && /memory\s*[\d.]+ [MG]B/.test(text)) || Promise.reject(new Error((await slots()).join())));
    assert.equal(await page.locator(".slots .gauges", { hasText: "temperature" }).count(), 0, "a slot of CPU cores has no temperature");
    await until("a line is drawn", async () => (await page.locator('.machine > .gauges [data-metric="cpu_utilization"]').getAttribute("d"))?.startsWith("M"));
    const history = page.waitForResponse((response) => response.url().includes("points=96"));
    await page.getByRole("button", { name: "24 h" }).click();
    assert.equal((await history).status(), 200);
    assert.match(page.url(), /range=24h/);
    // The focused button stays the same element when the page is updated.
    const button = page.getByRole("button", { name: "Drain" });
    await button.focus();
    await button.evaluate((node) => { node.marked = true; });
    const readGauges = () => page.locator(".gauges").first().innerText(), gaugesBefore = await readGauges();
    await until("numbers change", async () => (await readGauges()) !== gaugesBefore);
    assert.deepEqual(await page.evaluate(() => [document.activeElement.dataset.drain, document.activeElement.marked]), ["drain", true]);
    await button.press("Enter");
    await until("the machine is drained", async () => (await page.locator(".warnings").innerText()).includes("Drained: it takes no new work"));
    assert.deepEqual(await page.evaluate(() => document.activeElement.dataset.drain), "undrain");
    await page.getByRole("button", { name: "Undrain" }).press("Enter");
    await until("the machine is no longer drained", async () => (await page.getByText("Drained:").count()) === 0);
  });

  test("have a group among the job's charts, with one line per machine", async () => {
    const measured = async () => (await server.ask(`/jobs/${job.id}/metrics?name=cpu_utilization`)).series;
    const series = await until("the machine is measured", async () => { const current = await measured(); return current[0]?.steps.length > 1 && current; });
    assert.deepEqual(series.map((s) => s.rank), [0]);
    assert.ok(series[0].mean.every((v) => v >= 0 && v <= 1), JSON.stringify(series[0].mean));
    const page = await browser.page(server, `/jobs/${job.id}?metric=cpu_utilization`);
    assert.deepEqual(await page.locator('#other-metric optgroup[label="Machine"] option').allInnerTexts(),
      ["CPU utilisation", "Memory in use", "Disk in use", "Read from disk", "Written to disk", "Network received", "Network sent"]);
    await until("the chart is drawn", async () => /point/.test(await page.locator("#lr-note").innerText()));
    const { agents: [{ name }] } = await server.ask("/agents");
    assert.deepEqual([...new Set(await page.evaluate(() => window.lockstep.charts.lr.snapshot().map((line) => line.label)))], [name], "the line has the machine's name");
  });
});
