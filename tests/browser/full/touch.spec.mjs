// Fingers and arrow keys: charts, the scatter plot and the parallel coordinates are brushed by touch, and panels are sized by mouse,
// finger and keyboard. The agent is made up, so nothing waits for training.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { join, spec } from "../agent.mjs";
import { clean, fits, picture } from "../looks.mjs";
import { Browser, TestServer, losses, until as patiently } from "../test-server.mjs";

/** Nothing here waits for training. */
const until = (what, check) => patiently(what, check, 30_000);
const STEPS = 400, TABLET = { viewport: { width: 1024, height: 900 }, hasTouch: true, isMobile: true };
/** A finger rests longer than static/chart/hold.js wants. */
const REST_MS = 1500;
let server, browser;
const made = [];
before(async () => {
  [server, browser] = await Promise.all([TestServer.open({ dataset: false, agent: false }), Browser.open()]);
  const agent = await join(browser.chromium, server, 3);
  for (const [name, lr, loss] of [["fast", 0.4, 1], ["slow", 0.1, 3], ["wild", 0.2, 5]]) {
    const body = spec(name, 1, 1000);
    body.train.lr = lr;
    const { id } = await server.ask("/jobs", body);
    await agent.evaluate(async ([id, last, loss]) => {
      const attempt = await window.it.attempt(id), steps = Array.from({ length: last }, (_, i) => i + 1);
      await window.it.report(attempt, 0, [{ type: "running", total_steps: 1000, steps_per_epoch: 100, start_step: 0 },
        { type: "metrics", rank: 0, columns: [{ name: "loss", steps, values: steps.map((s) => loss + 1 / s) }, { name: "lr", steps, values: steps.map(() => 0.1) }] }]);
    }, [id, STEPS, loss]);
    made.push(id);
  }
});
after(async () => { await browser?.close(); await server?.close(); });

/** Fingers on a page, as a touch screen reports them. */
async function fingers(page) {
  const tools = await page.context().newCDPSession(page);
  const send = (type, ...points) => tools.send("Input.dispatchTouchEvent", { type, touchPoints: points.map(([x, y], id) => ({ x, y, id })) });
  const steps = (from, to) => Array.from({ length: 6 }, (_, i) => from.map(([x, y], n) => [x + (to[n][0] - x) * (i + 1) / 6, y + (to[n][1] - y) * (i + 1) / 6]));
  return {
    /** All of them from places to places; `rest`: they rest before. */
    async drag(from, to, { rest = 0 } = {}) {
      await send("touchStart", ...from);
      if (rest) await new Promise((done) => setTimeout(done, rest));
      for (const points of steps(from, to)) await send("touchMove", ...points);
      await send("touchEnd");
    },
    async tap(...at) { await send("touchStart", at); await send("touchEnd"); },
    down: (...at) => send("touchStart", at), move: (...at) => send("touchMove", at), up: () => send("touchEnd"), cancel: () => send("touchCancel"),
  };
}
/** Where something is, in the middle of the screen. */
async function box(locator) {
  await locator.evaluate((node) => node.scrollIntoView({ block: "center" }));
  return locator.boundingBox();
}

describe("a chart under fingers", () => {
  /** The job's page on a touch screen, drawn. */
  async function open() {
    const page = await browser.page(server, `/jobs/${made[0]}`, TABLET);
    await until("it is drawn", async () => (await losses(page))["rank 0"]?.points === STEPS && (await page.evaluate(() => window.lockstep.charts.loss.firstDrawnAt > 0)));
    const at = await box(page.locator("#loss-chart")), touch = await fingers(page);
    return { page, touch, zoom: () => page.evaluate(() => window.lockstep.view.zoom), place: (share) => [at.x + at.width * share, at.y + at.height / 2], at };
  }

  test("is zoomed by two of them to what they hold, and shown whole by two taps", async () => {
    const { page, touch, zoom, place } = await open();
    const under = (pixels) => page.evaluate((p) => window.lockstep.charts.loss.x.from(p), pixels);
    const left = await page.locator("#loss-chart").evaluate((node) => node.getBoundingClientRect().left);
    const held = [await under(place(0.4)[0] - left), await under(place(0.6)[0] - left)];
    await touch.drag([place(0.4), place(0.6)], [place(0.2), place(0.8)]);
    const found = await until("it is zoomed", zoom);
    assert.ok(found[1] - found[0] < STEPS * 0.5 && found[0] < held[0] && found[1] > held[1], `${found} around ${held}`);
    await until("what they held is under them", async () => Math.abs((await under(place(0.2)[0] - left)) - held[0]) < STEPS / 50 && Math.abs((await under(place(0.8)[0] - left)) - held[1]) < STEPS / 50);
    // Together they move what is between them.
    await touch.drag([place(0.3), place(0.6)], [place(0.4), place(0.7)]);
    const moved = await zoom();
    assert.ok(moved[0] < found[0] - 5, `${found} then ${moved}`);
    // And put together they show more.
    await touch.drag([place(0.1), place(0.9)], [place(0.45), place(0.55)]);
    await until("all is shown", async () => (await zoom()) === null);

    await touch.drag([place(0.4), place(0.6)], [place(0.2), place(0.8)]);
    await until("it is zoomed again", zoom);
    // Two within a third of a second: a busy machine may take longer to tap.
    await until("two taps show all", async () => {
      if ((await zoom()) === null) return true;
      await touch.tap(...place(0.5));
      await touch.tap(...place(0.5));
      return false;
    });
    await page.end();
  });

  test("is zoomed by one that rests before it moves; one that moves at once takes the crosshair along", async () => {
    const { page, touch, zoom, place } = await open();
    await touch.down(...place(0.3));
    await touch.move(...place(0.5));
    await until("the values there are told", async () => /step (1[5-9]|2[0-4])\d/.test(await page.locator("#loss-chart .tip").textContent()));
    await touch.up();
    assert.equal(await zoom(), null);
    await touch.drag([place(0.3)], [place(0.6)], { rest: REST_MS });
    const found = await until("it is zoomed", zoom);
    assert.ok(found[0] > STEPS * 0.15 && found[1] < STEPS * 0.75, `${found}`);
    // A rest alone does nothing.
    await touch.down(...place(0.5));
    await new Promise((done) => setTimeout(done, REST_MS));
    await touch.up();
    assert.deepEqual(await zoom(), found);
    await page.end();
  });

  test("lets the page scroll", async () => {
    const { page, touch, at, zoom } = await open(), scrolled = () => page.evaluate(() => scrollY), before = await scrolled();
    const [x, y] = [at.x + at.width / 2, at.y + at.height / 2];
    await touch.drag([[x, y]], [[x, y - 200]]);
    await until("it has scrolled", async () => (await scrolled()) > before + 50);
    assert.equal(await zoom(), null);
    await page.end();
  });
});

describe("jobs compared under fingers", () => {
  const selected = (page) => page.evaluate(() => [...window.lockstep.selection.ids()].map((id) => window.lockstep.jobs().find((j) => j.id === id).name).sort().join());
  async function open() {
    const page = await browser.page(server, `/compare?jobs=${made.join(",")}&scatter-x=train.lr&scatter-y=result%3Aloss`, TABLET);
    await until("all is drawn", () => page.evaluate(() => document.querySelectorAll("#parallel .job").length === 3 && document.getElementById("scatter").dataset.points === "3"));
    return { page, touch: await fingers(page) };
  }

  test("are selected along an axis of the parallel coordinates", async () => {
    const { page, touch } = await open(), axis = page.locator('#parallel [data-axis="train.lr"]'), at = await box(axis);
    const middle = at.x + at.width / 2;
    await touch.drag([[middle, at.y + 10]], [[middle, at.y + at.height * 0.4]]);
    await until("the fastest is selected", async () => (await selected(page)) === "fast");
    const now = await box(axis);
    await touch.tap(now.x + now.width / 2, now.y + now.height / 2);
    await until("a tap on the axis takes the brush away", async () => (await selected(page)) === "fast,slow,wild");
    await page.end();
  });

  test("are selected in the scatter plot by a finger that rests first", async () => {
    const { page, touch } = await open(), scatter = page.locator("#scatter"), at = await box(scatter);
    assert.match(await page.locator("#scatter-note").textContent(), /^hold, then drag/);
    const place = (x, y) => [at.x + x * at.width, at.y + y * at.height], scrolled = () => page.evaluate(() => scrollY);
    await touch.drag([place(0.6, 0.05)], [place(0.99, 0.4)], { rest: REST_MS });
    await until("what lies at the right above, where low losses are, is selected", async () => (await selected(page)) === "fast");
    assert.ok(Math.abs((await scatter.boundingBox()).y - at.y) < 20, "the page has stayed where it was");
    await page.getByRole("button", { name: "Clear", exact: true }).tap();
    await until("all are selected", async () => (await selected(page)) === "fast,slow,wild");
    const again = await box(scatter), before = await scrolled();
    await touch.drag([[again.x + again.width / 2, again.y + again.height / 2]], [[again.x + again.width / 2, again.y + again.height / 2 + 150]]);
    await until("without the rest the page scrolls", async () => (await scrolled()) < before - 30);
    assert.equal(await selected(page), "fast,slow,wild");
    await page.end();
  });
});

describe("a panel's size", () => {
  const sizes = async () => (await server.ask(`/jobs/${made[0]}/panels`)).panels.map(({ title, columns, rows }) => `${title} ${columns}x${rows}`).join();
  const keep = async (panels) => {
    const answer = await fetch(`${server.url}/api/v1/jobs/${made[0]}/panels`, { method: "PUT", headers: { "content-type": "application/json" }, body: JSON.stringify({ panels }) });
    assert.equal(answer.status, 200, await answer.text());
  };
  const three = () => keep(["a", "b", "c"].map((title) => ({ title, metrics: ["loss"] })));
  const grip = (page, title) => page.getByRole("button", { name: new RegExp(`^Size of ${title}:`) });
  const card = (page, title) => page.getByRole("region", { name: title, exact: true });
  async function open(options = {}) {
    const page = await browser.page(server, `/jobs/${made[0]}`, options);
    await until("its panels are drawn", async () => (await page.locator("#custom-grid .chart[data-drawn]:not([data-drawn='0'])").count()) === 3);
    return page;
  }
  /** The width of a panel as a share of the page's, and its height. */
  const measured = async (page, title) => { const one = await card(page, title).boundingBox(), all = await page.locator("#custom-grid").boundingBox(); return [Math.round(100 * one.width / all.width), Math.round(one.height)]; };

  test("follows the mouse, is kept with the job, and shown to others", async () => {
    await three();
    const page = await open(), [, low] = await measured(page, "a"), all = await page.locator("#custom-grid").boundingBox();
    let from = await box(grip(page, "a"));
    const to = { x: from.x + all.width / 3, y: from.y + 180 };
    await page.mouse.move(from.x + 8, from.y + 8);
    await page.mouse.down();
    await page.mouse.move(to.x, to.y, { steps: 8 });
    const [wide, high] = await measured(page, "a");
    assert.ok(Math.abs(wide - 67) <= 1 && Math.abs(high - low - 170) <= 2, `while it is dragged: ${wide} % and ${high} after ${low}`);
    assert.equal(await sizes(), "a 1x1,b 1x1,c 1x1", "nothing is stored yet");
    await page.mouse.up();
    await until("it is stored", async () => (await sizes()) === "a 2x2,b 1x1,c 1x1");
    await until("it is said", async () => (await page.locator("#custom-note").textContent()) === "a is two thirds of the page wide, medium.");
    // One at the right edge grows when it is pulled beyond it.
    from = await box(grip(page, "b"));
    await page.mouse.move(from.x + 8, from.y + 8);
    await page.mouse.down();
    await page.mouse.move(all.x + all.width + 12, from.y + 8, { steps: 4 });
    await page.mouse.up();
    await until("by one", async () => (await sizes()) === "a 2x2,b 2x1,c 1x1");
    const stranger = await open();
    for (const [title, wide] of [["a", 67], ["b", 67], ["c", 33]]) assert.ok(Math.abs((await measured(stranger, title))[0] - wide) <= 1, title);
    await stranger.end();
    // The form knows it, and a chart as wide as it is now is drawn as wide.
    await page.getByRole("button", { name: "Edit a", exact: true }).click();
    assert.deepEqual(await page.locator("#panel-columns, #panel-rows").evaluateAll((all) => all.map((select) => select.value)), ["2", "2"]);
    await page.keyboard.press("Escape");
    assert.ok(await card(page, "a").evaluate((node) => Math.abs(node.querySelector("canvas").width - node.querySelector(".chart").clientWidth) <= 1));
    await page.end();
  });

  test("follows arrow keys, between its ends", async () => {
    await three();
    const page = await open();
    await grip(page, "b").focus();
    for (const key of ["ArrowRight", "ArrowRight", "ArrowRight", "ArrowDown"]) await page.keyboard.press(key);
    await until("it is stored", async () => (await sizes()) === "a 1x1,b 3x2,c 1x1");
    assert.equal(await page.evaluate(() => document.activeElement.getAttribute("aria-label")), "Size of b: all of the page wide, medium. Arrow keys change it.");
    for (const key of ["ArrowUp", "ArrowUp", "ArrowLeft"]) await page.keyboard.press(key);
    await until("and smaller", async () => (await sizes()) === "a 1x1,b 2x1,c 1x1");
    await page.end();
  });

  test("follows a finger, on a phone the height alone", async () => {
    await three();
    for (const [options, kept] of [[TABLET, "a 2x3,b 1x1,c 1x1"], [{ viewport: { width: 390, height: 844 }, hasTouch: true, isMobile: true }, "a 1x3,b 1x1,c 1x1"]]) {
      await three();
      const page = await open(options), touch = await fingers(page), from = await box(grip(page, "a")), before = await page.evaluate(() => scrollY);
      const start = [from.x + from.width / 2, from.y + from.height / 2];
      await touch.drag([start], [[Math.min(start[0] + 330, options.viewport.width - 2), start[1] + 330]]);
      await until("it is stored", async () => (await sizes()) === kept || Promise.reject(new Error(await sizes())));
      assert.equal(await page.evaluate(() => scrollY), before, "the page has not scrolled");
      await fits(page, `${options.viewport.width}`);
      await clean(page, `${options.viewport.width}`);
      await picture(page, `panels-${options.viewport.width}`);
      // What is taken back is not stored.
      const now = await box(grip(page, "a"));
      await touch.down(now.x + 12, now.y + 12);
      await touch.move(now.x + 12, now.y - 320);
      await touch.cancel();
      await until("it is as it was", async () => (await card(page, "a").getAttribute("data-rows")) === "3");
      assert.equal(await sizes(), kept);
      await page.end();
    }
  });

  test("goes back when the server does not take it", async () => {
    await three();
    const page = await open({ expected: [/503|Failed to load/] });
    await page.route("**/panels", (route) => (route.request().method() === "PUT" ? route.fulfill({ status: 503, contentType: "application/problem+json", body: JSON.stringify({ detail: "the database is away" }) }) : route.continue()));
    await grip(page, "a").focus();
    await page.keyboard.press("ArrowRight");
    await until("it says why", async () => (await page.locator("#custom-note").textContent()) === "the database is away");
    assert.equal(await card(page, "a").getAttribute("data-columns"), "1");
    assert.equal(await sizes(), "a 1x1,b 1x1,c 1x1");
    await page.end();
  });
});
