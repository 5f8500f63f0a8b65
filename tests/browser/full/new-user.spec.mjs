// A new user's first minutes: no jobs, no datasets, errors in a job file, shortcuts switched off.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { BINARY, Browser, ROOT, TestServer, until, untilLive } from "../test-server.mjs";

let server, browser;
before(async () => { [server, browser] = await Promise.all([TestServer.open({ dataset: false }), Browser.open()]); });
after(async () => { await browser?.close(); await server?.close(); });

describe("a new server", () => {
  test("shows on Compare that no job exists, and links to the form", async () => {
    const page = await browser.page(server, "/compare");
    await page.getByText("No job has been submitted to this server yet.").waitFor();
    await page.getByRole("link", { name: "Submit one" }).click();
    await page.waitForURL(`${server.url}/jobs/new*`);
  });

  test("offers its bundled pictures on the page of the datasets", async () => {
    const page = await browser.page(server, "/datasets");
    assert.equal(await page.locator("[data-dataset]").count(), 0);
    await page.getByRole("button", { name: "Use the bundled pictures" }).click();
    await until("the pictures are registered", () => page.getByRole("heading", { name: "fashion-mnist" }).isVisible());
    assert.equal(new URL(page.url()).pathname, "/datasets");
    assert.match(await page.locator('[data-dataset="fashion-mnist"]').innerText(), /8,000/);
    const [inspection] = await Promise.all([page.waitForResponse((r) => r.url().includes("/fashion-mnist/inspect?") && r.status() !== 202), page.getByRole("button", { name: "Inspect again" }).click()]);
    assert.equal(inspection.status(), 200);
    await until("the page shows the new inspection", async () => /8,000/.test(await page.locator('[data-dataset="fashion-mnist"]').innerText()));
    // Removes the dataset for the following tests.
    await until("a click opens the confirmation dialog", async () => {
      if (await page.locator("#confirm").isVisible()) return true;
      await page.locator("[data-remove]").click();
    });
    await page.locator("#confirm-yes").click();
    await until("the dataset is removed, and the pictures are offered again", () => page.getByRole("button", { name: "Use the bundled pictures" }).isVisible());
  });

  test("offers its bundled pictures in one click, and the preset works with them", async () => {
    const page = await browser.page(server, "/jobs/new");
    await page.getByRole("button", { name: "Use the bundled pictures" }).click();
    await page.waitForURL(/preset=fashion-mnist/);
    assert.equal(await page.getByLabel("Dataset", { exact: true }).inputValue(), "fashion-mnist");
    await until("the plan is known", async () => /8,000 pictures/.test(await page.locator("#plan").textContent()));
    await page.getByRole("button", { name: "Submit job" }).click();
    await page.waitForURL(/\/jobs\/j\w+$/);
    const id = page.url().split("/").at(-1);
    await until("the job trains", async () => (await server.job(id)).step > 0);
    // A later test forks this job, which needs a checkpoint.
    await server.ask(`/jobs/${id}/pause`, {});
    await until("the job can be forked", () => page.locator("#fork").isVisible());
    await server.ask(`/jobs/${id}/cancel`, {});
    await until("the job has ended", async () => (await server.job(id)).state === "cancelled");
  });

  test("keeps the chosen dataset in a preset whose own dataset is not registered", async () => {
    const { datasets: [dataset] } = await server.ask("/datasets");
    // The dataset can be removed, because the only job that used it has ended.
    await server.ask(`/datasets/${dataset.name}`, undefined, "DELETE");
    await server.ask("/datasets", { name: "clothes", path: dataset.path });
    const page = await browser.page(server, "/jobs/new");
    assert.equal(await page.getByLabel("Dataset", { exact: true }).inputValue(), "clothes", "the form chooses the only dataset");
    await page.getByRole("link", { name: /Fashion-MNIST, quick start/ }).click();
    assert.equal(await page.getByLabel("Dataset", { exact: true }).inputValue(), "clothes");
  });
});

describe("a server with other pictures", () => {
  test("offers the bundled pictures if a preset needs them", async () => {
    const { datasets } = await server.ask("/datasets");
    for (const { name } of datasets) await server.ask(`/datasets/${name}`, undefined, "DELETE");
    await server.ask("/datasets", { name: "pets", path: join(ROOT, "tests/data/parquet/hub") });
    const page = await browser.page(server, "/jobs/new", { expectedErrors: [/422/] });
    const offer = page.getByRole("button", { name: "Use the bundled pictures" });
    assert.equal(await page.getByLabel("Dataset", { exact: true }).inputValue(), "pets");
    assert.ok(!await offer.isVisible());
    await page.getByRole("link", { name: /Fashion-MNIST, quick start/ }).click();
    await until("the field's error names the bundled pictures", async () => /Use the bundled pictures/.test(await page.locator("#f-data-dataset-error").textContent()));
    await offer.click();
    await page.waitForURL(/preset=fashion-mnist/);
    assert.equal(await page.getByLabel("Dataset", { exact: true }).inputValue(), "fashion-mnist");
    assert.equal(await page.locator("[data-bundled]").count(), 0);
  });
});

describe("errors", () => {
  test("of fields are removed when an invalid job file is entered", async () => {
    const page = await browser.page(server, "/jobs/new", { expectedErrors: [/422|400/] });
    await page.getByLabel("Learning rate", { exact: true }).fill("-3");
    await page.getByLabel("Epochs", { exact: true }).focus();
    await until("the field shows an error", () => page.locator(".field.wrong").first().isVisible());
    await page.getByLabel("Specification").fill("name = \"x\n[train");
    await until("the text's error is shown", async () => (await page.locator("#spec-error").textContent()) !== "");
    assert.equal(await page.locator(".field.wrong").count(), 0);
  });

  test("of a fork say which keys are invalid", async () => {
    const { jobs: [job] } = await server.ask("/jobs");
    const page = await browser.page(server, `/jobs/${job.id}`, { expectedErrors: [/422|400/] });
    await page.locator("#fork").click();
    await page.getByLabel("Settings to change").fill("train.lr = -1\nparallel.ranks = 0");
    await page.locator("#fork-yes").click();
    const error = page.locator("#fork-error");
    await until("both keys are named", async () => /train\.lr: /.test(await error.textContent()) && /parallel\.ranks: /.test(await error.textContent()));
  });
});

describe("buttons and keys", () => {
  test("use the verbs of the command line", async () => {
    const help = ["--help", "model --help"].map((options) => execFileSync(BINARY, options.split(" "), { encoding: "utf8" })).join("\n");
    const commands = new Set([...help.matchAll(/^  ([a-z-]+) {2,}\S/gm)].map(([, command]) => command));
    assert.ok(commands.has("predict"), "the help lists the commands");
    const { jobs: [job] } = await server.ask("/jobs"), page = await browser.page(server, `/jobs/${job.id}`);
    const labels = (page, buttons) => page.locator(buttons).evaluateAll((all) => all.map((b) => b.textContent.trim().toLowerCase()));
    const list = await page.tab("/jobs");
    const verbs = [
      ...await labels(page, ".job-title :is(#predict, #fork, #pause, #resume, #retry, #cancel, #delete)"), ...await labels(page, "#checkpoints tr:first-child :is(summary, .row-actions > button)"),
      ...await labels(page, '[data-tab="classify"]'), ...await labels(list, "#bulk button:not([data-bulk=compare], [data-bulk=tag])"),
    ];
    assert.deepEqual(verbs.filter((verb) => !commands.has(verb)), [], `each of these is a command: ${verbs}`);
    assert.deepEqual([...new Set(verbs)].sort(), ["cancel", "delete", "download", "evaluate", "fork", "pause", "predict", "register", "resume", "retry"]);
  });

  test("can be used without single-key shortcuts", async () => {
    const page = await browser.page(server, "/machines");
    await page.keyboard.press("?");
    await page.getByLabel("single-key shortcuts").uncheck();
    await page.getByRole("button", { name: "Close" }).click();
    await page.keyboard.press("n");
    await page.keyboard.press("?");
    // A shortcut would take effect within this time.
    await new Promise((done) => setTimeout(done, 300));
    assert.ok(page.url().endsWith("/machines") && !(await page.locator("#help").isVisible()));
    await page.locator("#keys").click();
    await page.getByLabel("single-key shortcuts").check();
    await page.getByRole("button", { name: "Close" }).click();
    await page.keyboard.press("n");
    await page.waitForURL(/\/jobs\/new$/);
  });
});

test("a page that falls behind announces it once, not every second", async () => {
  const page = await browser.page(server, "/machines");
  await untilLive(page);
  const announced = await page.evaluate(async () => {
    const { showLive } = await import("/static/page.js"), heard = [];
    document.querySelector("#live-status").textContent = "";
    new MutationObserver(() => heard.push(document.querySelector("#live-status").textContent)).observe(document.querySelector("#live-status"), { childList: true, characterData: true, subtree: true });
    for (const status of ["live", "reconnecting", "3 s behind", "4 s behind", "5 s behind", "live"]) { showLive(status); await new Promise((done) => setTimeout(done, 20)); }
    return { heard, role: document.querySelector("#live").getAttribute("role") };
  });
  assert.equal(announced.role, null);
  assert.deepEqual(announced.heard.slice(-3), ["reconnecting", "behind, catching up", "live"]);
  assert.ok(announced.heard.length <= 4, announced.heard.join());
});
