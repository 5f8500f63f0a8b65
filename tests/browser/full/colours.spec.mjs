// More lines than the eight colours: compared jobs and ranks from the ninth on, and charts with a line per machine.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { range, simulateAgent, spec } from "../agent.mjs";
import { Browser, TestServer, saveChart, until } from "../test-server.mjs";

const COLOURS = 8, JOBS = 18, STEPS = 100;
const DASHES = ["", "dashed", "dotted"];
let server, browser, agent;
const compared = [];
const steps = range(1, STEPS);

before(async () => {
  [server, browser] = await Promise.all([TestServer.open({ dataset: false, agent: false }), Browser.open()]);
  agent = await simulateAgent(browser.chromium, server, JOBS + 12 + 4);
  for (let n = 0; n < JOBS; n++) {
    const body = spec(`job ${n}`, 1, 1000);
    body.train.lr = (n + 1) / 100;
    const { id } = await server.ask("/jobs", body), attempt = await agent.attempt(id);
    await agent.begin(attempt, { steps_per_epoch: 50 });
    await agent.reportSteps(attempt, 0, steps, { loss: n + 1 });
    compared.push({ id, attempt });
  }
});
after(async () => { await browser?.close(); await server?.close(); });

const comparePath = (jobs = compared) => `/compare?jobs=${jobs.map((j) => j.id).join(",")}`;
const untilDrawn = (page, jobs) => until("the charts are drawn", () => page.evaluate((jobs) => Number(document.querySelector("#curves .chart")?.dataset.drawn) > 0 && window.lockstep.chart?.lines?.length === jobs && document.querySelectorAll("#parallel .job").length === jobs && document.querySelectorAll("#compare-legend li").length === jobs && document.getElementById("scatter").dataset.points === String(jobs), jobs));
/** Returns colour and dash of the marks before names: `3 dashed`. */
const stylesOf = (marks) => marks.evaluateAll((all) => all.map((mark) => `${mark.className.match(/rank-(\d)/)[1]} ${mark.className.match(/dashed|dotted/)?.[0] ?? ""}`.trim()));
/** Returns for each job, whose loss is constant, the fraction of its horizontal line that has the job's colour: on the page's chart, or in
 *  the PNG file `picture` (base64). */
const colouredShare = (page, picture = null) => page.evaluate(async ([picture, jobs]) => {
  const { palette } = await import("/static/chart/palette.js"), { chart } = window.lockstep, { plot, y, canvas, root } = chart, ranks = palette().ranks;
  let image = canvas, top = 0;
  if (picture) {
    image = await createImageBitmap(new Blob([Uint8Array.from(atob(picture), (c) => c.charCodeAt(0))]));
    // Below the chart, a saved picture has only the name of the horizontal axis, 22 pixels high. Its scale is 2.
    top = image.height - (root.getBoundingClientRect().height + 22) * 2;
  }
  const scale = picture ? 2 : devicePixelRatio, copy = new OffscreenCanvas(image.width, image.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(image, 0, 0);
  return Object.fromEntries(jobs.map(({ id, loss }) => {
    const layer = chart.layers().find(({ label }) => label === `job ${loss - 1}`), [r, g, b] = ranks[Number(layer.colour.slice(5))].match(/[\d.]+/g).map(Number);
    const left = Math.round((plot.left + 20) * scale), width = Math.round((plot.right - plot.left - 40) * scale), row = Math.round(top + y.to(loss) * scale);
    const { data } = copy.getImageData(left, row - 2, width, 5);
    let coloured = 0;
    for (let x = 0; x < width; x++) if ([0, 1, 2, 3, 4].some((dy) => { const i = 4 * (dy * width + x); return data[i + 3] > 100 && Math.abs(data[i] - r) + Math.abs(data[i + 1] - g) + Math.abs(data[i + 2] - b) < 120; })) coloured++;
    return [id, coloured / width];
  }));
}, [picture, compared.map(({ id }, n) => ({ id, loss: n + 1 }))]);
/** Whether a line with this fraction of coloured pixels is solid (""), dashed or dotted. */
const isDrawnAs = (share, dash) => (dash === "" ? share > 0.95 : dash === "dashed" ? share > 0.5 && share < 0.85 : share > 0.2 && share < 0.6);
const saved = (page, kind) => saveChart(page, page.locator("#curves .curve").first(), kind);

describe("more jobs than colours", () => {
  test("have dashed lines from the ninth and dotted lines from the seventeenth, in charts, lists and pictures", async () => {
    const page = await browser.page(server, comparePath());
    await untilDrawn(page, JOBS);
    const expected = compared.map((_, n) => `${n % COLOURS} ${DASHES[Math.floor(n / COLOURS)]}`.trim());
    assert.deepEqual(await stylesOf(page.locator("#compare-legend .swatch")), expected);
    assert.deepEqual((await stylesOf(page.locator("#picker .swatch"))).sort(), [...expected].sort());
    assert.deepEqual((await stylesOf(page.locator("#results .swatch"))).sort(), [...expected].sort());
    const parallel = await page.locator("#parallel polyline").evaluateAll((all) => all.map((line) => getComputedStyle(line).strokeDasharray === "none" ? "solid" : getComputedStyle(line).strokeDasharray));
    assert.deepEqual(["solid", "7px, 4px", "2px, 3px"].map((dash) => parallel.filter((pattern) => pattern === dash).length), [8, 8, 2]);
    const marks = await page.locator("#compare-legend .swatch").evaluateAll((all) => all.map((mark) => getComputedStyle(mark).maskImage));
    assert.equal(new Set(marks).size, 3, "the three kinds of lines have different marks");
    const sharesOnPage = await colouredShare(page);
    for (const [n, { id }] of compared.entries()) assert.ok(isDrawnAs(sharesOnPage[id], DASHES[Math.floor(n / COLOURS)]), `job ${n}: ${sharesOnPage[id]}`);
    const svg = await saved(page, "SVG");
    assert.equal(svg.match(/stroke-dasharray="7 4"/g).length, 8);
    assert.equal(svg.match(/stroke-dasharray="2 3"/g).length, 2);
    const png = await saved(page, "PNG"), sharesInPng = await colouredShare(page, png.toString("base64"));
    for (const [n, { id }] of compared.entries()) assert.ok(isDrawnAs(sharesInPng[id], DASHES[Math.floor(n / COLOURS)]), `job ${n} in the PNG: ${sharesInPng[id]}`);
  });

  test("have rings as points from the ninth, and squares from the seventeenth", async () => {
    const page = await browser.page(server, comparePath());
    await untilDrawn(page, JOBS);
    const shades = await page.evaluate(async () => {
      const { drawPoint } = await import("/static/chart/lines.js"), shapes = {};
      for (const shape of [undefined, "ring", "square"]) {
        const ctx = new OffscreenCanvas(20, 20).getContext("2d");
        ctx.fillStyle = "#000";
        drawPoint(ctx, 10, 10, 5, shape, "#fff");
        const { data } = ctx.getImageData(0, 0, 20, 20), shadeAt = (x, y) => (data[4 * (20 * y + x) + 3] > 128 ? (data[4 * (20 * y + x)] > 128 ? "light" : "dark") : "none");
        shapes[shape ?? "disc"] = [shadeAt(10, 10), shadeAt(13, 10), shadeAt(5, 5)];
      }
      return shapes;
    });
    assert.deepEqual(shades, { disc: ["dark", "dark", "none"], ring: ["light", "dark", "none"], square: ["dark", "dark", "dark"] });
  });

  test("keep colour and dash when other jobs are left out, and after a reload", async () => {
    const page = await browser.page(server, comparePath(compared.slice(0, 10)));
    await untilDrawn(page, 10);
    await page.getByRole("button", { name: "Leave out job 0", exact: true }).click();
    await untilDrawn(page, 9);
    const names = page.locator("#compare-legend li a"), styledNames = async () => { const styles = await stylesOf(page.locator("#compare-legend .swatch")); return (await names.evaluateAll((all) => all.map((a) => a.title || a.textContent))).map((name, i) => `${name}: ${styles[i]}`); };
    const expected = await styledNames();
    assert.equal(expected.at(-1), "job 9: 1 dashed");
    assert.equal(expected[0], "job 1: 1");
    await page.reload();
    await untilDrawn(page, 9);
    assert.deepEqual(await styledNames(), expected);
  });
});

describe("a picture", () => {
  test("saved as PNG has title, axis names with units and legend at the same positions as the SVG", async () => {
    const page = await browser.page(server, comparePath(compared.slice(0, 3)));
    await untilDrawn(page, 3);
    const svg = await saved(page, "SVG"), png = await saved(page, "PNG");
    const texts = await page.evaluate(async ([svg, png]) => {
      const picture = new DOMParser().parseFromString(svg, "image/svg+xml").documentElement, image = await createImageBitmap(new Blob([Uint8Array.from(atob(png), (c) => c.charCodeAt(0))]));
      const ctx = new OffscreenCanvas(image.width, image.height).getContext("2d", { willReadFrequently: true }), { palette } = await import("/static/chart/palette.js");
      ctx.drawImage(image, 0, 0);
      ctx.font = palette().font;
      const [r, g, b] = ctx.getImageData(1, 1, 1, 1).data;
      return [...picture.querySelectorAll(":scope > text")].map((node) => {
        const textWidth = ctx.measureText(node.textContent).width, x = Number(node.getAttribute("x")) - { start: 0, middle: textWidth / 2, end: textWidth }[node.getAttribute("text-anchor")], y = Number(node.getAttribute("y"));
        const [left, top, w, h] = [Math.floor((x - 4) * 2), Math.floor((y - 8) * 2), Math.ceil((textWidth + 8) * 2), 32], { data } = ctx.getImageData(left, top, w, h);
        const ink = Array.from({ length: w }, (_, c) => Array.from({ length: h }, (_, row) => 4 * (row * w + c)).some((i) => Math.abs(data[i] - r) + Math.abs(data[i + 1] - g) + Math.abs(data[i + 2] - b) > 150));
        return { text: node.textContent, emptyBefore: ink.indexOf(true) / 2, emptyAfter: (w - ink.lastIndexOf(true)) / 2, inkShare: ink.filter(Boolean).length / w };
      });
    }, [svg, png.toString("base64")]);
    assert.deepEqual(texts.map(({ text }) => text), ["Loss, job 0, job 1, job 2", "job 0", "job 1", "job 2", "loss (cross-entropy)", "optimizer step"]);
    for (const { text, emptyBefore, emptyAfter, inkShare } of texts) assert.ok(emptyBefore >= 2 && emptyBefore < 8 && emptyAfter >= 2 && emptyAfter < 8 && inkShare > 0.4, `“${text}”: ${emptyBefore} pixels are empty before the text and ${emptyAfter} after it, ${inkShare} of the columns have ink`);
  });
});

describe("a job", () => {
  test("of more than eight ranks is drawn as the mean, with a band from the lowest to the highest rank", async () => {
    const { id } = await server.ask("/jobs", spec("twelve ranks", 12, 1000)), attempt = await agent.attempt(id);
    await agent.begin(attempt);
    for (let rank = 0; rank < 12; rank++) await agent.reportSteps(attempt, rank, steps, { loss: 2 + rank / 11 });
    const page = await browser.page(server, `/jobs/${id}`);
    await until("the chart is drawn", async () => (await page.evaluate(() => window.lockstep.charts.loss.firstDrawnAt)) > 0);
    await until("the band covers every rank", async () => (await page.evaluate(() => { const [{ series }] = window.lockstep.charts.loss.layers(), g = series.segments[0]; return [g.min[50], g.max[50], g.mean[50]]; })).every((v, i) => Math.abs(v - [2, 3, 2.5][i]) < 1e-6));
    assert.deepEqual(await page.evaluate(() => window.lockstep.charts.loss.lines.map(({ label }) => label)), ["mean of ranks"]);
    // The band is drawn half way between the mean and the highest rank, and nothing above the highest rank.
    const painted = await page.evaluate(() => {
      const { canvas, plot, y } = window.lockstep.charts.loss, ctx = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true }), pixelAt = (v) => [...ctx.getImageData(Math.round((plot.left + plot.right) / 2 * devicePixelRatio) + 7, Math.round(y.to(v) * devicePixelRatio), 1, 1).data];
      ctx.drawImage(canvas, 0, 0);
      return { mean: pixelAt(2.5)[3], band: pixelAt(2.77)[3], low: pixelAt(2.23)[3], above: pixelAt(3.05)[3] };
    });
    assert.ok(painted.mean > 200 && painted.band > 20 && painted.band < 200 && Math.abs(painted.low - painted.band) < 10 && painted.above === 0, JSON.stringify(painted));
  });

  test("on two machines has a line per machine for memory, disk and network", async () => {
    const { id } = await server.ask("/jobs", spec("two machines", 4, 1000)), attempt = await agent.attempt(id);
    await agent.begin(attempt);
    const metrics = ["memory_used_bytes", "disk_used_bytes", "disk_read_bytes_per_second", "disk_written_bytes_per_second", "network_received_bytes_per_second", "network_sent_bytes_per_second"];
    // One rank of each machine reports the machine's metrics.
    for (const rank of [0, 2]) await agent.reportSteps(attempt, rank, steps, Object.fromEntries(metrics.map((name, i) => [name, (rank + 1) * (i + 1) * 1_000_000.5])));
    const page = await browser.page(server, `/jobs/${id}`);
    for (const [i, name] of metrics.entries()) {
      await page.locator("#other-metric").selectOption(name);
      await until(`${name} has lines of both machines`, async () => (await page.evaluate(() => window.lockstep.charts.lr.snapshot().map(({ rank, points, value }) => `${rank}: ${points} of ${Math.round(value / 1e6)}`).join())) === [0, 2].map((rank) => `${rank}: ${STEPS} of ${(rank + 1) * (i + 1)}`).join());
      await until("the chart is drawn", async () => (await page.evaluate(() => window.lockstep.charts.lr.lines.map(({ label }) => label).join())) === "machine of rank 0,machine of rank 2");
    }
    const axis = await page.evaluate(() => window.lockstep.charts.lr.yName());
    assert.match(axis, /bytes\/s/);
  });
});
