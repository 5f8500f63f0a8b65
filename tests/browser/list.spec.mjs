// The list of jobs: sorted by its heads, filtered by settings, days and text, and kept as views.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { spec } from "./agent.mjs";
import { isSound } from "./looks.mjs";
import { address, fiveJobs, head, listed, names, sql } from "./five-jobs.mjs";
import { Browser, TestServer, until } from "./test-server.mjs";

let server, browser;

before(async () => {
  [server, browser] = await Promise.all([TestServer.open({ dataset: false, agent: false }), Browser.open()]);
  await fiveJobs(server, browser);
});
after(async () => { await browser?.close(); await server?.close(); });

describe("the heads of the columns", () => {
  test("sort, turn round, and are in the address", async () => {
    const page = await browser.page(server, "/jobs");
    await listed(page, "dora,carl,berta,anna,holder");
    assert.equal(await page.getByRole("columnheader", { name: "Submitted" }).getAttribute("aria-sort"), "descending");
    await head(page, "Loss").click();
    await listed(page, "berta,anna,carl,holder,dora");
    assert.equal(address(page).get("sort"), "loss");
    assert.equal(await page.getByRole("columnheader", { name: "Loss" }).getAttribute("aria-sort"), "ascending");
    await head(page, "Loss").click();
    await listed(page, "carl,anna,berta,dora,holder");
    assert.equal(await page.locator("th[aria-sort]").count(), 1);
    await page.reload();
    await listed(page, "carl,anna,berta,dora,holder");
    await head(page, "Job").focus();
    await page.keyboard.press("Enter");
    await listed(page, "anna,berta,carl,dora,holder");
    await page.end();
  });

  test("sort by the state and by the progress, those that are further first", async () => {
    ["anna", "berta", "carl", "dora"].forEach((name, i) => sql(server, `UPDATE jobs SET step = ${[30, 10, 40, 20][i]} WHERE name = '${name}'`));
    const page = await browser.page(server, "/jobs");
    await head(page, "Progress").click();
    await listed(page, "carl,anna,dora,berta,holder");
    assert.deepEqual([address(page).get("sort"), await page.getByRole("columnheader", { name: "Progress" }).getAttribute("aria-sort")], ["-step", "descending"]);
    await head(page, "Progress").click();
    await listed(page, "holder,berta,dora,anna,carl");
    await head(page, "State").click();
    await until("the cancelled ones stand before the one that starts", async () => (await names(page)).at(-1) === "holder");
    assert.equal(address(page).get("sort"), "state");
    await head(page, "State").click();
    await until("and behind it", async () => (await names(page))[0] === "holder");
    assert.equal(await page.getByRole("columnheader", { name: "State" }).getAttribute("aria-sort"), "descending");
    await page.end();
    ["anna", "berta", "carl", "dora"].forEach((name) => sql(server, `UPDATE jobs SET step = 0 WHERE name = '${name}'`));
  });

  test("sort by a setting that somebody added, and a new job comes into its place", async () => {
    const page = await browser.page(server, "/jobs?columns=loss,train.lr,data.mean&sort=-spec.train.lr");
    await until("it is sorted", async () => (await names(page)).slice(0, 3).join() === "berta,carl,anna" || (await names(page))[0] === "berta");
    assert.equal(await page.getByRole("columnheader", { name: "train.lr" }).getAttribute("aria-sort"), "descending");
    const first = await page.locator("#rows tr").first().elementHandle();
    const body = spec("between", 1, 100);
    body.train.lr = 0.3;
    const { id } = await server.ask("/jobs", body);
    await until("it stands behind berta", async () => (await names(page)).indexOf("between") === (await names(page)).indexOf("berta") + 1);
    assert.ok(await first.evaluate((row) => row.isConnected && row === row.parentElement.firstElementChild), "the row above has stayed the same");
    await server.ask(`/jobs/${id}/cancel`, {});
    await until("its state changes in place", async () => (await page.locator(`tr[data-id="${id}"] [data-f=state]`).textContent()) === "cancelled");
    const gone = await fetch(`${server.url}/api/v1/jobs/${id}`, { method: "DELETE" });
    assert.equal(gone.status, 204);
    await until("it is gone", async () => !(await names(page)).includes("between"));
    await page.end();
  });

  test("are links where no script runs", async () => {
    const page = await browser.page(server, "/jobs?project=vision", { javaScriptEnabled: false });
    await page.getByRole("columnheader", { name: "Loss" }).getByRole("link").click();
    await listed(page, "berta,anna");
    await page.getByRole("columnheader", { name: "Loss" }).getByRole("link").click();
    await listed(page, "anna,berta");
    assert.equal(address(page).get("project"), "vision");
    await page.end();
  });
});

describe("the filters", () => {
  test("take settings and days as chips, and say what is none", async () => {
    const page = await browser.page(server, "/jobs?sort=name", { expected: [/400/] });
    await page.locator(".narrow summary").click();
    const add = async (words) => { await page.getByLabel("A setting: ").fill(words); await page.keyboard.press("Enter"); };
    await add("train.lr >= 0.2");
    await listed(page, "berta,carl");
    assert.equal(address(page).get("where"), "train.lr>=0.2");
    await add("project = vision");
    await listed(page, "berta");
    await page.getByRole("button", { name: "Remove the filter train.lr >= 0.2" }).click();
    await listed(page, "anna,berta");
    await page.reload();
    await listed(page, "anna,berta");
    await page.locator(".narrow summary").click();
    await add("nonsense");
    assert.match(await page.locator(".narrow .error").textContent(), /such as lr > 0\.1/);
    await add("train.lrr > 0.1");
    await until("the nearest key is told", async () => /did you mean "train\.lr"\?/.test(await page.locator("#list-problem").textContent()));
    await page.getByRole("button", { name: "Remove the filter train.lrr > 0.1" }).click();
    await listed(page, "anna,berta");
    assert.equal(await page.locator("#list-problem").textContent(), "");
    await page.getByRole("button", { name: "Remove the filter project = vision" }).click();
    await listed(page, "anna,berta,carl,dora,holder");
    const today = await page.evaluate(() => { const d = new Date(); return [d.getFullYear(), d.getMonth() + 1, d.getDate()].map((n) => String(n).padStart(2, "0")).join("-"); });
    await page.locator(".narrow[open], .narrow summary").first().waitFor();
    if (!(await page.locator(".narrow").evaluate((menu) => menu.open))) await page.locator(".narrow summary").click();
    await page.getByLabel("Submitted until").fill("2020-02-29");
    await until("none is so old", () => page.locator("#none-match").isVisible());
    await page.getByLabel("Submitted until").fill(today);
    await listed(page, "anna,berta,carl,dora,holder");
    await page.getByRole("button", { name: `Remove the filter until ${today}` }).click();
    assert.equal(address(page).get("created_before"), null);
    if (!(await page.locator(".narrow").evaluate((menu) => menu.open))) await page.locator(".narrow summary").click();
    await page.getByLabel("Submitted from").fill("2999-12-31");
    await until("none is so new", () => page.locator("#none-match").isVisible());
    await page.getByLabel("Submitted from").fill(today);
    await listed(page, "anna,berta,carl,dora,holder");
    await page.getByRole("button", { name: `Remove the filter from ${today}` }).click();
    assert.equal(address(page).get("created_after"), null);
    await page.end();
  });

  test("take a setting without its table, as long as one table has it", async () => {
    const page = await browser.page(server, "/jobs?sort=name", { expected: [/400/] });
    await page.locator(".narrow summary").click();
    const add = async (words) => { await page.getByLabel("A setting: ").fill(words); await page.keyboard.press("Enter"); };
    await add("lr > 0.1");
    await listed(page, "berta,carl");
    assert.equal(address(page).get("where"), "lr>0.1");
    // A job that comes by the stream is asked the same.
    const body = spec("bare", 1, 100);
    body.train.lr = 0.3;
    const { id } = await server.ask("/jobs", body);
    await listed(page, "bare,berta,carl");
    await server.ask(`/jobs/${id}/cancel`, {});
    assert.equal((await fetch(`${server.url}/api/v1/jobs/${id}`, { method: "DELETE" })).status, 204);
    await listed(page, "berta,carl");
    await add("every_steps > 1");
    await until("both tables are told", async () => /checkpoint\.every_steps or log\.every_steps/.test(await page.locator("#list-problem").textContent()));
    await page.end();
  });

  test("offer projects and tags, and a tag of a row is one more", async () => {
    const page = await browser.page(server, "/jobs?sort=name&where=lr%3E%3D0.1");
    await listed(page, "anna,berta,carl,holder");
    await page.locator(".narrow summary").click();
    await page.locator("#project option[value=vision]").waitFor({ state: "attached" });
    await isSound(page, "the filters");
    await page.setViewportSize({ width: 1440, height: 1000 });
    assert.deepEqual(await page.locator("#project option").allTextContents(), ["any", "vision (2)", "audio (2)", "default (1)"], "those with the most jobs first");
    await page.locator("#project").selectOption("vision");
    await listed(page, "anna,berta");
    await page.locator("#tag").selectOption("warm up");
    await listed(page, "berta");
    assert.deepEqual([address(page).get("project"), address(page).get("tag"), address(page).get("where")], ["vision", "warm up", "lr>=0.1"]);
    await page.getByRole("button", { name: "Remove the filter project vision" }).click();
    await page.getByRole("button", { name: "Remove the filter tagged warm up" }).click();
    await listed(page, "anna,berta,carl,holder");
    await page.keyboard.press("Escape");
    await page.locator("#rows a.tag", { hasText: "held" }).click();
    await listed(page, "holder");
    assert.deepEqual([address(page).get("tag"), address(page).get("where"), address(page).get("sort")], ["held", "lr>=0.1", "name"]);
    // Several at once: no job has both of these.
    await page.locator(".narrow summary").click();
    await page.locator('#tag option[value="warm up"]').waitFor({ state: "attached" });
    await page.locator("#tag").selectOption("warm up");
    await until("no job has both", () => page.locator("#none-match").isVisible());
    assert.equal(address(page).get("tag"), "held,warm up");
    await page.end();
  });

  test("search names, tags and notes", async () => {
    const page = await browser.page(server, "/jobs?sort=name");
    for (const [words, found] of [["ARL", "carl"], ["warm up", "berta"], ["needle", "carl"], ["", "anna,berta,carl,dora,holder"]]) {
      await page.getByRole("searchbox").fill(words);
      await listed(page, found);
      assert.equal(address(page).get("q") ?? "", words);
    }
    await page.end();
  });
});

describe("views", () => {
  test("are kept by name, and their address is all of them", async () => {
    const page = await browser.page(server, "/jobs?where=train.lr%3E0.05&sort=-loss&columns=loss,train.lr");
    await page.locator(".saved-views summary").click();
    await page.getByLabel("Save what is shown now").fill("steep ones");
    await page.keyboard.press("Enter");
    const link = page.getByRole("link", { name: "steep ones" });
    await link.waitFor();
    const kept = await link.getAttribute("href");
    await page.goto(`${server.url}/jobs`);
    await page.locator(".saved-views summary").click();
    await link.click();
    await listed(page, "carl,anna,berta,holder");
    assert.deepEqual([...address(page)].sort(), [["columns", "loss,train.lr"], ["sort", "-loss"], ["where", "train.lr>0.05"]]);
    // Somebody else's browser, which has kept nothing, shows the same.
    const other = await browser.page(server, kept);
    await listed(other, "carl,anna,berta,holder");
    assert.ok(await other.getByRole("columnheader", { name: "train.lr" }).isVisible());
    await other.end();
    await page.locator(".saved-views summary").click();
    await page.getByRole("button", { name: "Remove the view steep ones" }).click();
    assert.equal(await link.count(), 0);
    // Fifty fit, and not one more.
    await page.evaluate(() => localStorage.setItem("views", JSON.stringify(Array.from({ length: 49 }, (_, n) => ({ name: `view ${n}`, query: "sort=name" })))));
    for (const [name, lines] of [["the fiftieth", 50], ["one more", 50]]) {
      await page.getByLabel("Save what is shown now").fill(name);
      await page.keyboard.press("Enter");
      assert.equal(await page.locator(".views li").count(), lines);
    }
    assert.match(await page.locator(".saved-views .error").textContent(), /50 views/);
    await page.end();
  });
});

describe("several jobs at once", () => {
  test("stay chosen where they were refused, with the reason, and nothing is done twice", async () => {
    const page = await browser.page(server, "/jobs", { expected: [/409/] }), { jobs } = await server.ask("/jobs?fields=id,name"), asked = [];
    let refuses = true;
    // As a server that refuses anna; nothing happens to the jobs.
    await page.route(/\/api\/v1\/jobs\/[^/?]+(\/retry)?$/, (route) => {
      const { name } = jobs.find(({ id }) => route.request().url().includes(id));
      asked.push(name);
      return name === "anna" && refuses ? route.fulfill({ status: 409, contentType: "application/problem+json", body: JSON.stringify({ title: "Conflict", detail: "It is being read." }) }) : route.fulfill({ json: {} });
    });
    const choose = (name) => page.locator("#rows tr", { hasText: name }).locator("[data-f=choose]"), press = (what) => page.locator("#bulk").getByRole("button", { name: what, exact: true }).click();
    const said = () => page.locator("#bulk-status").innerText();
    await listed(page, "dora,carl,berta,anna,holder");
    for (const name of ["anna", "berta"]) await choose(name).check();
    await press("Retry");
    await until("it is told", async () => (await said()) === "Not done for 1 of 2 jobs. anna: It is being read.");
    assert.deepEqual([await page.locator("#bulk-count").innerText(), await choose("anna").isChecked(), await choose("berta").isChecked()], ["1 job chosen", true, false]);
    await choose("carl").check();
    assert.equal(await said(), "", "others are chosen now");
    asked.length = 0;
    await press("Delete");
    const yes = page.locator("#confirm-yes");
    await yes.click();
    await until("it is told", async () => /^Not done for 1 of 2 jobs\. anna: /.test(await page.locator("#confirm-error").innerText()));
    refuses = false;
    await yes.click();
    await until("the dialog is done", async () => !(await yes.isVisible()));
    assert.deepEqual(asked.sort(), ["anna", "anna", "carl"]);
    assert.ok(await page.locator("#bulk").isHidden());
    await page.end();
  });
});
