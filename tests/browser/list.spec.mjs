// The list of jobs: sorting, filters by settings, days and text, saved views, columns of any metric, setting or tag,
// long names, and reasons of waiting jobs.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { spec } from "./agent.mjs";
import { assertViews } from "./looks.mjs";
import { columnHead, jobNames, queryOf, removeJob, sql, submitFiveJobs, untilListed } from "./five-jobs.mjs";
import { Browser, TestServer, testInFullRun, until } from "./test-server.mjs";

let server, browser, agent;

before(async () => {
  [server, browser] = await Promise.all([TestServer.open({ dataset: false, agent: false }), Browser.open()]);
  agent = await submitFiveJobs(server, browser);
});
after(async () => { await browser?.close(); await server?.close(); });

describe("the heads of the columns", () => {
  test("sort, reverse the order at the second click, and are kept in the URL", async () => {
    const page = await browser.page(server, "/jobs");
    await untilListed(page, "dora,carl,berta,anna,holder");
    assert.equal(await page.getByRole("columnheader", { name: "Submitted" }).getAttribute("aria-sort"), "descending");
    await columnHead(page, "Loss").click();
    await untilListed(page, "berta,anna,carl,holder,dora");
    assert.equal(queryOf(page).get("sort"), "loss");
    assert.equal(await page.getByRole("columnheader", { name: "Loss" }).getAttribute("aria-sort"), "ascending");
    await columnHead(page, "Loss").click();
    await untilListed(page, "carl,anna,berta,dora,holder");
    assert.equal(await page.locator("th[aria-sort]").count(), 1);
    await page.reload();
    await untilListed(page, "carl,anna,berta,dora,holder");
    await columnHead(page, "Job").focus();
    await page.keyboard.press("Enter");
    await untilListed(page, "anna,berta,carl,dora,holder");
  });

  testInFullRun("sort by state and by progress, with the most advanced jobs first", async () => {
    ["anna", "berta", "carl", "dora"].forEach((name, i) => sql(server, `UPDATE jobs SET step = ${[30, 10, 40, 20][i]} WHERE name = '${name}'`));
    const page = await browser.page(server, "/jobs");
    await columnHead(page, "Progress").click();
    await untilListed(page, "carl,anna,dora,berta,holder");
    assert.deepEqual([queryOf(page).get("sort"), await page.getByRole("columnheader", { name: "Progress" }).getAttribute("aria-sort")], ["-step", "descending"]);
    await columnHead(page, "Progress").click();
    await untilListed(page, "holder,berta,dora,anna,carl");
    await columnHead(page, "State").click();
    await until("cancelled jobs come before the starting job", async () => (await jobNames(page)).at(-1) === "holder");
    assert.equal(queryOf(page).get("sort"), "state");
    await columnHead(page, "State").click();
    await until("the starting job comes first", async () => (await jobNames(page))[0] === "holder");
    assert.equal(await page.getByRole("columnheader", { name: "State" }).getAttribute("aria-sort"), "descending");
    await page.end();
    ["anna", "berta", "carl", "dora"].forEach((name) => sql(server, `UPDATE jobs SET step = 0 WHERE name = '${name}'`));
  });

  test("sort by an added setting, and a new job is inserted in order", async () => {
    const page = await browser.page(server, "/jobs?columns=loss,train.lr,data.mean&sort=-spec.train.lr");
    await until("the list is sorted", async () => (await jobNames(page))[0] === "berta");
    assert.equal(await page.getByRole("columnheader", { name: "train.lr" }).getAttribute("aria-sort"), "descending");
    const bertasRow = await page.locator("#rows tr").first().elementHandle();
    const body = spec("between", 1, 100);
    body.train.lr = 0.3;
    const { id } = await server.ask("/jobs", body);
    await until("the new job follows berta", async () => (await jobNames(page)).indexOf("between") === (await jobNames(page)).indexOf("berta") + 1);
    assert.ok(await bertasRow.evaluate((row) => row.isConnected && row === row.parentElement.firstElementChild), "berta's row is the same element as before");
    await server.ask(`/jobs/${id}/cancel`, {});
    await until("the row's state changes in place", async () => (await page.locator(`tr[data-id="${id}"] [data-f=state]`).textContent()) === "cancelled");
    await removeJob(server, id);
    await until("the job is gone", async () => !(await jobNames(page)).includes("between"));
  });

  testInFullRun("work as links if JavaScript is disabled", async () => {
    const page = await browser.page(server, "/jobs?project=vision", { javaScriptEnabled: false });
    await page.getByRole("columnheader", { name: "Loss" }).getByRole("link").click();
    await untilListed(page, "berta,anna");
    await page.getByRole("columnheader", { name: "Loss" }).getByRole("link").click();
    await untilListed(page, "anna,berta");
    assert.equal(queryOf(page).get("project"), "vision");
  });
});

/** Returns a function that types a condition into the open menu of filters. */
const addCondition = (page) => async (condition) => { await page.getByLabel("A setting or result: ").fill(condition); await page.keyboard.press("Enter"); };

describe("the filters", () => {
  test("show settings and days as chips, and report invalid filters", async () => {
    const page = await browser.page(server, "/jobs?sort=name", { expectedErrors: [/400/] });
    const add = addCondition(page);
    await page.locator(".narrow summary").click();
    await add("train.lr >= 0.2");
    await untilListed(page, "berta,carl");
    assert.equal(queryOf(page).get("where"), "train.lr>=0.2");
    assert.ok(await page.locator("#condition-keys option[value=best]").count(), "results are offered like settings");
    await add("project = vision");
    await untilListed(page, "berta");
    await page.getByRole("button", { name: "Remove the filter train.lr >= 0.2" }).click();
    await untilListed(page, "anna,berta");
    await page.reload();
    await untilListed(page, "anna,berta");
    await page.locator(".narrow summary").click();
    await add("nonsense");
    assert.match(await page.locator(".narrow .error").textContent(), /such as lr > 0\.1/);
    await add("state = failed");
    assert.match(await page.locator(".narrow .error").textContent(), /buttons above the list/);
    await add("best > 60");
    assert.match(await page.locator(".narrow .error").textContent(), /write best > 60 % or best > 0\.6\.$/);
    await add("train.lrr > 0.1");
    await until("the nearest key is suggested", async () => /^The filter names "train\.lrr", .* did you mean "train\.lr"\?/.test(await page.locator("#list-problem").textContent()));
    assert.equal(await page.locator("#none-match").isVisible(), false, "an error does not also say that no job matches");
    await page.getByRole("button", { name: "Remove the filter train.lrr > 0.1" }).click();
    await untilListed(page, "anna,berta");
    assert.equal(await page.locator("#list-problem").textContent(), "");
    await page.getByRole("button", { name: "Remove the filter project = vision" }).click();
    await untilListed(page, "anna,berta,carl,dora,holder");
    const today = await page.evaluate(() => { const d = new Date(); return [d.getFullYear(), d.getMonth() + 1, d.getDate()].map((n) => String(n).padStart(2, "0")).join("-"); });
    await page.locator(".narrow[open], .narrow summary").first().waitFor();
    if (!(await page.locator(".narrow").evaluate((menu) => menu.open))) await page.locator(".narrow summary").click();
    await page.getByLabel("Submitted until").fill("2020-02-29");
    await until("no job is so old", () => page.locator("#none-match").isVisible());
    await page.getByLabel("Submitted until").fill(today);
    await untilListed(page, "anna,berta,carl,dora,holder");
    await page.getByRole("button", { name: `Remove the filter until ${today}` }).click();
    assert.equal(queryOf(page).get("created_before"), null);
    if (!(await page.locator(".narrow").evaluate((menu) => menu.open))) await page.locator(".narrow summary").click();
    await page.getByLabel("Submitted from").fill("2999-12-31");
    await until("no job is so new", () => page.locator("#none-match").isVisible());
    await page.getByLabel("Submitted from").fill(today);
    await untilListed(page, "anna,berta,carl,dora,holder");
    await page.getByRole("button", { name: `Remove the filter from ${today}` }).click();
    assert.equal(queryOf(page).get("created_after"), null);
  });

  testInFullRun("accept a key without its section (`lr`) if only one section of the job file has the key", async () => {
    const page = await browser.page(server, "/jobs?sort=name", { expectedErrors: [/400/] });
    const add = addCondition(page);
    await page.locator(".narrow summary").click();
    await add("lr > 0.1");
    await untilListed(page, "berta,carl");
    assert.equal(queryOf(page).get("where"), "lr>0.1");
    // The filter also applies to a job that arrives by the stream.
    const body = spec("bare", 1, 100);
    body.train.lr = 0.3;
    const { id } = await server.ask("/jobs", body);
    await untilListed(page, "bare,berta,carl");
    await removeJob(server, id);
    await untilListed(page, "berta,carl");
    await add("every_steps > 1");
    await until("the error names both sections", async () => /checkpoint\.every_steps or log\.every_steps/.test(await page.locator("#list-problem").textContent()));
  });

  test("offer projects and tags, and a click on a row's tag adds a filter", async () => {
    const page = await browser.page(server, "/jobs?sort=name&where=lr%3E%3D0.1");
    await untilListed(page, "anna,berta,carl,holder");
    await page.locator(".narrow summary").click();
    await page.locator("#project option[value=vision]").waitFor({ state: "attached" });
    await assertViews(page, "the filters");
    await page.setViewportSize({ width: 1440, height: 1000 });
    assert.deepEqual(await page.locator("#project option").allTextContents(), ["any", "vision (2)", "audio (2)", "default (1)"], "projects are sorted by number of jobs");
    await page.locator("#project").selectOption("vision");
    await untilListed(page, "anna,berta");
    await page.locator("#tag").selectOption("warm up");
    await untilListed(page, "berta");
    assert.deepEqual([queryOf(page).get("project"), queryOf(page).get("tag"), queryOf(page).get("where")], ["vision", "warm up", "lr>=0.1"]);
    await page.getByRole("button", { name: "Remove the filter project vision" }).click();
    await page.getByRole("button", { name: "Remove the filter tagged warm up" }).click();
    await untilListed(page, "anna,berta,carl,holder");
    await page.keyboard.press("Escape");
    await page.locator("#rows a.tag", { hasText: "held" }).click();
    await untilListed(page, "holder");
    assert.deepEqual([queryOf(page).get("tag"), queryOf(page).get("where"), queryOf(page).get("sort")], ["held", "lr>=0.1", "name"]);
    // With two tags, only jobs with both are listed.
    await page.locator(".narrow summary").click();
    await page.locator('#tag option[value="warm up"]').waitFor({ state: "attached" });
    await page.locator("#tag").selectOption("warm up");
    await until("no job has both tags", () => page.locator("#none-match").isVisible());
    assert.equal(queryOf(page).get("tag"), "held,warm up");
  });

  test("apply conditions on settings, results and metrics to jobs from the stream", async () => {
    const page = await browser.page(server, "/jobs");
    const conditions = ["best>0.7", "best>0.9", "speed<100", "loss<1", "loss>1", "val_loss<1", "val_loss!=1", "recipe=finetune", "lr=0.1", "lr>0.1"];
    const [ofStream, ofServer] = await page.evaluate(async (conditions) => {
      const { filter, fits, readPage } = await import("/static/jobs/query.js"), { jobs: [listed] } = await readPage(filter(), null, 1);
      const streamed = { tags: [], spec: { loss: { margin: 0 }, train: { lr: 0.1 } }, best: { value: 0.8 }, images_per_second: 50, last: { loss: 0.5 } };
      const fitting = (job, conditions) => conditions.filter((condition) => fits(job, { states: [], tags: [], conditions: [condition] }));
      return [fitting(streamed, conditions), fitting(listed, ["step_ms<1", "recipe=finetune"])];
    }, conditions);
    assert.deepEqual(ofStream, ["best>0.7", "speed<100", "loss<1", "val_loss!=1", "lr=0.1"]);
    assert.deepEqual(ofServer, ["step_ms<1", "recipe=finetune"], "conditions whose values the response lacks count as fulfilled, because the server has applied them");
  });

  test("search names, tags and notes", async () => {
    const page = await browser.page(server, "/jobs?sort=name");
    for (const [query, expected] of [["ARL", "carl"], ["warm up", "berta"], ["needle", "carl"], ["", "anna,berta,carl,dora,holder"]]) {
      await page.getByRole("searchbox").fill(query);
      await untilListed(page, expected);
      assert.equal(queryOf(page).get("q") ?? "", query);
    }
  });
});

describe("views", () => {
  test("are stored by name, and their URL shows the same list in another browser", async () => {
    const page = await browser.page(server, "/jobs?where=train.lr%3E0.05&sort=-loss&columns=loss,train.lr");
    await page.locator(".saved-views summary").click();
    await page.getByLabel("Save what is shown now").fill("steep ones");
    await page.keyboard.press("Enter");
    const link = page.getByRole("link", { name: "steep ones" });
    await link.waitFor();
    const href = await link.getAttribute("href");
    await page.goto(`${server.url}/jobs`);
    await page.locator(".saved-views summary").click();
    await link.click();
    await untilListed(page, "carl,anna,berta,holder");
    assert.deepEqual([...queryOf(page)].sort(), [["columns", "loss,train.lr"], ["sort", "-loss"], ["where", "train.lr>0.05"]]);
    // Another person's browser, without stored views, shows the same list.
    const otherPerson = await browser.page(server, href);
    await untilListed(otherPerson, "carl,anna,berta,holder");
    assert.ok(await otherPerson.getByRole("columnheader", { name: "train.lr" }).isVisible());
    await otherPerson.end();
    await page.locator(".saved-views summary").click();
    await page.getByRole("button", { name: "Remove the view steep ones" }).click();
    assert.equal(await link.count(), 0);
    // At most 50 views can be stored.
    await page.evaluate(() => localStorage.setItem("views", JSON.stringify(Array.from({ length: 49 }, (_, n) => ({ name: `view ${n}`, query: "sort=name" })))));
    for (const [name, lines] of [["the fiftieth", 50], ["one more", 50]]) {
      await page.getByLabel("Save what is shown now").fill(name);
      await page.keyboard.press("Enter");
      assert.equal(await page.locator(".views li").count(), lines);
    }
    assert.match(await page.locator(".saved-views .error").textContent(), /50 views/);
  });
});

describe("an open list", () => {
  testInFullRun("shows older jobs in place of deleted jobs", async () => {
    // The holder occupies the only slot, so these jobs wait.
    for (let i = 0; i < 60; i++) await server.ask("/jobs", spec(`many ${i}`, 1, 1000));
    const { jobs } = await server.ask("/jobs?limit=60&name=many&fields=id"), page = await browser.page(server, "/jobs?name=many"), rows = page.locator("#rows tr");
    await until("the first jobs are listed", async () => (await rows.count()) >= 25);
    for (const { id } of jobs.slice(0, 50)) await removeJob(server, id);
    await until("the ten older jobs are listed", async () => (await rows.count()) === 10);
    assert.ok(await page.locator("#no-jobs").isHidden() && await page.locator("#none-match").isHidden());
    await page.end();
    for (const { id } of jobs.slice(50)) await removeJob(server, id);
  });
});

describe("actions on several jobs", () => {
  test("keep failed jobs selected, show the reason, and are not repeated for the other jobs", async () => {
    const page = await browser.page(server, "/jobs", { expectedErrors: [/409/] }), { jobs } = await server.ask("/jobs?fields=id,name"), asked = [];
    let refuses = true;
    // Simulates a server that refuses actions on anna. Actions on other jobs succeed without effect.
    await page.route(/\/api\/v1\/jobs\/[^/?]+(\/retry)?$/, (route) => {
      const { name } = jobs.find(({ id }) => route.request().url().includes(id));
      asked.push(name);
      return name === "anna" && refuses ? route.fulfill({ status: 409, contentType: "application/problem+json", body: JSON.stringify({ title: "Conflict", detail: "It is being read." }) }) : route.fulfill({ json: {} });
    });
    const checkboxOf = (name) => page.locator("#rows tr", { hasText: name }).locator("[data-f=choose]"), press = (what) => page.locator("#bulk").getByRole("button", { name: what, exact: true }).click();
    const status = () => page.locator("#bulk-status").innerText();
    await untilListed(page, "dora,carl,berta,anna,holder");
    for (const name of ["anna", "berta"]) await checkboxOf(name).check();
    await press("Retry");
    await until("the status names the failure", async () => (await status()) === "Not done for 1 of 2 jobs. anna: It is being read.");
    assert.deepEqual([await page.locator("#bulk-count").innerText(), await checkboxOf("anna").isChecked(), await checkboxOf("berta").isChecked()], ["1 job selected", true, false]);
    await checkboxOf("carl").check();
    assert.equal(await status(), "", "a new selection clears the status");
    asked.length = 0;
    await press("Delete");
    const confirmButton = page.locator("#confirm-yes");
    await confirmButton.click();
    await until("the dialog names the failure", async () => /^Not done for 1 of 2 jobs\. anna: /.test(await page.locator("#confirm-error").innerText()));
    refuses = false;
    await confirmButton.click();
    await until("the dialog closes", async () => !(await confirmButton.isVisible()));
    assert.deepEqual(asked.sort(), ["anna", "anna", "carl"]);
    assert.ok(await page.locator("#bulk").isHidden());
  });
});

describe("columns", () => {
  test("show the newest value of any metric, sort by it, and refuse an unknown metric", async () => {
    const { jobs: [{ id }] } = await server.ask("/jobs?q=holder&fields=id");
    const attempt = await agent.attempt(id);
    await agent.begin(attempt, { total_steps: 100, steps_per_epoch: 10 });
    await agent.reportSteps(attempt, 0, [1, 2], { grad_norm: (s) => (s === 1 ? 2.5 : 0.5), step_ms: (s) => 10 + 2 * s, cpu_utilization: 0.25 });
    const page = await browser.page(server, "/jobs?columns=loss,grad_norm,step_ms&sort=-grad_norm", { expectedErrors: [/400/] });
    const cell = (key) => page.locator(`tr[data-id="${id}"] [data-key="${key}"]`).textContent();
    await until("both values are shown", async () => (await cell("grad_norm")) === "0.5000" && (await cell("step_ms")) === "14.0 ms");
    assert.equal((await jobNames(page))[0], "holder");
    await page.locator("#columns > summary").click();
    const add = async (key) => { await page.locator("#column-add").fill(key); await page.keyboard.press("Enter"); };
    await add("cpu_utilization");
    await until("an added column has its value", async () => (await cell("cpu_utilization")) === "25 %");
    await add("grad_nrom");
    await until("an unknown metric is refused", async () => /not a setting.*no metric “grad_nrom”/.test(await page.locator("#columns .error").textContent()));
    await add("train.lrr");
    await until("the error suggests the nearest key", async () => /did you mean "train\.lr"\?/.test(await page.locator("#columns .error").textContent()));
    assert.equal(await page.locator("thead .c-extra").count(), 3);
    // A new value is shown when it arrives.
    await agent.reportSteps(attempt, 0, [3], { grad_norm: 0.75 });
    await until("the newest value is shown", async () => (await cell("grad_norm")) === "0.7500");
    await page.end();
    const refused = await fetch(`${server.url}/api/v1/jobs?metrics=grad_nrom`);
    assert.equal(refused.status, 400);
    assert.match((await refused.json()).detail, /no metric "grad_nrom" here; did you mean "grad_norm"\?/);
  });

  testInFullRun("can all be hidden, and stay hidden after a reload", async () => {
    const page = await browser.page(server, "/jobs"), heads = () => page.locator("#jobs thead th:visible").evaluateAll((all) => all.map((th) => th.innerText.trim()).filter(Boolean).join());
    await page.locator("#columns > summary").click();
    for (const box of await page.locator("#own-columns input").all()) await box.uncheck();
    assert.equal(queryOf(page).get("columns"), "none");
    await page.reload();
    await until("only state and name are left", async () => (await heads()) === "State,Job");
    // `none` is valid only as the single value: beside other columns it is ignored.
    await page.evaluate(() => localStorage.setItem("columns", "none,loss"));
    await page.goto(`${server.url}/jobs`);
    await until("`none` is ignored", async () => (await heads()) === "State,Job,Loss");
  });

  testInFullRun("of tags and of settings with several values can be sorted", async () => {
    const page = await browser.page(server, "/jobs?columns=loss,tag:warm up,train.milestones&sort=name");
    await untilListed(page, "anna,berta,carl,dora,holder");
    await columnHead(page, "#warm up").click();
    await until("jobs with the tag come first", async () => (await jobNames(page))[0] === "berta");
    assert.deepEqual((await page.locator('#rows [data-key="tag:warm up"] span').allTextContents()).slice(0, 2), ["yes", ""]);
    assert.equal(queryOf(page).get("sort"), "-tag:warm up");
    await columnHead(page, "#warm up").click();
    await until("jobs with the tag come last", async () => (await jobNames(page)).at(-1) === "berta");
    const ids = [];
    for (const [name, milestones] of [["two", [2, 3]], ["one", [1, 9]]]) {
      const body = spec(name, 1, 100);
      Object.assign(body.train, { schedule: "step", milestones });
      delete body.train.steps;
      const { id } = await server.ask("/jobs", { ...body, train: { ...body.train, epochs: 10 } });
      await server.ask(`/jobs/${id}/cancel`, {});
      ids.push(id);
    }
    await columnHead(page, "train.milestones").click();
    await until("lists are sorted as text", async () => { const names = await jobNames(page); return names.indexOf("one") < names.indexOf("two") || Promise.reject(new Error(names.join())); });
    assert.equal(queryOf(page).get("sort"), "spec.train.milestones");
    for (const id of ids) await removeJob(server, id);
  });
});

describe("reasons", () => {
  testInFullRun("wrap on a narrow phone, and short reasons are never cut", async () => {
    const waiting = (await server.ask("/jobs", spec("waits", 1, 100))).id, cancelled = (await server.ask("/jobs", { ...spec("over", 1, 100), tags: ["a-tag-that-is-long-enough-to-take-all"] })).id;
    await server.ask(`/jobs/${cancelled}/cancel`, {});
    const page = await browser.page(server, "/jobs", { viewport: { width: 320, height: 800 } }), reason = (id) => page.locator(`tr[data-id="${id}"] [data-f=reason]`);
    await until("both rows give a reason", async () => /place \d/.test(await reason(waiting).textContent()) && /cancelled on request/.test(await reason(cancelled).textContent()));
    assert.ok(await reason(waiting).evaluate((node) => node.scrollWidth <= node.clientWidth && node.clientHeight > 30), "the reason wraps");
    await page.setViewportSize({ width: 1024, height: 800 });
    assert.ok(await reason(cancelled).evaluate((node) => node.scrollWidth <= node.clientWidth), "the short reason is not cut");
    await page.end();
    for (const id of [waiting, cancelled]) await removeJob(server, id);
  });
});

describe("long names", () => {
  testInFullRun("are cut between two words, with the whole name in the tooltip, in rows of equal height", async () => {
    const names = ["imagenet/resnet50-lr0.1-wd0.0001_a-very-long-name-that-goes-on-and-on/of-a-run/seed-3.take-two", `${"a sentence of words ".repeat(7)}and its end`, "x".repeat(120)], ids = [];
    for (const name of names) ids.push((await server.ask("/jobs", spec(name, 1, 100))).id);
    const page = await browser.page(server, "/jobs"), link = (n) => page.locator(`tr[data-id="${ids[n]}"] [data-f=name]`);
    await until("the jobs are listed", async () => (await link(2).count()) === 1);
    assert.equal(await link(0).locator(".cut-tail").textContent(), "-3.take-two");
    assert.equal(await link(1).locator(".cut-tail").textContent(), "and its end");
    assert.equal(await link(2).locator(".cut-tail").textContent(), "x".repeat(12));
    for (const [n, name] of names.entries()) {
      assert.equal(await link(n).textContent(), name);
      assert.equal(await link(n).getAttribute("title"), name);
    }
    const heights = await page.locator("#rows tr").evaluateAll((rows) => rows.map((row) => row.getBoundingClientRect().height));
    assert.ok(Math.max(...heights) - Math.min(...heights) < 1, heights.join());
    await page.end();
    // On a job's page, the name wraps between two words. `starts`: positions in text nodes at which the lines after the first begin.
    const phone = await browser.page(server, `/jobs/${ids[0]}`, { viewport: { width: 390, height: 844 } });
    const starts = await until("the name wraps", () => phone.locator("#name").evaluate((name) => {
      const range = document.createRange(), lines = [], walk = document.createTreeWalker(name, NodeFilter.SHOW_TEXT);
      let top = -Infinity;
      for (let node = walk.nextNode(); node; node = walk.nextNode()) for (let i = 0; i < node.length; i++) {
        range.setStart(node, i);
        range.setEnd(node, i + 1);
        const box = range.getBoundingClientRect();
        if (box.top > top + 5) { lines.push(i); top = box.top; }
      }
      return lines.length > 1 && lines.slice(1);
    }));
    // Each part of the name is a separate text node, and no line begins within a node.
    assert.deepEqual([...new Set(starts)], [0], JSON.stringify(starts));
    await phone.end();
    for (const id of ids) await removeJob(server, id);
  });
});

/** Returns where the pixels of a node's text end (`end`, from the node's left edge), and where they must end (`expected`): at the
 *  end of the ellipsis that follows the last word that fits. */
async function measureCut(page, node) {
  const box = await node.boundingBox(), png = (await page.screenshot({ clip: box })).toString("base64");
  return node.evaluate(async (node, png) => {
    const image = await createImageBitmap(new Blob([Uint8Array.from(atob(png), (c) => c.charCodeAt(0))])), ctx = new OffscreenCanvas(image.width, image.height).getContext("2d", { willReadFrequently: true });
    ctx.drawImage(image, 0, 0);
    const { data, width, height } = ctx.getImageData(0, 0, image.width, image.height), style = getComputedStyle(node);
    let end = 0;
    for (let x = 0; x < width; x++) for (let y = 0; y < height; y++) { const i = 4 * (y * width + x); if (Math.abs(data[i] - data[0]) + Math.abs(data[i + 1] - data[1]) + Math.abs(data[i + 2] - data[2]) > 150) end = x + 1; }
    ctx.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
    const widthOf = (text) => ctx.measureText(text).width, whole = node.textContent, available = node.getBoundingClientRect().width;
    // Positions between words: before a slash, a dash or an underscore, and after a space.
    const ends = [...whole].map((_, i) => i).filter((i) => i && ((/[/_-]/.test(whole[i]) && !/[/_-]/.test(whole[i - 1])) || (whole[i - 1] === " " && whole[i] !== " ")));
    const shown = ends.filter((i) => widthOf(`${whole.slice(0, i).trimEnd()}…`) <= available).at(-1);
    const spaces = /\s$/.test(whole.slice(0, shown)) ? widthOf(" ") : 0;
    return { isCut: node.scrollWidth > node.clientWidth, end, expected: widthOf(`${whole.slice(0, shown)}…`) - spaces, text: whole.slice(0, shown) };
  }, png);
}

describe("a cut name", () => {
  testInFullRun("ends between two words before the ellipsis, at any width", async () => {
    const names = ["imagenet/resnet50-lr0.1-wd0.0001_a-very-long-name-that-goes-on-and-on/of-a-run/seed-3.take-two", "data_of_last_winter/with_augmentation/and_without_it/on_eight_cards/and_once_more/seed_31415"], ids = [];
    for (const name of names) ids.push((await server.ask("/jobs", { ...spec(name, 1, 100), project: "a-project-with-a-name-of-forty-characters" })).id);
    const page = await browser.page(server, "/jobs");
    await until("the jobs are listed", () => page.locator(`tr[data-id="${ids[1]}"] .cut-head`).first().isVisible());
    for (const width of [1024, 1240, 1290, 1440]) {
      await page.setViewportSize({ width, height: 900 });
      for (const id of ids) {
        const { isCut, end, expected, text } = await measureCut(page, page.locator(`tr[data-id="${id}"] [data-f=name] .cut-head`));
        assert.ok(isCut, `at ${width} the name is cut`);
        assert.ok(Math.abs(end - expected) < 4, `at ${width} the text “${text}…” ends at ${end} pixels, must end at ${expected}`);
      }
    }
    await page.goto(`${server.url}/jobs?group_by=project`);
    const group = page.locator(".group-name", { hasText: "a-project" });
    await until("groups are shown", () => group.isVisible());
    assert.equal(await group.locator(".cut-tail").textContent(), "-characters");
    assert.equal(await group.locator("span").first().getAttribute("title"), "a-project-with-a-name-of-forty-characters");
    await page.end();
    for (const id of ids) await removeJob(server, id);
  });

  testInFullRun("in an added column keeps its end, with the whole text in the tooltip", async () => {
    const body = spec("short", 1, 100), { id } = await server.ask("/jobs", body), page = await browser.page(server, "/jobs?columns=progress,project,model.arch,train.label_smoothing");
    await server.ask(`/jobs/${id}/cancel`, {});
    const ofProject = await server.ask("/jobs", { ...body, name: "of a long project", project: "pictures-of-last-winter" });
    const cell = page.locator(`tr[data-id="${ofProject.id}"] .c-extra[data-key=project] > span`);
    await until("the cell has its value", async () => (await cell.textContent()) === "pictures-of-last-winter");
    assert.equal(await cell.locator(".cut-tail").textContent(), "-winter");
    assert.equal(await cell.getAttribute("title"), "pictures-of-last-winter");
    assert.equal(await page.locator("thead .c-extra").nth(2).locator(".cut-tail").textContent(), "_smoothing");
    const boxes = await cell.evaluate((node) => [node, node.querySelector(".cut-tail")].map((part) => part.getBoundingClientRect().right));
    assert.ok(boxes[1] <= boxes[0] + 0.5, "the end of the text is visible");
    await page.end();
    for (const gone of [id, ofProject.id]) await removeJob(server, gone);
  });
});

describe("jobs that wait", () => {
  testInFullRun("show their place in the queue and the reason why they wait", async () => {
    const { id } = await server.ask("/jobs", spec("patient", 1, 100)), row = (page) => page.locator(`tr[data-id="${id}"] [data-f=reason]`);
    const page = await browser.page(server, "/jobs");
    await until("the job is the first", async () => /^place 1 in the queue · /.test(await row(page).getAttribute("title")));
    const urgent = await server.ask("/jobs", { ...spec("urgent", 1, 100), priority: 5 });
    await until("another job comes first", async () => /^place 2 in the queue · /.test(await row(page).getAttribute("title")));
    const { queue, reason } = await until("the API gives the same place", async () => { const job = await server.job(id); return job.queue?.place === 2 && job; });
    assert.equal(queue.reason.words, reason);
    await server.ask(`/jobs/${urgent.id}/cancel`, {});
    await until("the job is the first again", async () => /^place 1 in the queue · /.test(await row(page).getAttribute("title")));
    const withoutScripts = await browser.page(server, "/jobs", { javaScriptEnabled: false });
    assert.match(await withoutScripts.locator(`tr[data-id="${id}"] [data-f=reason]`).textContent(), /^place 1 in the queue · /);
    await withoutScripts.end();
    for (const gone of [id, urgent.id]) await removeJob(server, gone);
  });
});
