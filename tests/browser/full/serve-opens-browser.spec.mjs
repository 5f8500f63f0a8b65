// `lockstep serve` on a terminal opens a file in the browser. The file leads to the dashboard and signs the browser in.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { chmod, mkdir, mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { BINARY, Browser, freePort, until } from "../test-server.mjs";

test("the file that serve opens in a browser signs the browser in", async (t) => {
  const dir = await mkdtemp(join(tmpdir(), "lockstep-browser-")), port = await freePort();
  t.after(() => rm(dir, { recursive: true, force: true, maxRetries: 5 }));
  await mkdir(join(dir, "bin"));
  await writeFile(join(dir, "bin/xdg-open"), `#!/bin/sh\nprintf %s "$1" > '${dir}/part' && mv '${dir}/part' '${dir}/opened'\n`);
  await chmod(join(dir, "bin/xdg-open"), 0o755);
  // `script` gives the server a terminal. With exec, the server is a direct child of `script`.
  const command = `exec ${BINARY} serve --no-local-agent --listen 127.0.0.1:${port} --data-dir ${join(dir, "data")}`;
  const script = spawn("script", ["-qefc", command, "/dev/null"], {
    stdio: "ignore", env: { ...process.env, SHELL: "/bin/sh", PATH: `${join(dir, "bin")}:${process.env.PATH}`, DISPLAY: ":0" },
  });
  const ended = new Promise((done) => script.once("exit", done));
  t.after(async () => {
    const [server] = (await readFile(`/proc/${script.pid}/task/${script.pid}/children`, "utf8").catch(() => "")).trim().split(" ");
    process.kill(Number(server) || script.pid, "SIGTERM");
    await ended;
  });
  const file = await until("a browser is opened", () => readFile(join(dir, "opened"), "utf8"));
  const browser = await Browser.open();
  t.after(() => browser.close());
  const page = await (await browser.chromium.newContext()).newPage();
  await page.goto(`file://${file}`);
  await page.waitForURL(`http://127.0.0.1:${port}/jobs`);
  assert.match(await page.title(), /Jobs/);
  assert.equal(await page.evaluate(() => document.referrer), "", "the file's path is not sent as the referrer");
  await until("the file is removed", () => readFile(file).then(() => false, (error) => error.code === "ENOENT"));
  // The browser stays signed in.
  await page.reload();
  assert.equal(page.url(), `http://127.0.0.1:${port}/jobs`);
});
