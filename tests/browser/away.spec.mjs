// A machine that went away and does not come back: taken off the page. And what the page says to whoever brings another one.

import assert from "node:assert/strict";
import { execFileSync, spawn } from "node:child_process";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { dirname, join as path } from "node:path";
import { after, before, describe, test } from "node:test";
import { join } from "./agent.mjs";
import { clean, isSound } from "./looks.mjs";
import { BINARY, Browser, TestServer, until } from "./test-server.mjs";

let server, browser, agent;
before(async () => {
  [server, browser] = await Promise.all([TestServer.open({ dataset: false, agent: false }), Browser.open()]);
  agent = await join(browser.chromium, server, 2);
});
after(async () => { await browser?.close(); await server?.close(); });

describe("machines", () => {
  test("are removed by those who may, once they are away, after a question", async () => {
    const page = await browser.page(server, "/machines"), card = page.locator(".machine"), remove = page.getByRole("button", { name: "Remove made-up" });
    await until("it is online", async () => /online/.test(await card.locator(".pill").first().textContent()));
    assert.equal(await remove.count(), 0, "one that is there is not removed");
    await agent.close();
    await until("it is away", () => remove.isVisible());
    await isSound(page, "a machine that is away");
    await remove.focus();
    await remove.press("Enter");
    const dialog = page.getByRole("dialog", { name: "Remove made-up?" });
    await clean(page, "the question");
    await dialog.getByRole("button", { name: "Keep it" }).click();
    assert.equal(await card.count(), 1);
    await remove.click();
    await dialog.getByRole("button", { name: "Remove it" }).click();
    await until("it is gone", async () => (await card.count()) === 0);
    await until("the page says so", () => page.getByRole("heading", { name: "No machine has joined" }).isVisible());
    assert.deepEqual((await server.ask("/agents")).agents, []);
    await page.end();
  });

  test("join by the commands of the page as they stand there", async () => {
    const own = await TestServer.open({ dataset: false, agent: false, auth: true }), dir = await mkdtemp(path(tmpdir(), "lockstep-joins-"));
    const options = { cwd: dir, env: { ...process.env, PATH: `${dirname(BINARY)}:${process.env.PATH}` } };
    const page = await browser.page(own, "/machines");
    const commands = await page.locator(".join .command code").allTextContents(), create = commands.find((c) => /token create/.test(c)), joins = commands.find((c) => /lockstep agent/.test(c));
    execFileSync("bash", ["-c", create], options);
    const joined = spawn("bash", ["-c", `exec ${joins}`], { ...options, stdio: "ignore" });
    const card = page.locator(".machine", { hasText: "node-1" });
    await until("it is online on the page that is open", async () => /online/.test(await card.locator(".pill").first().textContent()));
    const over = new Promise((done) => joined.once("exit", done));
    joined.kill("SIGTERM");
    await over;
    await page.end();
    await own.close();
    await rm(dir, { recursive: true, force: true });
  });

  test("that join are told of --advertise, and by no address that leads elsewhere", async () => {
    const page = await browser.page(server, "/machines"), join = page.locator(".join");
    assert.match(await join.innerText(), /no other machine reaches it/);
    assert.match(await join.innerText(), /--advertise ADDRESS/);
    assert.match(await join.innerText(), new RegExp(`lockstep serve --listen 0\\.0\\.0\\.0:${server.port} --tls-own-ca`));
    await page.end();
  });
});
