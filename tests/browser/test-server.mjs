// The real binary with a data directory of its own, and a real Chromium that watches itself: an error on
// a page's console, or a request that leaves the server, fails the test.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { mkdtemp, readdir, readFile, rm } from "node:fs/promises";
import { createServer } from "node:net";
import { setPriority, tmpdir } from "node:os";
import { dirname, join, resolve } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";
import { chromium } from "playwright-core";

export const ROOT = resolve(dirname(fileURLToPath(import.meta.url)), "../..");
export const BINARY = process.env.LOCKSTEP_BIN ?? join(ROOT, "target/debug/lockstep");
export const CHROMIUM = process.env.CHROMIUM ?? "/usr/bin/chromium";
export const CHROMIUM_ARGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync", "--disable-software-rasterizer", "--disable-smooth-scrolling"];
const PATIENCE_MS = 120_000;

export const IS_FULL = process.env.LOCKSTEP_FULL !== undefined;
/** A test that only `npm run full` runs: of a detail, of a rare layout, of what a quick test elsewhere covers as well. */
export const inFull = IS_FULL ? test : () => {};

/** Waits until `check` answers something true, and answers that; says what it waited for when it does not. Asks less often the longer it takes. */
export async function until(what, check, patience = PATIENCE_MS) {
  const end = Date.now() + patience;
  let last, pause = 20;
  for (;;) {
    try { const found = await check(); if (found) return found; last = found; } catch (error) { last = error; }
    if (Date.now() > end) assert.fail(`${what}: not within ${patience / 1000} s; last: ${last?.stack ?? JSON.stringify(last)}`);
    await new Promise((done) => setTimeout(done, pause));
    pause = Math.min(pause * 1.3, 200);
  }
}

// Files are tested at the same time, by processes whose numbers are neighbours.
let ports = process.pid * 101;
/** A port that nothing listens on, outside the range from which the system gives ports to clients: a server that is started again has it still. */
export const freePort = () => new Promise((done, failed) => {
  const attempt = (left) => {
    const port = 21_000 + (ports++ % 10_000), server = createServer();
    server.once("error", (error) => (left ? attempt(left - 1) : failed(error))).listen(port, "127.0.0.1", () => server.close(() => done(port)));
  };
  attempt(1000);
});

/** A running server, its dataset registered. */
export class TestServer {
  /** Without an agent the tests make one up, in a page, and such a server asks nobody for a token unless `auth` says so. `dir`: a data
   *  directory that there is; `close` removes it. */
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

  /** How the tests' own requests go. */
  fetch(url, options) { return fetch(url, options); }

  async start() {
    this.process = spawn(BINARY, ["serve", "--listen", `127.0.0.1:${this.port}`, "--data-dir", this.dir, ...(this.agent ? ["--cpu-slots", String(this.slots)] : ["--no-local-agent"]), ...(this.auth ? [] : ["--no-auth"]), ...this.options],
      // A job that lasts until the test ends it sleeps for 40 ms in each step, and leaves the processors to the pages.
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
      await until("its machine has joined", async () => (await this.ask("/agents")).agents.some((a) => a.online));
      await this.yieldToBrowser();
    }
  }

  /** Ranks take all cores, and inherit the priority of the agent's threads: pages and the server go first. */
  async yieldToBrowser() {
    const { pid } = this.process;
    // After a crash the machine is still online by its old agent when the server has not started the new one yet.
    const [agent] = await until("the server has started its agent", async () => {
      // Any thread of the server may have started it.
      const threads = await readdir(`/proc/${pid}/task`);
      const children = await Promise.all(threads.map((thread) => readFile(`/proc/${pid}/task/${thread}/children`, "utf8").catch(() => "")));
      return children.join(" ").match(/\d+/);
    });
    for (const thread of await readdir(`/proc/${agent}/task`)) try { setPriority(Number(thread), 5); } catch { /* it has ended */ }
  }

  async ask(path, body) {
    const answer = await this.fetch(`${this.url}/api/v1${path}`, body === undefined ? { headers: this.headers }
      : { method: "POST", headers: { ...this.headers, "content-type": "application/json" }, body: JSON.stringify(body) });
    const content = await answer.json();
    assert.ok(answer.ok, `${path}: ${answer.status} ${JSON.stringify(content)}`);
    return content;
  }

  register() { return this.ask("/datasets", { name: "fashion-mnist", path: join(ROOT, "assets/fashion-mnist") }); }

  /** A small job: `train` and the rest are laid over it. Its pictures are small too, so that it takes little of the processors. */
  spec({ name = "small", train = {}, data = {}, ranks = 2, ...rest } = {}) {
    return {
      name, model: { arch: "resnet20" },
      data: { dataset: "fashion-mnist", validation: 0.02, image_size: 8, ...data },
      train: { steps: 40, batch_size: 8, lr: 0.05, ...train }, parallel: { ranks, device: "cpu" }, ...rest,
    };
  }

  submit(changes) { return this.ask("/jobs", this.spec(changes)); }

  job(id) { return this.ask(`/jobs/${id}`); }

  /** At once, as a crash would: ranks and the agent live on. */
  async crash() {
    this.process.kill("SIGKILL");
    await this.ended;
  }

  async close() {
    this.process.kill("SIGTERM");
    let timer;
    await Promise.race([this.ended, new Promise((done) => { timer = setTimeout(done, 20_000); })]);
    clearTimeout(timer);
    // Whatever still runs in this directory, should an orderly stop have missed it.
    for (const pid of (await readdir("/proc")).filter((name) => /^\d+$/.test(name))) {
      const command = await readFile(`/proc/${pid}/cmdline`, "utf8").catch(() => "");
      if (command.includes(this.dir) && Number(pid) !== process.pid) try { process.kill(Number(pid), "SIGKILL"); } catch { /* gone */ }
    }
    await rm(this.dir, { recursive: true, force: true, maxRetries: 5 });
  }
}

/** A browser whose pages fail the test for what they should not do. */
export class Browser {
  static async open() {
    const browser = new Browser();
    browser.chromium = await chromium.launch({
      executablePath: CHROMIUM,
      args: CHROMIUM_ARGS,
    });
    return browser;
  }

  /** A page at `path`. `expected`: console errors that the test provokes, such as an answer of 422. */
  async page(server, path, { expected = [], ...options } = {}) {
    const context = await this.chromium.newContext({ viewport: { width: 1440, height: 1000 }, reducedMotion: "reduce", ...options });
    // To try a change of a script or a style without building: they come from the tree.
    if (process.env.LOCKSTEP_STATIC) {
      await context.route("**/static/**", (route) => {
        const path = new URL(route.request().url()).pathname.replace(/\/v-[^/]+/, ""), page = path.match(/\/all\/(.*)$/)?.[1];
        if (!page) return route.fulfill({ path: join(ROOT, path) });
        return route.fulfill({ contentType: "text/javascript", body: `import "/static/keys.js";\nimport "/static/${page}";\n` });
      });
    }
    if (server.token) {
      // The context has the cookie from then on, its pages and their sockets with it.
      const { url } = await server.ask("/login-links", {});
      await context.request.get(url, { maxRedirects: 0 });
    }
    // Another browser or a compiler may take both cores. An element that has gone is looked for less long than `until` waits, which asks again.
    context.setDefaultTimeout(PATIENCE_MS / 4);
    context.setDefaultNavigationTimeout(PATIENCE_MS);
    const page = await context.newPage();
    page.faults = [];
    this.watch(page, server, expected);
    page.tab = async (at) => { const tab = await context.newPage(); tab.faults = page.faults; this.watch(tab, server, expected); await tab.goto(server.url + at); return tab; };
    page.end = async () => { await context.close(); assert.deepEqual(page.faults, [], "what pages did wrong"); };
    await page.goto(server.url + path);
    return page;
  }

  watch(page, server, expected) {
    const fault = (what) => { if (!expected.some((e) => e.test(what))) page.faults.push(what); };
    page.on("console", (m) => { if (m.type() === "error" || m.type() === "warning") fault(`console: ${m.text()} ${m.location().url}`); });
    page.on("pageerror", (error) => fault(`error: ${error.stack}`));
    page.on("request", (r) => { if (!r.url().startsWith(`${server.url}/`) && !r.url().startsWith("data:")) fault(`request to ${r.url()}`); });
    page.on("websocket", (w) => { if (new URL(w.url()).host !== new URL(server.url).host) fault(`socket to ${w.url()}`); });
  }

  close() { return this.chromium.close(); }
}

const PASSWORD = "a password of ten letters";

/** Makes a person with this role, and signs it in by its password in a browser's context. */
export async function signIn(context, server, role) {
  const name = `${role}-${Date.now()}`;
  await server.ask("/people", { name, role, password: PASSWORD });
  const answer = await context.request.post(`${server.url}/login`, { form: { name, password: PASSWORD }, headers: { origin: server.url }, maxRedirects: 0 });
  assert.equal(answer.status(), 303, `signing in as ${role}`);
}

/** What the loss chart holds: `{ "rank 0": { points, step, value }, ... }`, over all attempts. */
export const losses = (page) => page.evaluate(() => {
  const found = {};
  for (const { label, points, step, value, attempt } of window.lockstep?.charts.loss.snapshot() ?? []) {
    const line = (found[label] ??= { points: 0 });
    Object.assign(line, { points: line.points + points, step, value, attempt });
  }
  return found;
});

/** Pixels of the loss chart in each rank's colour. */
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

export const state = (page) => page.locator("#state").textContent();
