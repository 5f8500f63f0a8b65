// Touch and arrow keys: charts, the scatter plot and the parallel coordinates are brushed by touch, and panels are resized by mouse,
// touch and keyboard. The agent is simulated, so no test waits for training.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { range, simulateAgent, spec } from "../agent.mjs";
import { assertAccessible, assertFits, savePicture } from "../looks.mjs";
import { Browser, TestServer, losses, until as waitUntil } from "../test-server.mjs";

/** Waits for at most 30 s: no test in this file waits for training. */
const until = (what, check) => waitUntil(what, check, 30_000);
const STEPS = 400, TABLET = { viewport: { width: 1024, height: 900 }, hasTouch: true, isMobile: true };
/** Duration of a long press, longer than static/chart/hold.js requires. */
const LONG_PRESS_MS = 1500;
let server, browser;
const jobIds = [];
before(async () => {
  [server, browser] = await Promise.all([TestServer.open({ dataset: false, agent: false }), Browser.open()]);
  const agent = await simulateAgent(browser.chromium, server, 3);
  for (const [name, lr, loss] of [["fast", 0.4, 1], ["slow", 0.1, 3], ["wild", 0.2, 5]]) {
    const body = spec(name, 1, 1000);
    body.train.lr = lr;
    const { id } = await server.ask("/jobs", body);
    const attempt = await agent.attempt(id);
    await agent.begin(attempt);
    await agent.reportSteps(attempt, 0, range(1, STEPS), { loss: (s) => loss + 1 / s, lr: 0.1 });
    jobIds.push(id);
  }
});
after(async () => { await browser?.close(); await server?.close(); });

/** Returns functions that send touch events to a page. */
async function touchInput(page) {
  const tools = await page.context().newCDPSession(page);
  const send = (type, ...points) => tools.send("Input.dispatchTouchEvent", { type, touchPoints: points.map(([x, y], id) => ({ x, y, id })) });
  const pathOf = (from, to) => Array.from({ length: 6 }, (_, i) => from.map(([x, y], n) => [x + (to[n][0] - x) * (i + 1) / 6, y + (to[n][1] - y) * (i + 1) / 6]));
  return {
    /** Drags one finger per point of `from` to the points of `to`, after a press of `hold` milliseconds. */
    async drag(from, to, { hold = 0 } = {}) {
      await send("touchStart", ...from);
      if (hold) await new Promise((done) => setTimeout(done, hold));
      for (const points of pathOf(from, to)) await send("touchMove", ...points);
      await send("touchEnd");
    },
    async tap(...point) { await send("touchStart", point); await send("touchEnd"); },
    down: (...point) => send("touchStart", point), move: (...point) => send("touchMove", point), up: () => send("touchEnd"), cancel: () => send("touchCancel"),
  };
}
/** Scrolls an element to the middle of the screen and returns its box. */
async function scrollToCenter(locator) {
  await locator.evaluate((node) => node.scrollIntoView({ block: "center" }));
  return locator.boundingBox();
}

describe("a chart on a touch screen", () => {
  /** Opens the job's page on a touch screen and waits until the chart is drawn. */
  async function open() {
    const page = await browser.page(server, `/jobs/${jobIds[0]}`, TABLET);
    await until("the chart is drawn", async () => (await losses(page))["rank 0"]?.points === STEPS && (await page.evaluate(() => window.lockstep.charts.loss.firstDrawnAt > 0)));
    const box = await scrollToCenter(page.locator("#loss-chart")), touch = await touchInput(page);
    return { page, touch, zoom: () => page.evaluate(() => window.lockstep.view.zoom), pointAt: (share) => [box.x + box.width * share, box.y + box.height / 2], box };
  }

  test("zooms by pinching with two fingers, and shows all steps after a double tap", async () => {
    const { page, touch, zoom, pointAt } = await open();
    const stepAt = (pixels) => page.evaluate((p) => window.lockstep.charts.loss.x.from(p), pixels);
    const left = await page.locator("#loss-chart").evaluate((node) => node.getBoundingClientRect().left);
    const pinched = [await stepAt(pointAt(0.4)[0] - left), await stepAt(pointAt(0.6)[0] - left)];
    await touch.drag([pointAt(0.4), pointAt(0.6)], [pointAt(0.2), pointAt(0.8)]);
    const zoomed = await until("the chart is zoomed", zoom);
    assert.ok(zoomed[1] - zoomed[0] < STEPS * 0.5 && zoomed[0] < pinched[0] && zoomed[1] > pinched[1], `${zoomed} around ${pinched}`);
    await until("the pinched steps stay under the fingers", async () => Math.abs((await stepAt(pointAt(0.2)[0] - left)) - pinched[0]) < STEPS / 50 && Math.abs((await stepAt(pointAt(0.8)[0] - left)) - pinched[1]) < STEPS / 50);
    // Two fingers that move together move the zoomed range.
    await touch.drag([pointAt(0.3), pointAt(0.6)], [pointAt(0.4), pointAt(0.7)]);
    const moved = await zoom();
    assert.ok(moved[0] < zoomed[0] - 5, `${zoomed} then ${moved}`);
    // Two fingers that approach each other zoom out.
    await touch.drag([pointAt(0.1), pointAt(0.9)], [pointAt(0.45), pointAt(0.55)]);
    await until("all steps are shown", async () => (await zoom()) === null);

    await touch.drag([pointAt(0.4), pointAt(0.6)], [pointAt(0.2), pointAt(0.8)]);
    await until("the chart is zoomed again", zoom);
    // A double tap must take less than a third of a second. A busy machine may be slower, so the double tap is repeated.
    await until("a double tap shows all steps", async () => {
      if ((await zoom()) === null) return true;
      await touch.tap(...pointAt(0.5));
      await touch.tap(...pointAt(0.5));
      return false;
    });
  });

  test("zooms by a drag after a long press, and moves the crosshair by a drag without a long press", async () => {
    const { page, touch, zoom, pointAt } = await open();
    await touch.down(...pointAt(0.3));
    await touch.move(...pointAt(0.5));
    await until("the tooltip shows the values at the finger", async () => /step (1[5-9]|2[0-4])\d/.test(await page.locator("#loss-chart .tip").textContent()));
    await touch.up();
    assert.equal(await zoom(), null);
    await touch.drag([pointAt(0.3)], [pointAt(0.6)], { hold: LONG_PRESS_MS });
    const zoomed = await until("the chart is zoomed", zoom);
    assert.ok(zoomed[0] > STEPS * 0.15 && zoomed[1] < STEPS * 0.75, `${zoomed}`);
    // A long press without a drag has no effect.
    await touch.down(...pointAt(0.5));
    await new Promise((done) => setTimeout(done, LONG_PRESS_MS));
    await touch.up();
    assert.deepEqual(await zoom(), zoomed);
  });

  test("does not prevent scrolling of the page", async () => {
    const { page, touch, box, zoom } = await open(), scrolled = () => page.evaluate(() => scrollY), before = await scrolled();
    const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
    await touch.drag([[x, y]], [[x, y - 200]]);
    await until("the page has scrolled", async () => (await scrolled()) > before + 50);
    assert.equal(await zoom(), null);
  });
});

describe("jobs compared on a touch screen", () => {
  const selected = (page) => page.evaluate(() => [...window.lockstep.selection.ids()].map((id) => window.lockstep.jobs().find((j) => j.id === id).name).sort().join());
  async function open() {
    const page = await browser.page(server, `/compare?jobs=${jobIds.join(",")}&scatter-x=train.lr&scatter-y=result%3Aloss`, TABLET);
    await until("the charts are drawn", () => page.evaluate(() => document.querySelectorAll("#parallel .job").length === 3 && document.getElementById("scatter").dataset.points === "3"));
    return { page, touch: await touchInput(page) };
  }

  test("are selected by a drag along an axis of the parallel coordinates", async () => {
    const { page, touch } = await open(), axis = page.locator('#parallel [data-axis="train.lr"]'), box = await scrollToCenter(axis);
    const middle = box.x + box.width / 2;
    await touch.drag([[middle, box.y + 10]], [[middle, box.y + box.height * 0.4]]);
    await until("the job with the highest learning rate is selected", async () => (await selected(page)) === "fast");
    const boxNow = await scrollToCenter(axis);
    await touch.tap(boxNow.x + boxNow.width / 2, boxNow.y + boxNow.height / 2);
    await until("a tap on the axis removes the brush", async () => (await selected(page)) === "fast,slow,wild");
  });

  test("are selected in the scatter plot by a drag after a long press", async () => {
    const { page, touch } = await open(), scatter = page.locator("#scatter"), box = await scrollToCenter(scatter);
    assert.match(await page.locator("#scatter-note").textContent(), /^hold, then drag/);
    const pointAt = (x, y) => [box.x + x * box.width, box.y + y * box.height], scrolled = () => page.evaluate(() => scrollY);
    // The loss axis is reversed: a low loss is at the top.
    await touch.drag([pointAt(0.6, 0.05)], [pointAt(0.99, 0.4)], { hold: LONG_PRESS_MS });
    await until("the job at the top right is selected", async () => (await selected(page)) === "fast");
    assert.ok(Math.abs((await scatter.boundingBox()).y - box.y) < 20, "the page has not scrolled");
    await page.getByRole("button", { name: "Clear", exact: true }).tap();
    await until("all are selected", async () => (await selected(page)) === "fast,slow,wild");
    const boxNow = await scrollToCenter(scatter), before = await scrolled();
    await touch.drag([[boxNow.x + boxNow.width / 2, boxNow.y + boxNow.height / 2]], [[boxNow.x + boxNow.width / 2, boxNow.y + boxNow.height / 2 + 150]]);
    await until("without a long press the page scrolls", async () => (await scrolled()) < before - 30);
    assert.equal(await selected(page), "fast,slow,wild");
  });
});

describe("a panel's size", () => {
  const sizes = async () => (await server.ask(`/jobs/${jobIds[0]}/panels`)).panels.map(({ title, columns, rows }) => `${title} ${columns}x${rows}`).join();
  const saveThreePanels = () => server.ask(`/jobs/${jobIds[0]}/panels`, { panels: ["a", "b", "c"].map((title) => ({ title, metrics: ["loss"] })) }, "PUT");
  const grip = (page, title) => page.getByRole("button", { name: new RegExp(`^Size of ${title}:`) });
  const card = (page, title) => page.getByRole("region", { name: title, exact: true });
  async function open(options = {}) {
    const page = await browser.page(server, `/jobs/${jobIds[0]}`, options);
    await until("the job's panels are drawn", async () => (await page.locator("#custom-grid .chart[data-drawn]:not([data-drawn='0'])").count()) === 3);
    return page;
  }
  /** Returns the width of a panel in percent of the grid's width, and its height in pixels. */
  const panelSize = async (page, title) => { const panel = await card(page, title).boundingBox(), grid = await page.locator("#custom-grid").boundingBox(); return [Math.round(100 * panel.width / grid.width), Math.round(panel.height)]; };

  test("is changed by dragging with the mouse, stored with the job, and shown to other people", async () => {
    await saveThreePanels();
    const page = await open(), [, heightBefore] = await panelSize(page, "a"), grid = await page.locator("#custom-grid").boundingBox();
    let from = await scrollToCenter(grip(page, "a"));
    const to = { x: from.x + grid.width / 3, y: from.y + 180 };
    await page.mouse.move(from.x + 8, from.y + 8);
    await page.mouse.down();
    await page.mouse.move(to.x, to.y, { steps: 8 });
    const [width, height] = await panelSize(page, "a");
    assert.ok(Math.abs(width - 67) <= 1 && Math.abs(height - heightBefore - 170) <= 2, `during the drag, the panel is ${width} % wide and ${height} pixels high (${heightBefore} before)`);
    assert.equal(await sizes(), "a 1x1,b 1x1,c 1x1", "nothing is stored yet");
    await page.mouse.up();
    await until("the size is stored", async () => (await sizes()) === "a 2x2,b 1x1,c 1x1");
    await until("the note names the size", async () => (await page.locator("#custom-note").textContent()) === "Panel a: two thirds of the page wide, medium height.");
    // A panel at the right edge grows when its handle is dragged beyond the edge.
    from = await scrollToCenter(grip(page, "b"));
    await page.mouse.move(from.x + 8, from.y + 8);
    await page.mouse.down();
    await page.mouse.move(grid.x + grid.width + 12, from.y + 8, { steps: 4 });
    await page.mouse.up();
    await until("the panel is one column wider", async () => (await sizes()) === "a 2x2,b 2x1,c 1x1");
    const stranger = await open();
    for (const [title, width] of [["a", 67], ["b", 67], ["c", 33]]) assert.ok(Math.abs((await panelSize(stranger, title))[0] - width) <= 1, title);
    await stranger.end();
    // The form has the new size, and the chart is drawn at its new width.
    await page.getByRole("button", { name: "Edit a", exact: true }).click();
    assert.deepEqual(await page.locator("#panel-columns, #panel-rows").evaluateAll((all) => all.map((select) => select.value)), ["2", "2"]);
    await page.keyboard.press("Escape");
    assert.ok(await card(page, "a").evaluate((node) => Math.abs(node.querySelector("canvas").width - node.querySelector(".chart").clientWidth) <= 1));
  });

  test("is changed by arrow keys, within its limits", async () => {
    await saveThreePanels();
    const page = await open();
    await grip(page, "b").focus();
    for (const key of ["ArrowRight", "ArrowRight", "ArrowRight", "ArrowDown"]) await page.keyboard.press(key);
    await until("the size is stored", async () => (await sizes()) === "a 1x1,b 3x2,c 1x1");
    assert.equal(await page.evaluate(() => document.activeElement.getAttribute("aria-label")), "Size of b: all of the page wide, medium height. Arrow keys change it.");
    for (const key of ["ArrowUp", "ArrowUp", "ArrowLeft"]) await page.keyboard.press(key);
    await until("the smaller size is stored", async () => (await sizes()) === "a 1x1,b 2x1,c 1x1");
  });

  test("is changed by touch, on a phone only the height", async () => {
    for (const [options, expected] of [[TABLET, "a 2x3,b 1x1,c 1x1"], [{ viewport: { width: 390, height: 844 }, hasTouch: true, isMobile: true }, "a 1x3,b 1x1,c 1x1"]]) {
      await saveThreePanels();
      const page = await open(options), touch = await touchInput(page), from = await scrollToCenter(grip(page, "a")), before = await page.evaluate(() => scrollY);
      const start = [from.x + from.width / 2, from.y + from.height / 2];
      await touch.drag([start], [[Math.min(start[0] + 330, options.viewport.width - 2), start[1] + 330]]);
      await until("the size is stored", async () => (await sizes()) === expected || Promise.reject(new Error(await sizes())));
      assert.equal(await page.evaluate(() => scrollY), before, "the page has not scrolled");
      await assertFits(page, `${options.viewport.width}`);
      await assertAccessible(page, `${options.viewport.width}`);
      await savePicture(page, `panels-${options.viewport.width}`);
      // The size of a cancelled drag is not stored.
      const gripBox = await scrollToCenter(grip(page, "a"));
      await touch.down(gripBox.x + 12, gripBox.y + 12);
      await touch.move(gripBox.x + 12, gripBox.y - 320);
      await touch.cancel();
      await until("the panel has its previous size", async () => (await card(page, "a").getAttribute("data-rows")) === "3");
      assert.equal(await sizes(), expected);
      await page.end();
    }
  });

  test("is restored when the server refuses the change", async () => {
    await saveThreePanels();
    const page = await open({ expectedErrors: [/503|Failed to load/] });
    await page.route("**/panels", (route) => (route.request().method() === "PUT" ? route.fulfill({ status: 503, contentType: "application/problem+json", body: JSON.stringify({ detail: "the database is away" }) }) : route.continue()));
    await grip(page, "a").focus();
    await page.keyboard.press("ArrowRight");
    await until("the note shows the server's error", async () => (await page.locator("#custom-note").textContent()) === "the database is away");
    assert.equal(await card(page, "a").getAttribute("data-columns"), "1");
    assert.equal(await sizes(), "a 1x1,b 1x1,c 1x1");
  });
});
