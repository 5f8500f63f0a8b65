// Pages offer viewers and members only permitted actions, and error pages show who is signed in.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { assertAccessible } from "./looks.mjs";
import { Browser, TestServer, testInFullRun, until } from "./test-server.mjs";

let server, browser, job;
const password = (name) => `a password of ${name}`;
/** Signs in as `name` and opens a page. */
const openAs = async (name, path, options = {}) => {
  // Without the server's token, `browser.page` does not sign in.
  const page = await browser.page({ url: server.url }, "/login", options);
  await page.locator("input[name=name]").fill(name);
  await page.locator("input[name=password]").fill(password(name));
  await page.locator("form", { has: page.locator("input[name=password]") }).locator("button").first().click();
  await page.waitForURL(`${server.url}/jobs`);
  await page.goto(server.url + path);
  return page;
};

before(async () => {
  [server, browser] = await Promise.all([TestServer.open({ slots: 1 }), Browser.open()]);
  job = await server.submit({ name: "looked at", ranks: 1, train: { steps: 4 }, checkpoint: { every_steps: 2 } });
  await until("the job has ended", async () => (await server.job(job.id)).state === "succeeded");
  // The first person must be an admin.
  for (const [name, role] of [["ada", "admin"], ["vera", "viewer"], ["mona", "member"]]) await server.ask("/people", { name, role, password: password(name) });
});
after(async () => { await browser?.close(); await server?.close(); });

describe("a viewer", () => {
  test("sees one note about the role, and no button for a forbidden action", async () => {
    const page = await openAs("vera", "/jobs");
    const assertHidden = async (...selectors) => { for (const selector of selectors) assert.equal(await page.locator(selector).filter({ visible: true }).count(), 0, selector); };
    await page.locator(`tr[data-id="${job.id}"]`).waitFor();
    assert.match(await page.locator(".reads-only").textContent(), /^View only: /);
    assert.equal(await page.getByRole("link", { name: "Account" }).innerText(), "vera", "the bar shows who is signed in");
    await page.getByLabel("Select looked at").check();
    await until("jobs can be compared", () => page.locator("[data-bulk=compare]").isVisible());
    await assertHidden("text=New job", "[data-bulk=tag]", "[data-bulk=delete]", "[data-bulk=cancel]");
    await page.goto(`${server.url}/jobs/${job.id}`);
    await until("the job's checkpoints are listed", async () => (await page.locator("#checkpoints tr").count()) >= 1);
    await assertHidden("#predict", "#fork", "#delete", "text=Clone", "[data-do=fork]", "[data-do=classify]", "[data-tab=classify]");
    await page.getByRole("tab", { name: "Notes" }).click();
    for (const label of ["Notes", "Tags", "Project"]) assert.ok(await page.locator("#notes-panel").getByLabel(label, { exact: true }).evaluate((field) => field.readOnly), label);
    assert.match(await page.locator("#note-status").textContent(), /Only the job's owner and admins/);
    await assertAccessible(page, "a job");
    await page.goto(`${server.url}/jobs/${job.id}?tab=classify`);
    await page.locator("#classify-refused").waitFor();
    await assertHidden("#drop", "#classify-checkpoint");
    await page.goto(`${server.url}/datasets`);
    await page.locator(".dataset").first().waitFor();
    await assertHidden("#add-dataset", "#upload", "#admins-add", "[data-remove]", "text=Train on it");
    await page.goto(`${server.url}/machines`);
    await page.locator(".machine").first().waitFor();
    await assertHidden("[data-drain]");
    await page.goto(`${server.url}/jobs/new`);
    await page.locator(".reads-only").waitFor();
    await assertHidden(".send button[type=submit]");
  });
});

describe("a member", () => {
  test("may submit jobs, and may not annotate another person's job", async () => {
    const page = await openAs("mona", "/jobs");
    await page.locator(`tr[data-id="${job.id}"]`).waitFor();
    assert.ok(await page.getByRole("link", { name: "New job" }).isVisible());
    assert.equal(await page.locator(".reads-only").count(), 0);
    await page.goto(`${server.url}/jobs/${job.id}`);
    await until("the job's checkpoints are listed", async () => (await page.locator("#checkpoints tr").count()) >= 1);
    assert.ok(await page.locator("#fork").isVisible(), "whoever sees a job may fork it");
    await page.getByRole("tab", { name: "Notes" }).click();
    assert.ok(await page.getByLabel("Tags", { exact: true }).evaluate((field) => field.readOnly));
    // Actions of admins and owners are not offered.
    for (const [path, card, action] of [["/machines", ".machine", "[data-drain]"], ["/datasets", ".dataset", "[data-remove]"]]) {
      await page.goto(server.url + path);
      await page.locator(card).first().waitFor();
      assert.equal(await page.locator(action).count(), 0, path);
    }
    // Without --dataset-root, only admins may register paths.
    assert.equal(await page.locator("#add-dataset").count(), 0);
    assert.ok(await page.locator("#upload").isVisible(), "a member can upload");
    assert.match(await page.locator("#admins-add").textContent(), /ask an admin .*--dataset-root/);
    await page.end();
    const admin = await openAs("ada", "/machines");
    assert.equal(await admin.locator("[data-drain]").count(), 1);
    await admin.goto(`${server.url}/datasets`);
    assert.equal(await admin.locator("[data-remove]").count(), 1);
    assert.ok(await admin.locator("#add-dataset").isVisible());
  });
});

describe("error pages", () => {
  testInFullRun("show who is signed in", async () => {
    const page = await openAs("vera", "/nowhere", { expectedErrors: [/404/, /403/] });
    for (const path of ["/nowhere", "/jobs/j00000000000000000000000000", "/docs/nowhere", "/people"]) {
      const response = await page.goto(server.url + path);
      assert.ok([403, 404].includes(response.status()), path);
      assert.ok(await page.getByRole("button", { name: "Sign out" }).isVisible(), path);
      assert.ok(await page.getByRole("link", { name: "Account" }).isVisible(), path);
    }
    const stranger = await (await browser.chromium.newContext()).newPage();
    await stranger.goto(`${server.url}/login`);
    assert.equal(await stranger.locator("header nav a").count(), 0, "the sign-in page has no links, as every other page leads back to it");
    assert.equal(await stranger.getByRole("button", { name: "Sign out" }).count(), 0);
    await stranger.context().close();
  });
});
