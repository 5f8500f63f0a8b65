// The form of a new job: each error is shown beside its field, with and without scripts.

import assert from "node:assert/strict";
import { cp, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { fileURLToPath } from "node:url";
import { Browser, TestServer, testInFullRun, until } from "./test-server.mjs";

let server, browser;
before(async () => { [server, browser] = await Promise.all([TestServer.open(), Browser.open()]); });
after(async () => { await browser?.close(); await server?.close(); });

const errorOf = (page, label) => page.getByLabel(label, { exact: true }).locator("xpath=ancestor::div[@data-pointer]").locator(".error");

describe("the form", () => {
  test("shows an error beside its field while typing, and submits nothing until all errors are corrected", async () => {
    const page = await browser.page(server, "/jobs/new?dataset=nosuch", { expectedErrors: [/422/] });
    await until("the unknown dataset is named at once", async () => /^no dataset is called "nosuch"/.test(await errorOf(page, "Dataset").textContent()));
    await page.goto(`${server.url}/jobs/new`);
    const lr = page.getByLabel("Learning rate", { exact: true });
    const asksBeforeLeaving = () => page.evaluate(() => !dispatchEvent(new Event("beforeunload", { cancelable: true })));
    assert.equal(await asksBeforeLeaving(), false);
    await lr.fill("-1");
    assert.ok(await asksBeforeLeaving(), "the browser would lose what was typed");
    await until("the error is shown", async () => (await errorOf(page, "Learning rate").textContent()) !== "");
    assert.equal(await lr.getAttribute("aria-invalid"), "true");
    assert.equal(await errorOf(page, "Epochs").textContent(), "", "no other field has an error");
    await lr.fill("0.1");
    await until("the error is gone", async () => (await errorOf(page, "Learning rate").textContent()) === "");
    await lr.fill("fast");
    await page.getByLabel("Ranks", { exact: true }).fill("4096");
    await page.locator("details.more > summary").click();
    await page.getByLabel("Seed", { exact: true }).fill("-3");
    await page.locator("details.more > summary").click();
    await page.getByRole("button", { name: "Submit job" }).click();
    for (const label of ["Learning rate", "Ranks", "Seed"]) {
      await until(`an error is shown beside ${label}`, async () => (await errorOf(page, label).textContent()) !== "");
    }
    await until("the errors are listed", async () => (await page.locator("#mistakes a").count()) === 3);
    assert.ok(await page.getByLabel("Seed", { exact: true }).isVisible(), "the section with the field has opened");
    assert.match(await page.locator("#mistakes").textContent(), /things? to change/);
    assert.deepEqual((await page.locator("#mistakes a").allTextContents()).sort(), ["Learning rate", "Ranks", "Seed"]);
    assert.doesNotMatch(await page.locator("#spec-text").inputValue(), /private/, "a setting at its default is not written");
    assert.equal((await server.ask("/jobs")).jobs.length, 0);
  });

  test("has defaults as placeholders, finds a setting by its key, and restores what a preset replaced", async () => {
    const page = await browser.page(server, "/jobs/new", { expectedErrors: [/422/] });
    await page.locator("details.more > summary").click();
    const momentum = page.getByLabel("Momentum", { exact: true });
    assert.deepEqual([await momentum.inputValue(), await momentum.getAttribute("placeholder")], ["", "0.9"]);
    await page.getByRole("link", { name: "Recovery" }).click();
    assert.match(page.url(), /#more-recovery$/);
    await page.getByLabel("Search the settings").fill("min_ranks");
    assert.deepEqual(await page.locator(".more .field:visible label").allTextContents(), ["Fewest ranks"]);
    const search = page.getByLabel("Search the settings");
    await search.fill("train.lr");
    assert.equal(await page.locator("#found").textContent(), "Above: Learning rate", "a setting outside the section is found, too");
    await search.press("Enter");
    assert.ok(await page.getByLabel("Learning rate", { exact: true }).evaluate((input) => input === document.activeElement));
    await search.fill("");
    await momentum.fill("0.9");
    await until("the default is not written", async () => !/momentum/.test(await page.locator("#spec-text").inputValue()));
    await page.getByLabel("Recipe", { exact: true }).selectOption("imagenet");
    assert.equal(await page.getByLabel("Weight decay", { exact: true }).inputValue(), "0.0001");
    const name = page.getByLabel("Name", { exact: true }), jobFile = page.locator("#spec-text");
    await name.fill("my own");
    await until("the job file has the name", async () => /my own/.test(await jobFile.inputValue()));
    const before = await jobFile.inputValue();
    await page.getByRole("link", { name: /Fashion-MNIST/ }).click();
    assert.equal(await name.inputValue(), "fashion-resnet20");
    await page.getByRole("button", { name: "Undo" }).click();
    await until("all settings are restored, with their recipe", async () => (await jobFile.inputValue()) === before);
    assert.ok(await page.locator("#preset-done").isHidden());
  });

  testInFullRun("uses the dataset's validation split, and warns of its broken files before submission", async () => {
    const hub = join(server.dir, "hub");
    await cp(fileURLToPath(new URL("../data/parquet/hub", import.meta.url)), hub, { recursive: true });
    await writeFile(join(hub, "data/train-00002-of-00002.parquet"), "no pictures");
    await server.ask("/datasets", { name: "pets", path: hub });
    const page = await browser.page(server, "/jobs/new", { expectedErrors: [/422/] });
    const warnings = page.locator("#warnings"), broken = page.getByLabel("Broken files", { exact: true });
    assert.ok(!await warnings.isVisible());
    const lr = page.getByLabel("Learning rate", { exact: true }), suggested = await lr.inputValue() || await lr.getAttribute("data-default");
    await lr.fill(suggested);
    await page.getByLabel("Dataset", { exact: true }).selectOption("pets");
    await until("the form has the suggestions for the dataset", async () => (await page.getByLabel("Name", { exact: true }).inputValue()) === "pets" && (await broken.inputValue()) === "skip");
    assert.equal(await lr.inputValue(), suggested, "a typed value stays, even if it equals the suggestion before");
    assert.equal(await page.getByLabel("Validation", { exact: true }).inputValue(), "validation");
    assert.match(await page.locator("option[value=pets]").textContent(), /1 unusable file$/);
    await page.getByLabel("Network", { exact: true }).selectOption("resnet20");
    await page.getByLabel("Image size", { exact: true }).fill("16");
    await page.getByLabel("Global batch size", { exact: true }).fill("2");
    await page.getByLabel("Ranks", { exact: true }).fill("1");
    await page.locator("details.more > summary").click();
    await broken.selectOption("fail");
    await until("the warning is shown", async () => /1 file of pets could not be used.*is not a Parquet file/s.test(await warnings.textContent()));
    await broken.selectOption("skip");
    await until("the warning is gone", async () => !await warnings.isVisible());
    await page.getByRole("button", { name: "Submit job" }).click();
    await page.waitForURL(/\/jobs\/j\w+$/);
    const id = new URL(page.url()).pathname.split("/").pop();
    assert.equal((await server.job(id)).spec.data.validation, "validation");
    await server.ask(`/jobs/${id}/cancel`, {}).catch(() => { /* it may have ended already */ });
  });

  test("works without scripts", async () => {
    const page = await browser.page(server, "/jobs/new", { javaScriptEnabled: false, expectedErrors: [/422/] });
    await page.getByLabel("Name", { exact: true }).fill("no script");
    await page.getByLabel("Learning rate", { exact: true }).fill("-1");
    await page.getByRole("button", { name: "Submit job" }).click();
    assert.notEqual((await errorOf(page, "Learning rate").textContent()).trim(), "");
    assert.equal(await page.getByLabel("Name", { exact: true }).inputValue(), "no script", "entered text is kept");
    await page.getByLabel("Learning rate", { exact: true }).fill("0.1");
    await page.getByRole("button", { name: "Submit job" }).click();
    await page.waitForURL(/\/jobs\/j\w+$/);
    assert.equal(await page.locator("h1").textContent(), "no script");
    const id = new URL(page.url()).pathname.split("/").pop();
    await server.ask(`/jobs/${id}/cancel`, {});
  });

  test("is filled by a recipe, whose milestones scale with other epochs, and whose learning rate scales with the batch size", async () => {
    const page = await browser.page(server, "/jobs/new");
    await page.getByLabel("Global batch size", { exact: true }).fill("64");
    await page.getByLabel("Recipe", { exact: true }).selectOption("cifar");
    const epochs = page.getByLabel("Epochs", { exact: true });
    assert.equal(await epochs.inputValue(), "164");
    await epochs.fill("82");
    const jobFile = () => page.locator("#spec-text").inputValue();
    await until("the job file has the recipe and the epochs", async () => /^recipe = "cifar"$/m.test(await jobFile()) && /^epochs = 82$/m.test(await jobFile()));
    assert.doesNotMatch(await jobFile(), /milestones|weight_decay/, "settings of the recipe are not repeated");
    const lr = page.getByLabel("Learning rate", { exact: true });
    await until("the form shows the scaled learning rate", async () => (await lr.inputValue()) === "" && (await lr.getAttribute("placeholder")) === "0.05");
    await page.getByRole("button", { name: "Submit job" }).click();
    await page.waitForURL(/\/jobs\/j\w+$/);
    const id = new URL(page.url()).pathname.split("/").pop();
    const { spec } = await server.ask(`/jobs/${id}`);
    assert.deepEqual([spec.train.recipe, spec.train.epochs, spec.train.milestones, spec.train.lr], ["cifar", 82, [41, 61], 0.05]);
    await server.ask(`/jobs/${id}/cancel`, {});
    await page.goto(`${server.url}/jobs/new?dataset=${spec.data.dataset}`);
    assert.equal(await page.getByLabel("Name", { exact: true }).inputValue(), `${spec.name} (2)`, "the suggested name is not the name of another job");
  });

  test("submits a sweep that is edited in fields and in the job file, and the sweep's page compares its trials", async () => {
    const page = await browser.page(server, "/jobs/new", { expectedErrors: [/422/, /TypeError/] });
    await page.getByRole("link", { name: /Fashion-MNIST/ }).click();
    await page.locator("details.more > summary").click();
    for (const [label, value] of [["Epochs", ""], ["Steps", "20"], ["Image size", "8"], ["Global batch size", "8"], ["Ranks", "1"], ["Validation", "0.02"]]) {
      await page.getByLabel(label, { exact: true }).fill(value);
    }
    await page.locator("#sweep-settings > summary").click();
    const settings = page.getByLabel("Settings that differ", { exact: true }), error = page.locator("#sweep-parameters-error"), plan = page.locator("#plan");
    for (const [line, expected] of [["train.momentum = 0.5, 0.9\nlearning rate: 0.1 0.05", /^line 2 has no "=": write Learning rate = 0\.1, 0\.05$/], ["lr = 0.1, 0.05", /write train\.lr/], ["train.lr = 0.05, 0.02\nlearning rate = 0.1", /^line 2 has train\.lr again: write all its values in line 1$/], ["train.lr = 0.1, 0.1", /has the value 0\.1 twice/], ["data.folds = 3, 5", /^data\.fold: /], ["train.lr = 0.1, -1", /-1/], ["Learning rate = 0.1, 0.05\ntrain.momentum = 0.5 to 0.9", /a grid needs values/]]) {
      await settings.fill(line);
      await until(`the mistake in ${line} is shown`, async () => expected.test(await error.textContent()));
      assert.equal(await settings.getAttribute("aria-invalid"), "true");
    }
    await page.getByLabel("Method", { exact: true }).selectOption("random");
    await page.getByLabel("Largest number of trials", { exact: true }).fill("3");
    await until("the trials are counted", async () => /^3 trials · .* steps each/.test(await plan.textContent()));
    assert.match(await plan.textContent(), /time unknown until a job with this network, .* has trained 20 steps/, "no such job has run");
    assert.match(await page.locator("[data-pointer='/train/lr'] .hint").textContent(), / replaced by the sweep$/);
    assert.equal(await page.locator("[data-pointer='/train/epochs'] .hint b").count(), 0);
    const jobFile = page.locator("#spec-text");
    assert.match(await jobFile.inputValue(), /^\[sweep\.parameters\."train\.lr"\]\nvalues = \[0\.1, 0\.05\]$/m);
    await jobFile.fill((await jobFile.inputValue()).replace("max_trials = 3", "max_trials = 2"));
    await until("the field follows the text", async () => (await page.getByLabel("Largest number of trials", { exact: true }).inputValue()) === "2");
    await page.getByRole("button", { name: "Submit 2 trials" }).click();
    await page.waitForURL(/\/sweeps\/sweep-\w+$/);
    await until("the page shows the sweep's end", async () => (await page.locator("#sweep .title .pill").textContent()) === "finished");
    const { best, trials } = await server.ask(`/sweeps/${new URL(page.url()).pathname.split("/").pop()}`), lines = page.locator("#parallel .job");
    assert.deepEqual(trials.map(({ state }) => state), ["succeeded", "succeeded"]);
    assert.equal(best.metric, Math.max(...await Promise.all(trials.map(async ({ job }) => (await server.job(job)).best.value))));
    const clone = await page.request.get(`${server.url}/jobs/new?from=${best.job}`);
    assert.ok(!(await clone.text()).includes(page.url().split("/").pop()), "a clone of the best trial does not have the sweep's tag");
    const accuracy = `${(100 * best.metric).toFixed(1)} %`;
    assert.ok((await page.locator("#sweep [data-id=best] h2").textContent()).startsWith(`Best validation accuracy: ${accuracy} `));
    await until("each trial has a line with its results", async () => (await lines.count()) === 2 && (await page.locator(`#parallel [data-job="${best.job}"]`).getAttribute("aria-label")).includes(`best accuracy ${accuracy}`));
    assert.deepEqual((await lines.evaluateAll((all) => all.map((line) => line.dataset.job))).sort(), trials.map(({ job }) => job).sort());
    assert.ok(await lines.first().isVisible());
    assert.equal(await page.locator("#sweep tbody .swatch").count(), 2, "the table has the colours of the lines");
    assert.equal(await page.locator("#sweep thead").getByText("train.momentum").count(), 1);
    assert.match(await page.locator("#sweep .actions a").first().getAttribute("href"), new RegExp(`^/compare\\?jobs=${best.job},j\\w+$`));
    // A response that the script does not expect.
    await page.route("**/api/v1/jobs?tag=*", (route) => route.fulfill({ json: { jobs: null, next_cursor: null } }));
    await page.reload();
    await until("an error of the script is not reported as an error of the network", async () => /^This page's script has failed: /.test(await page.locator("#sweep-error").textContent()));
  });

  testInFullRun("accepts sizes by epoch, and suggests the nearest name for an unknown key of the job file", async () => {
    const page = await browser.page(server, "/jobs/new", { expectedErrors: [/422/] });
    const sizes = page.getByLabel("Image size", { exact: true }), jobFile = page.locator("#spec-text");
    await sizes.fill("1: 16, 2: 24");
    await until("the job file has the sizes", async () => /^image_size = \[\[1, 16\], \[2, 24\]\]$/m.test(await jobFile.inputValue()));
    await jobFile.fill((await jobFile.inputValue()).replace("[2, 24]", "[3, 32]"));
    await until("the field follows the text", async () => (await sizes.inputValue()) === "1: 16, 3: 32");
    await jobFile.fill('[data]\ndataset = "fashion-mnist"\nresize = 36\n');
    await until("the right name is suggested", async () => /no key is called "resize" here; did you mean "resize_size"/.test(await page.locator("#spec-error").textContent()));
  });

  testInFullRun("reports a missing dataset together with the other errors", async () => {
    const page = await browser.page(server, "/jobs/new", { expectedErrors: [/422/] });
    await page.locator("#spec-text").fill('name = "two mistakes"\n\n[data]\ndataset = "fashion-minst"\n\n[train]\nepochs = 1\nlr = -1\n');
    const error = page.locator("#spec-error");
    await until("both errors are shown", async () => /^data\.dataset: .*fashion-minst/m.test(await error.textContent()) && /^train\.lr: /m.test(await error.textContent()));
    await page.getByRole("button", { name: "Submit job" }).click();
    await until("submission shows both errors", async () => /fashion-minst/.test(await page.locator("main").innerText()) && /train\.lr: /.test(await error.textContent()));
    assert.equal((await server.ask("/jobs")).jobs.filter(({ name }) => name === "two mistakes").length, 0);
  });
});
