// Groups of the list of jobs: their means, opening and closing, the URL and saved views; and the filter by owner.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { simulateAgent, spec } from "./agent.mjs";
import { queryOf, sql } from "./five-jobs.mjs";
import { assertViews } from "./looks.mjs";
import { Browser, TestServer, testInFullRun, until } from "./test-server.mjs";

let server, browser;
/** Columns: name, learning rate, seed, best accuracy (null: never evaluated), tags, owner. */
const JOBS = [
  ["a1", 0.1, 1, 0.80, ["base"], "ada"], ["a2", 0.1, 2, 0.82, ["base"], "ada"], ["a3", 0.1, 3, 0.90, ["base", "long"], "ben"],
  ["b1", 0.4, 1, 0.60, [], "ben"], ["b2", 0.4, 2, null, [], null], ["c1", 0.2, 1, 0.95, ["long"], null],
];

before(async () => {
  [server, browser] = await Promise.all([TestServer.open({ dataset: false, agent: false }), Browser.open()]);
  await simulateAgent(browser.chromium, server, 1);
  await server.ask("/jobs", { ...spec("holder", 1, 100), project: "held", train: { steps: 100, batch_size: 8, lr: 3 } });
  for (const [name, lr, seed, best, tags, owner] of JOBS) {
    const body = spec(name, 1, 100);
    Object.assign(body.train, { lr, seed });
    const { id } = await server.ask("/jobs", { ...body, project: "sweep", tags });
    await server.ask(`/jobs/${id}/cancel`, {});
    await until("the job is cancelled", async () => (await server.job(id)).state === "cancelled");
    if (best !== null) sql(server, `UPDATE jobs SET best = '{"value":${best},"step":9,"epoch":1}', last = json_set(last, '$.loss', ${1 - best}) WHERE id = '${id}'`);
    if (owner) sql(server, `UPDATE jobs SET owner = '${owner}' WHERE id = '${id}'`);
  }
});
after(async () => { await browser?.close(); await server?.close(); });

const groupNames = (page) => page.locator(".group-head .group-name").allTextContents();
const untilGrouped = (page, expected) => until(`the groups are ${expected}`, async () => { const names = await groupNames(page); return names.join() === expected || Promise.reject(new Error(names.join())); });
const group = (page, name) => page.locator(".group", { has: page.locator(".group-name", { hasText: name }) });
const jobNames = (page, name) => group(page, name).locator("tr[data-id] [data-f=name]").allTextContents();

describe("groups of the list", () => {
  testInFullRun("have heads of equal height, whatever states their jobs are in", async () => {
    const page = await browser.page(server, "/jobs"), states = { running: 1, queued: 12, restarting: 1, paused: 2, succeeded: 240, failed: 3, cancelled: 10 };
    await page.route("**/api/v1/jobs/groups?*", async (route) => {
      const response = await route.fetch(), body = await response.json();
      Object.assign(body.groups[0], { states, jobs: 269 });
      await route.fulfill({ response, json: body });
    });
    for (const width of [1024, 1440]) {
      await page.setViewportSize({ width, height: 900 });
      await page.goto(`${server.url}/jobs?group_by=project`);
      const heads = page.locator(".group-head");
      await until("the groups are shown", async () => (await heads.count()) === 2);
      const heights = await heads.evaluateAll((rows) => rows.map((row) => Math.round(row.getBoundingClientRect().height)));
      assert.equal(new Set(heights).size, 1, `${heights} pixels at ${width}`);
      assert.match(await heads.first().locator(".c-progress").getAttribute("title"), /1 running · 12 queued · .*10 cancelled/);
    }
  });

  test("have means and standard deviations, are sorted by their best job, open and close, and are kept in the URL and in views", async () => {
    const page = await browser.page(server, "/jobs?project=sweep");
    await page.locator(".grouping summary").click();
    await page.getByLabel("Group by a setting").fill("train.lr");
    await page.keyboard.press("Enter");
    await page.keyboard.press("Escape");
    // The best group comes first.
    await untilGrouped(page, "train.lr 0.2,train.lr 0.1,train.lr 0.4");
    assert.equal(queryOf(page).get("group_by"), "train.lr");
    const ofRate01 = group(page, "train.lr 0.1"), cell = (name) => ofRate01.locator(`.group-head .${name}`);
    assert.equal(await cell("c-state").textContent(), "3 jobs");
    // The mean is (0.80 + 0.82 + 0.90) / 3 = 0.84, the variance (0.0016 + 0.0004 + 0.0036) / 2 = 0.0028.
    assert.equal(await cell("c-best").textContent(), "84.0 % ± 5.3 best 90.0 %");
    assert.equal(await cell("c-best").getAttribute("title"), "mean of 3 jobs, standard deviation 5.3 %, 80.0 % to 90.0 %");
    assert.equal(await group(page, "train.lr 0.4").locator(".group-head .c-best").textContent(), "60.0 % n 1", "one of the two jobs has a best accuracy");
    assert.equal(await cell("c-progress").textContent(), "3 cancelled");
    await page.getByRole("columnheader", { name: "Best accuracy" }).getByRole("button").click();
    await untilGrouped(page, "train.lr 0.4,train.lr 0.1,train.lr 0.2");
    await ofRate01.getByRole("button", { name: "train.lr 0.1" }).click();
    await until("the group's jobs are listed in the same order", async () => (await jobNames(page, "train.lr 0.1")).join() === "a1,a2,a3");
    assert.equal(queryOf(page).get("open"), "[[0.1]]");
    await page.reload();
    await until("the group is open after a reload", async () => (await jobNames(page, "train.lr 0.1")).join() === "a1,a2,a3");
    await until("no job is listed outside of a group", async () => (await page.locator("#rows tr").count()) === 0);
    await assertViews(page, "an open group");
    await page.setViewportSize({ width: 1440, height: 1000 });

    await page.locator(".saved-views summary").click();
    await page.getByLabel("Save what is shown now").fill("by rate");
    await page.keyboard.press("Enter");
    const href = await page.getByRole("link", { name: "by rate" }).getAttribute("href");
    await page.keyboard.press("Escape");
    const otherPerson = await browser.page(server, href);
    await until("another person sees the same groups", async () => (await jobNames(otherPerson, "train.lr 0.1")).join() === "a1,a2,a3");
    await otherPerson.end();

    await ofRate01.getByRole("button", { name: "train.lr 0.1" }).click();
    assert.deepEqual(await jobNames(page, "train.lr 0.1"), []);
    assert.equal(queryOf(page).get("open"), null);
    await page.getByRole("button", { name: "Remove the grouping by train.lr" }).click();
    await until("the jobs are listed without groups", async () => (await page.locator("#rows tr").count()) === 6 && (await page.locator(".group").count()) === 0);
  });

  test("are made by project, owner, tag or several keys, with a group for jobs without a value", async () => {
    const page = await browser.page(server, "/jobs?group_by=project&sort=name");
    await untilGrouped(page, "held,sweep");
    // By default, the group of the best job is the first: ben's best job is better than ada's, but the mean of ben's jobs is lower.
    await page.goto(`${server.url}/jobs?group_by=owner&project=sweep`);
    await untilGrouped(page, "no owner,ben,ada");
    for (const [by, expected] of [["owner", "ada,ben,no owner"], ["tag", "base,long,no tag"], ["tag,train.lr", "base · train.lr 0.1,long · train.lr 0.1,long · train.lr 0.2,no tag · train.lr 0.4,no tag · train.lr 3"]]) {
      await page.goto(`${server.url}/jobs?group_by=${by}&sort=name`);
      await untilGrouped(page, expected);
    }
    await page.goto(`${server.url}/jobs?group_by=tag&sort=name&project=sweep`);
    await untilGrouped(page, "base,long,no tag");
    for (const [name, jobs] of [["base", "a1,a2,a3"], ["long", "a3,c1"], ["no tag", "b1,b2"]]) {
      await group(page, name).getByRole("button", { name }).click();
      await until(`${name} has ${jobs}`, async () => (await jobNames(page, name)).join() === jobs);
    }
    // A job that belongs to two groups is selected in both.
    await group(page, "long").getByLabel("Select a3").check();
    assert.ok(await group(page, "base").getByLabel("Select a3").isChecked());
    assert.match(await page.locator("#bulk-count").textContent(), /^1 job/);
    await page.getByLabel("Select the jobs of base").check();
    await until("all jobs of the group are selected", async () => /^3 jobs/.test(await page.locator("#bulk-count").textContent()));
    await page.locator("[data-bulk=compare]").click();
    await page.waitForURL(/compare\?jobs=/);
  });

  testInFullRun("have a checkbox that shows whether all, some or none of their jobs are selected", async () => {
    const page = await browser.page(server, "/jobs?group_by=tag&sort=name&project=sweep"), box = page.getByLabel("Select the jobs of base");
    const state = () => box.evaluate(({ checked, indeterminate }) => (indeterminate ? "some" : checked ? "all" : "none"));
    await untilGrouped(page, "base,long,no tag");
    await box.check();
    await until("all jobs are selected", async () => (await page.locator("#bulk-count").textContent()) === "3 jobs selected");
    assert.equal(await state(), "all");
    await group(page, "base").getByLabel("Select a1").uncheck();
    assert.equal(await state(), "some");
    await page.locator("#choose-all").setChecked(true);
    assert.equal(await state(), "all");
    await page.locator("#choose-all").setChecked(false);
    assert.equal(await state(), "none");
    await box.check();
    await group(page, "base").getByRole("button", { name: "base" }).click();
    await until("closing the group clears its selection", async () => (await page.locator("#bulk").isHidden()) && (await state()) === "none");
  });

  test("follow changes of jobs, and report an unknown key", async () => {
    const page = await browser.page(server, "/jobs?group_by=project&sort=name&open=%5B%5B%22held%22%5D%5D", { expectedErrors: [/400/] });
    await until("the open group lists its job", async () => (await jobNames(page, "held")).join() === "holder");
    const { id } = await server.ask("/jobs", { ...spec("later", 1, 100), project: "held" });
    await until("a new job is counted and shown", async () => (await jobNames(page, "held")).join() === "holder,later" && (await group(page, "held").locator(".group-head .c-state").textContent()) === "2 jobs");
    await server.ask(`/jobs/${id}/cancel`, {});
    await until("the group counts the cancelled job", async () => /1 cancelled/.test(await group(page, "held").locator(".group-head .c-progress").textContent()));
    await server.ask(`/jobs/${id}`, undefined, "DELETE");
    await until("the deleted job is gone", async () => (await jobNames(page, "held")).join() === "holder" && (await group(page, "held").locator(".group-head .c-state").textContent()) === "1 job");
    await page.goto(`${server.url}/jobs?group_by=train.lrr`);
    await until("the nearest key is suggested", async () => /did you mean "train\.lr"\?/.test(await page.locator("#list-problem").textContent()));
    await page.goto(`${server.url}/jobs?group_by=train.lr&columns=best,model.arch,train.seed,val_loss&project=sweep&sort=name`);
    await untilGrouped(page, "train.lr 0.1,train.lr 0.2,train.lr 0.4");
    const extra = await group(page, "train.lr 0.1").locator(".group-head .c-extra").allTextContents();
    assert.deepEqual(extra, ["", "2 ± 1", ""], "only the seed has a mean: model.arch is text, and no job has a validation loss");
  });

  testInFullRun("load a hundred at a time, with means over all jobs of a group", async () => {
    sql(server, `WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1500)
      INSERT INTO jobs (id, name, state, priority, project, spec, ranks, last, best, created_at, finished_at, last_seq)
      SELECT substr(id, 1, length(id) - 5) || printf('%05d', i), 'many ' || i, 'succeeded', priority, 'many', json_set(spec, '$.train.seed', i % 150, '$.train.lr', 0.1 + i % 2), ranks, last,
        json_object('value', (i % 10) / 10.0, 'step', 9, 'epoch', 1), created_at - i, created_at, 1 FROM jobs, n WHERE jobs.name = 'a1'`);
    const page = await browser.page(server, "/jobs?project=many&group_by=train.seed&sort=name");
    const assertNameWidth = async (minimum, when) => { const width = await page.locator("thead th.c-name").evaluate((th) => th.getBoundingClientRect().width); assert.ok(width >= minimum, `the column Job has ${width} pixels ${when}`); };
    await until("100 groups are listed", async () => (await page.locator(".group").count()) === 100);
    await assertNameWidth(400, "while groups are left to load");
    await page.getByRole("button", { name: "More groups" }).click();
    await until("all groups are listed", async () => (await page.locator(".group").count()) === 150 && !(await page.getByRole("button", { name: "More groups" }).isVisible()));
    await page.goto(`${server.url}/jobs?project=many&group_by=train.lr&sort=name`);
    await untilGrouped(page, "train.lr 0.1,train.lr 1.1");
    const ofRate01 = group(page, "train.lr 0.1");
    assert.equal(await ofRate01.locator(".group-head .c-state").textContent(), "750 jobs", "jobs that are not loaded are counted, too");
    assert.equal(await ofRate01.locator(".group-head .c-best").textContent(), "40.0 % ± 28.3 best 80.0 %");
    await ofRate01.getByRole("button", { name: "train.lr 0.1" }).click();
    await ofRate01.getByRole("button", { name: "25 of 750: show more" }).click();
    await until("more jobs are listed", async () => (await jobNames(page, "train.lr 0.1")).length === 50);
    await assertNameWidth(400, "while jobs of a group are left to load");
    await page.goto(`${server.url}/jobs?project=many&sort=name`);
    await until("rows far from the screen are left out", async () => {
      await page.evaluate(() => scrollTo(0, document.documentElement.scrollHeight));
      return (await page.locator(".pad:visible").count()) > 0;
    });
    await assertNameWidth(400, "while rows far from the screen are left out");
  });
});

describe("the filter by owner", () => {
  test("offers owners with their numbers of jobs, and shows the chosen owner as a chip", async () => {
    const page = await browser.page(server, "/jobs?project=sweep&sort=name");
    await page.locator(".narrow summary").click();
    const owner = page.getByLabel("Owner");
    await until("owners are offered, in any order, as both have two jobs", async () => /^anybody,(ada \(2\),ben|ben \(2\),ada) \(2\)$/.test((await owner.locator("option").allTextContents()).join()));
    await owner.selectOption("ben");
    await until("the owner's jobs are listed", async () => (await page.locator("#rows [data-f=name]").allTextContents()).join() === "a3,b1");
    assert.equal(queryOf(page).get("owner"), "ben");
    await page.getByRole("button", { name: "Remove the filter of ben" }).click();
    await until("all jobs are listed", async () => (await page.locator("#rows tr").count()) === 6);
  });
});
