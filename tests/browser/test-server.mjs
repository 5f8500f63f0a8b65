// Starts the real server with its own data directory, and a real Chromium. A test fails if a page logs an error to
// the console or sends a request to another host.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { mkdtemp, readdir, readFile, rm } from "node:fs/promises";
import { createServer } from "node:net";
import { setPriority, tmpdir } from "node:os";
import { dirname, join, resolve } from "node:path";
import { afterEach, test } from "node:test";
import { fileURLToPath } from "node:url";
import { chromium } from "playwright-core";

export const ROOT = resolve(dirname(fileURLToPath(import.meta.url)), "../..");
export const BINARY = process.env.LOCKSTEP_BIN ?? join(ROOT, "target/debug/lockstep");
export const CHROMIUM = process.env.CHROMIUM ?? "/usr/bin/chromium";
export const CHROMIUM_ARGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync", "--disable-software-rasterizer", "--disable-smooth-scrolling"];
const TIMEOUT_MS = 120_000;

export const IS_FULL = process.env.LOCKSTEP_FULL !== undefined;
/** A test that only `npm run full` runs: of a detail, of a rare layout, or of something that a quick test also covers. */
export const testInFullRun = IS_FULL ? test : () => {};

/** Waits until `check` returns a true value and returns this value. Fails with `what` after `timeout` milliseconds. Polls with growing pauses. */
export async function until(what, check, timeout = TIMEOUT_MS) {
  const end = Date.now() + timeout;
  let last, pause = 20;
  for (;;) {
    try { const value = await check(); if (value) return value; last = value; } catch (error) { last = error; }
    if (Date.now() > end) assert.fail(`${what}: not within ${timeout / 1000} s; last: ${last?.stack ?? JSON.stringify(last)}`);
    await new Promise((done) => setTimeout(done, pause));
    pause = Math.min(pause * 1.3, 200);
  }
}

/** Parts of a job's page (title, buttons, row of numbers, banner) and of the list's rows that the server renders and the script writes again. */
const RENDERED = "#state, #about, .job-title .actions [id], #facts [id]:not([id^=wait]), .own-result, #banner [id]:not(#banner-link), #rows [data-f]:not([data-f=age], [data-f=tags])";
/** Waits until the script shows the same texts as a page that the server renders now. */
export const untilAsRendered = (page) => until("the script shows what the server renders", async () => {
  const [live, rendered] = await page.evaluate(async (parts) => {
    const html = new DOMParser().parseFromString(await (await fetch(location.href)).text(), "text/html");
    return [document, html].map((page) => [...page.querySelectorAll(parts)].map((node) => `${node.id || node.dataset.f}: ${node.hidden ? "hidden" : node.textContent.trim()}`));
  }, RENDERED);
  assert.deepEqual(live, rendered);
  return true;
});

// Test files run in parallel, in processes with neighbouring process ids: their searches begin 101 ports apart.
let nextPort = process.pid * 101;
/** Finds a free port outside the range of ephemeral ports, so that no client takes the port while a server restarts. */
export const freePort = () => new Promise((done, failed) => {
  const tryNext = (triesLeft) => {
    const port = 21_000 + (nextPort++ % 10_000), server = createServer();
    server.once("error", (error) => (triesLeft ? tryNext(triesLeft - 1) : failed(error))).listen(port, "127.0.0.1", () => server.close(() => done(port)));
  };
  tryNext(1000);
});

/** A running server with a registered dataset. */
export class TestServer {
  /** `agent`: whether the server starts an agent; without it, tests simulate one in a page. `auth`: whether the server requires tokens.
   *  `options`: further arguments of `serve`. `dir`: an existing data directory, which `close` removes. */
  static open(options = {}) { return new this().open(options); }

  async open({ dataset = true, agent = true, auth = agent, slots = 2, options = [], dir, port } = {}) {
    Object.assign(this, { agent, auth, slots, options, headers: {} });
    this.dir = dir ?? await mkdtemp(join(tmpdir(), "lockstep-browser-"));
    this.port = port ?? await freePort();
    this.url = `http://127.0.0.1:${this.port}`;
    this.output = "";
    await this.start();
    if (dataset) await this.register();
    return this;
  }

  /** Sends a request of the test itself. The tests of TLS replace this method. */
  fetch(url, options) { return fetch(url, options); }

  async start() {
    this.process = spawn(BINARY, ["serve", "--listen", `127.0.0.1:${this.port}`, "--data-dir", this.dir, ...(this.agent ? ["--cpu-slots", String(this.slots)] : ["--no-local-agent"]), ...(this.auth ? [] : ["--no-auth"]), ...this.options],
      // From step 100 on, ranks sleep for 40 ms in each step (20 ms for each `slow`), so that endless jobs leave the CPU to the pages.
      { stdio: ["ignore", "pipe", "pipe"], env: { LOCKSTEP_FAULT: "step:slow@100,step:slow@100", ...process.env } });
    for (const out of [this.process.stdout, this.process.stderr]) out.on("data", (text) => { this.output += text; });
    this.ended = new Promise((done) => this.process.once("exit", done));
    await until("the server answers", () => this.process.exitCode === null && this.fetch(`${this.url}/readyz`).then((r) => r.ok))
      .catch((error) => { throw new Error(`${error.message}\n${this.output}`); });
    if (this.auth) {
      this.token = (await readFile(join(this.dir, "token"), "utf8")).trim();
      this.headers = { authorization: `Bearer ${this.token}` };
    }
    if (this.agent) {
      await until("the server's machine has joined", async () => (await this.ask("/agents")).agents.some((a) => a.online));
      await this.yieldToBrowser();
    }
  }

  /** Ranks use all cores. They inherit the priority of the agent's threads, which is lowered so that pages and the server run first. */
  async yieldToBrowser() {
    const { pid } = this.process;
    // After a crash, the agent of the crashed server may still count as online before the new server has started its own agent.
    const [agent] = await until("the server has started its agent", async () => {
      // Any thread of the server may have started the agent.
      const threads = await readdir(`/proc/${pid}/task`);
      const children = await Promise.all(threads.map((thread) => readFile(`/proc/${pid}/task/${thread}/children`, "utf8").catch(() => "")));
      return children.join(" ").match(/\d+/);
    });
    for (const thread of await readdir(`/proc/${agent}/task`)) try { setPriority(Number(thread), 5); } catch { /* the thread has ended */ }
  }

  /** Sends a request to the API, and returns the content of the response; null if it has none. Fails on an error status. */
  async ask(path, body, method = body === undefined ? "GET" : "POST") {
    const options = body === undefined ? { headers: this.headers } : { headers: { ...this.headers, "content-type": "application/json" }, body: JSON.stringify(body) };
    const response = await this.fetch(`${this.url}/api/v1${path}`, { method, ...options }), text = await response.text();
    assert.ok(response.ok, `${path}: ${response.status} ${text}`);
    return text ? JSON.parse(text) : null;
  }

  register() { return this.ask("/datasets", { name: "fashion-mnist", path: join(ROOT, "assets/fashion-mnist") }); }

  /** A small job with small pictures, which needs little CPU time. The arguments override its settings. */
  spec({ name = "small", train = {}, data = {}, ranks = 2, ...rest } = {}) {
    return {
      name, model: { arch: "resnet20" },
      data: { dataset: "fashion-mnist", validation: 0.02, image_size: 8, ...data },
      train: { steps: 40, batch_size: 8, lr: 0.05, ...train }, parallel: { ranks, device: "cpu" }, ...rest,
    };
  }

  submit(changes) { return this.ask("/jobs", this.spec(changes)); }

  job(id) { return this.ask(`/jobs/${id}`); }

  /** Kills the server as a crash would: ranks and the agent continue. */
  async crash() {
    this.process.kill("SIGKILL");
    await this.ended;
  }

  async close() {
    this.process.kill("SIGTERM");
    let timer;
    await Promise.race([this.ended, new Promise((done) => { timer = setTimeout(done, 20_000); })]);
    clearTimeout(timer);
    // Kills processes that still use this directory, if the orderly stop has left any.
    for (const pid of (await readdir("/proc")).filter((name) => /^\d+$/.test(name))) {
      const command = await readFile(`/proc/${pid}/cmdline`, "utf8").catch(() => "");
      if (command.includes(this.dir) && Number(pid) !== process.pid) try { process.kill(Number(pid), "SIGKILL"); } catch { /* gone */ }
    }
    await rm(this.dir, { recursive: true, force: true, maxRetries: 5 });
  }
}

/** The open pages of a test, which are closed after it. */
const openPages = new Set();
// Other programs that import this file close their pages themselves.
if (process.argv[1].endsWith(".spec.mjs")) afterEach(async () => { for (const page of openPages) await page.end(); });

/** A browser whose pages fail the test on console errors and requests to other hosts. */
export class Browser {
  static async open() {
    const browser = new Browser();
    browser.chromium = await chromium.launch({ executablePath: CHROMIUM, args: CHROMIUM_ARGS });
    return browser;
  }

  /** Opens a page at `path`. `expectedErrors`: patterns of console errors that the test provokes, such as a response of status 422.
   *  `page.tab(path)` opens a second page of the same session. `page.end()`, which is called after the test,
   *  closes both and fails the test if a page had an error. */
  async page(server, path, { expectedErrors = [], ...options } = {}) {
    const context = await this.chromium.newContext({ viewport: { width: 1440, height: 1000 }, reducedMotion: "reduce", ...options });
    // With LOCKSTEP_STATIC, scripts and styles come from the source tree, so that a change needs no build.
    if (process.env.LOCKSTEP_STATIC) await context.route("**/static/**", (route) => route.fulfill({ path: join(ROOT, new URL(route.request().url()).pathname.replace(/\/v-[^/]+/, "")) }));
    if (server.token) {
      // The context keeps the cookie and sends it with its pages' requests and sockets.
      const { url } = await server.ask("/login-links", {});
      await context.request.get(url, { maxRedirects: 0 });
    }
    // Another browser or a compiler may use both cores. The timeout of a look-up is shorter than that of `until`, which repeats it.
    context.setDefaultTimeout(TIMEOUT_MS / 4);
    context.setDefaultNavigationTimeout(TIMEOUT_MS);
    const page = await context.newPage();
    page.faults = [];
    this.watch(page, server, expectedErrors);
    page.tab = async (path) => { const tab = await context.newPage(); tab.faults = page.faults; this.watch(tab, server, expectedErrors); await tab.goto(server.url + path); return tab; };
    openPages.add(page);
    page.end = async () => { openPages.delete(page); await context.close(); assert.deepEqual(page.faults, [], "the page had no errors"); };
    await page.goto(server.url + path);
    return page;
  }

  watch(page, server, expectedErrors) {
    const fault = (what) => { if (!expectedErrors.some((e) => e.test(what))) page.faults.push(what); };
    page.on("console", (m) => { if (m.type() === "error" || m.type() === "warning") fault(`console: ${m.text()} ${m.location().url}`); });
    page.on("pageerror", (error) => fault(`error: ${error.stack}`));
    page.on("request", (r) => { if (!r.url().startsWith(`${server.url}/`) && !r.url().startsWith("data:")) fault(`request to ${r.url()}`); });
    page.on("websocket", (w) => { if (new URL(w.url()).host !== new URL(server.url).host) fault(`socket to ${w.url()}`); });
  }

  close() { return this.chromium.close(); }
}

const PASSWORD = "a password of ten letters";

/** Creates a person with this role and signs the person in by password in a browser context. */
export async function signIn(context, server, role) {
  const name = `${role}-${Date.now()}`;
  await server.ask("/people", { name, role, password: PASSWORD });
  const response = await context.request.post(`${server.url}/login`, { form: { name, password: PASSWORD }, headers: { origin: server.url }, maxRedirects: 0 });
  assert.equal(response.status(), 303, `signing in as ${role}`);
}

/** Returns the lines of the loss chart, `{ "rank 0": { points, step, value, attempt }, ... }`: the number of points of all attempts, and
 *  the newest point. */
export const losses = (page) => page.evaluate(() => {
  const lines = {};
  for (const { label, points, step, value, attempt } of window.lockstep?.charts.loss.snapshot() ?? []) {
    const line = (lines[label] ??= { points: 0 });
    Object.assign(line, { points: line.points + points, step, value, attempt });
  }
  return lines;
});

/** Counts the pixels of the loss chart in the colours of ranks 0 and 1. */
export const pixels = (page) => page.evaluate(async () => {
  const { palette } = await import("/static/chart/palette.js");
  const canvas = document.querySelector("#loss-chart canvas");
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
  return palette().ranks.slice(0, 2).map((colour) => {
    const [r, g, b] = colour.match(/[\d.]+/g).map(Number);
    let count = 0;
    for (let i = 0; i < data.length; i += 4) {
      if (data[i + 3] > 128 && Math.abs(data[i] - r) + Math.abs(data[i + 1] - g) + Math.abs(data[i + 2] - b) < 48) count++;
    }
    return count;
  });
});

/** Saves the chart in `card` by its menu as `kind`, `PNG`, `SVG` or `CSV`. Returns the content of the file. */
export async function saveChart(page, card, kind) {
  await card.locator("summary", { hasText: "Save" }).click();
  const [file] = await Promise.all([page.waitForEvent("download"), card.getByRole("button", { name: kind, exact: true }).click()]);
  return readFile(await file.path(), kind === "PNG" ? null : "utf8");
}

/** Waits until the stream of a page is live. */
export const untilLive = (page) => until("the page is live", async () => (await page.locator("#live").textContent()) === "live");

/** The job's state, as its page shows it. */
export const state = (page) => page.locator("#state").textContent();
