// The first minutes of somebody new: no job, no dataset, a job file with a mistake, no wish for shortcuts.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { BINARY, Browser, ROOT, TestServer, until } from "../test-server.mjs";

let server, browser;
before(async () => { [server, browser] = await Promise.all([TestServer.open({ dataset: false }), Browser.open()]); });
after(async () => { await browser?.close(); await server?.close(); });

describe("a new server", () => {
  test("says on Compare that there is no job, and offers the form", async () => {
    // The form says that there is no dataset either.
    const page = await browser.page(server, "/compare", { expected: [/422/] });
    await page.getByText("No job has been submitted to this server yet.").waitFor();
    await page.getByRole("link", { name: "Submit one" }).click();
    await page.waitForURL(`${server.url}/jobs/new*`);
    await page.end();
  });

  test("offers its bundled pictures on the page of the datasets", async () => {
    const page = await browser.page(server, "/datasets");
    assert.equal(await page.locator("[data-dataset]").count(), 0);
    await page.getByRole("button", { name: "Use the bundled pictures" }).click();
    await until("they are registered", () => page.getByRole("heading", { name: "fashion-mnist" }).isVisible());
    assert.equal(new URL(page.url()).pathname, "/datasets");
    assert.match(await page.locator('[data-dataset="fashion-mnist"]').innerText(), /8,000/);
    const [counted] = await Promise.all([page.waitForResponse((r) => r.url().includes("/fashion-mnist/inspect?") && r.status() !== 202), page.getByRole("button", { name: "Inspect again" }).click()]);
    assert.equal(counted.status(), 200);
    await until("the page is read again", async () => /8,000/.test(await page.locator('[data-dataset="fashion-mnist"]').innerText()));
    // Those who come after find a server without any.
    const dialog = page.locator("#confirm");
    await until("the confirmation dialog opens", async () => (await dialog.isVisible()) || (await page.locator("[data-remove]").click(), false));
    await page.locator("#confirm-yes").click();
    await until("they are taken off the list, and offered again", () => page.getByRole("button", { name: "Use the bundled pictures" }).isVisible());
    await page.end();
  });

  test("offers its bundled pictures in one click, and the preset works with them", async () => {
    // Before there is a dataset, the form says so.
    const page = await browser.page(server, "/jobs/new", { expected: [/422/] });
    await page.getByRole("button", { name: "Use the bundled pictures" }).click();
    await page.waitForURL(/preset=fashion-mnist/);
    assert.equal(await page.getByLabel("Dataset", { exact: true }).inputValue(), "fashion-mnist");
    await until("the plan is known", async () => /8,000 pictures/.test(await page.locator("#plan").textContent()));
    await page.getByRole("button", { name: "Submit job" }).click();
    await page.waitForURL(/\/jobs\/j\w+$/);
    const id = page.url().split("/").at(-1);
    await until("the job trains", async () => (await server.job(id)).step > 0);
    // A fork of it with a key that there is not.
    await server.ask(`/jobs/${id}/pause`, {});
    await until("there is a checkpoint", () => page.locator("#fork").isVisible());
    await server.ask(`/jobs/${id}/cancel`, {});
    await until("the job has ended", async () => (await server.job(id)).state === "cancelled");
    await page.end();
  });

  test("presets find pictures under another name", async () => {
    const { datasets: [known] } = await server.ask("/datasets");
    const gone = await fetch(`${server.url}/api/v1/datasets/${known.name}`, { method: "DELETE", headers: server.headers });
    assert.ok(gone.ok, "no job needs it any more");
    await server.ask("/datasets", { name: "clothes", path: known.path });
    const page = await browser.page(server, "/jobs/new");
    assert.equal(await page.getByLabel("Dataset", { exact: true }).inputValue(), "clothes", "the first preset's");
    await page.getByRole("link", { name: /Fashion-MNIST, quick start/ }).click();
    assert.equal(await page.getByLabel("Dataset", { exact: true }).inputValue(), "clothes");
    await page.end();
  });
});

describe("a server with other pictures", () => {
  test("offers the bundled ones where the preset needs them", async () => {
    const { datasets } = await server.ask("/datasets");
    for (const { name } of datasets) await fetch(`${server.url}/api/v1/datasets/${name}`, { method: "DELETE", headers: server.headers });
    await server.ask("/datasets", { name: "pets", path: join(ROOT, "tests/data/parquet/hub") });
    const page = await browser.page(server, "/jobs/new", { expected: [/422/] });
    const offer = page.getByRole("button", { name: "Use the bundled pictures" });
    assert.equal(await page.getByLabel("Dataset", { exact: true }).inputValue(), "pets");
    assert.ok(!await offer.isVisible());
    await page.getByRole("link", { name: /Fashion-MNIST, quick start/ }).click();
    await until("the field says how to get them without the internet", async () => /Use the bundled pictures/.test(await page.locator("#f-data-dataset-error").textContent()));
    await offer.click();
    await page.waitForURL(/preset=fashion-mnist/);
    assert.equal(await page.getByLabel("Dataset", { exact: true }).inputValue(), "fashion-mnist");
    assert.equal(await page.locator("[data-bundled]").count(), 0);
    await page.end();
  });
});

describe("mistakes", () => {
  test("of the form go when a job file is written that cannot be read", async () => {
    const page = await browser.page(server, "/jobs/new", { expected: [/422|400/] });
    await page.getByLabel("Learning rate", { exact: true }).fill("-3");
    await page.getByLabel("Epochs", { exact: true }).focus();
    await until("the field says what is wrong", () => page.locator(".field.wrong").first().isVisible());
    await page.getByLabel("Specification").fill("name = \"x\n[train");
    await until("the text's mistake is told", async () => (await page.locator("#spec-error").textContent()) !== "");
    assert.equal(await page.locator(".field.wrong").count(), 0);
    await page.end();
  });

  test("of a fork name their keys", async () => {
    const { jobs: [job] } = await server.ask("/jobs");
    const page = await browser.page(server, `/jobs/${job.id}`, { expected: [/422|400/] });
    await page.locator("#fork").click();
    await page.getByLabel("Settings to change").fill("train.lr = -1\nparallel.ranks = 0");
    await page.locator("#fork-yes").click();
    const error = page.locator("#fork-error");
    await until("both keys are named", async () => /train\.lr: /.test(await error.textContent()) && /parallel\.ranks: /.test(await error.textContent()));
    await page.end();
  });
});

describe("keys and words", () => {
  test("buttons have the verbs of the command line", async () => {
    const help = ["--help", "model --help"].map((words) => execFileSync(BINARY, words.split(" "), { encoding: "utf8" })).join("\n");
    const commands = new Set([...help.matchAll(/^  ([a-z-]+) {2,}\S/gm)].map(([, command]) => command));
    assert.ok(commands.has("predict"), "the commands are read");
    const { jobs: [job] } = await server.ask("/jobs"), page = await browser.page(server, `/jobs/${job.id}`);
    const words = (at, buttons) => at.locator(buttons).evaluateAll((all) => all.map((b) => b.textContent.trim().toLowerCase()));
    const list = await page.tab("/jobs");
    const said = [
      ...await words(page, ".job-title :is(#fork, #pause, #resume, #retry, #cancel, #delete)"), ...await words(page, "#checkpoints tr:first-child :is(summary, .row-actions > button)"),
      ...await words(page, '[data-tab="classify"]'), ...await words(list, "#bulk button:not([data-bulk=compare], [data-bulk=tag])"),
    ];
    assert.deepEqual(said.filter((verb) => !commands.has(verb)), [], said.join());
    assert.deepEqual([...new Set(said)].sort(), ["cancel", "delete", "download", "evaluate", "fork", "pause", "predict", "register", "resume", "retry"]);
    await page.end();
  });

  test("single keys can be switched off", async () => {
    const page = await browser.page(server, "/machines");
    await page.keyboard.press("?");
    await page.getByLabel("single-key shortcuts").uncheck();
    await page.getByRole("button", { name: "Close" }).click();
    await page.keyboard.press("n");
    await page.keyboard.press("?");
    await new Promise((done) => setTimeout(done, 300));
    assert.ok(page.url().endsWith("/machines") && !(await page.locator("#help").isVisible()));
    await page.locator("#keys").click();
    await page.getByLabel("single-key shortcuts").check();
    await page.getByRole("button", { name: "Close" }).click();
    await page.keyboard.press("n");
    await page.waitForURL(/\/jobs\/new$/);
    await page.end();
  });

  test("what counts seconds is not read out every second", async () => {
    const page = await browser.page(server, "/machines");
    await until("its own stream has nothing to say any more", async () => (await page.locator("#live").textContent()) === "live");
    const said = await page.evaluate(async () => {
      const { showLive } = await import("/static/page.js"), heard = [];
      document.querySelector("#live-status").textContent = "";
      new MutationObserver(() => heard.push(document.querySelector("#live-status").textContent)).observe(document.querySelector("#live-status"), { childList: true, characterData: true, subtree: true });
      for (const status of ["live", "reconnecting", "3 s behind", "4 s behind", "5 s behind", "live"]) { showLive(status); await new Promise((done) => setTimeout(done, 20)); }
      return { heard, role: document.querySelector("#live").getAttribute("role") };
    });
    assert.equal(said.role, null);
    assert.deepEqual(said.heard.slice(-3), ["reconnecting", "behind, catching up", "live"]);
    assert.ok(said.heard.length <= 4, said.heard.join());
    await page.end();
  });
});
