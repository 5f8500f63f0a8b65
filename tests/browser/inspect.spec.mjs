// Evaluations, predictions and pictures of datasets: pages agree with the command line and the files.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { copyFile, mkdir, mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { assertFits, savePicture, assertReadable } from "./looks.mjs";
import { BINARY, Browser, TestServer, testInFullRun, until } from "./test-server.mjs";

let server, browser, job, dir;
before(async () => {
  [server, browser, dir] = await Promise.all([TestServer.open(), Browser.open(), mkdtemp(join(tmpdir(), "lockstep-pictures-"))]);
  job = await server.submit({ name: "looked at", ranks: 1, data: { crop_padding: 3, horizontal_flip: true } });
  await until("a job has finished", async () => (await server.job(job.id)).state === "succeeded");
});
after(async () => { await browser?.close(); await server?.close(); await rm(dir, { recursive: true, force: true }); });

/** Writes the first `count` test pictures as PNG files, as the server shows them. Returns each file with the name of its class. */
async function savePictures(count) {
  const { samples, classes } = await server.ask(`/datasets/fashion-mnist/samples?split=test&limit=${count}`);
  return Promise.all(samples.map(async (s) => {
    const file = join(dir, `${s.index}.png`);
    await writeFile(file, Buffer.from(s.png, "base64"));
    return { file, name: classes[s.label] };
  }));
}

describe("a model", () => {
  test("is evaluated: scores agree with the matrix, and a cell of the matrix opens its pictures", async () => {
    const page = await browser.page(server, `/jobs/${job.id}?tab=evaluation`);
    await until("the evaluation is shown", () => page.locator("#evaluation-out").isVisible());
    const evaluation = await server.ask(`/jobs/${job.id}/evaluation`), [checkpoint] = (await server.ask(`/jobs/${job.id}/checkpoints`)).checkpoints;
    assert.equal(evaluation.samples, 187, "each validation picture is counted once");
    assert.equal(evaluation.confusion.flat().reduce((a, b) => a + b), 187);
    assert.ok(Math.abs(evaluation.accuracy - checkpoint.val_accuracy) < 1e-9, "the accuracy is that of the training's validation");
    const cells = (await page.locator("#matrix td").allTextContents()).map(Number);
    assert.deepEqual(cells.slice(1), evaluation.confusion.flat().map(Number), "the page shows the evaluation's matrix");
    assert.match(await page.locator("#evaluation-sum").textContent(), new RegExp(`${(evaluation.accuracy * 100).toFixed(2)} %( ± [0-9.]+| \\(at (least|most) [0-9.]+ %\\))? of 187 right · 95 % interval ${evaluation.interval.map((end) => `${(100 * end).toFixed(1)} %`).join(" to ")} · loss `));
    assert.ok(evaluation.interval[0] <= evaluation.accuracy && evaluation.accuracy <= evaluation.interval[1], `${evaluation.interval} contains ${evaluation.accuracy}`);
    // Computes recall from the matrix.
    for (const [i, c] of evaluation.classes.entries()) assert.ok(Math.abs(c.recall - evaluation.confusion[i][i] / Math.max(1, evaluation.confusion[i].reduce((a, b) => a + b))) < 1e-9);

    assert.equal(await page.locator("#behind-title").textContent(), "Most confident mistakes");
    await until("the mistakes are shown without a click", async () => (await page.locator("#behind figure").count()) === Math.min(24, evaluation.mistakes.length));
    assert.deepEqual(evaluation.mistakes.map((m) => m.confidence), evaluation.mistakes.map((m) => m.confidence).sort((a, b) => b - a));
    const [worst] = evaluation.mistakes;
    const names = evaluation.classes.map((c) => c.name), count = evaluation.confusion[worst.label][worst.predicted];
    await page.getByRole("button", { name: `${count} of ${names[worst.label]} taken for ${names[worst.predicted]}` }).click();
    await until("the cell's pictures are shown", async () => (await page.locator("#behind figure").count()) === Math.min(24, count));
    assert.match(await page.locator("#behind figure").first().textContent(), new RegExp(`${names[worst.predicted].replaceAll("/", "\\/")}.*is ${names[worst.label].replaceAll("/", "\\/")}`));
    assert.ok(await page.locator("#behind img").first().evaluate((img) => img.decode().then(() => img.naturalWidth > 0)), "the pictures can be decoded");
    await page.getByRole("button", { name: "Back to the most confident mistakes" }).click();
    assert.equal(await page.locator("#behind-title").textContent(), "Most confident mistakes");
  });

  testInFullRun("is evaluated by nearest neighbours", async () => {
    const page = await browser.page(server, `/jobs/${job.id}?tab=evaluation`), [checkpoint] = (await server.ask(`/jobs/${job.id}/checkpoints`)).checkpoints;
    await page.getByRole("button", { name: "Nearest neighbours" }).click();
    await until("the accuracy of nearest neighbours is shown", async () => /right by 20 nearest/.test(await page.locator("#neighbours-sum").textContent()));
    const near = await server.ask(`/jobs/${job.id}/evaluation/neighbours?checkpoint=${checkpoint.id}`);
    assert.equal(await page.locator("#neighbours-sum").textContent(), `${(near.weighted * 100).toFixed(2)} % ± ${(100 * Math.sqrt(near.weighted * (1 - near.weighted) / 187)).toFixed(1)} of 187 right by 20 nearest neighbours among ${near.gallery.toLocaleString("en")} training pictures, weighted by similarity; ${(near.majority * 100).toFixed(2)} % if all neighbours count the same`);
  });

  testInFullRun("shows the sample count of its accuracy, and a fork's learning rate before the fork is submitted", async () => {
    const page = await browser.page(server, `/jobs/${job.id}?tab=checkpoints`);
    assert.match(await page.locator("#checkpoints tr:first-child [data-f=accuracy]").textContent(), /^[0-9.]+ %( ± [0-9.]+| \(at (least|most) [0-9.]+ %\))? of 187/);
    await page.locator("#fork").click();
    assert.equal(await page.getByLabel("Settings to change").inputValue(), "train.steps = 80", "the form suggests more steps, because the job has trained all of its steps");
    assert.match(await page.locator("#fork-weights").getAttribute("href"), new RegExp(`^/jobs/new\\?from=${job.id}&set=model.pretrained=${job.id}-[0-9]+-[0-9]+$`));
    await page.getByLabel("Settings to change").fill("train.steps = 240\ntrain.schedule = one_cycle");
    await until("the fork's form describes the learning rate", async () => /^The learning rate changes where the run continues: .* and 0 at the last step, 240/.test(await page.locator("#fork-warnings").textContent()));
  });

  test("classifies several dropped pictures as the command line does", async () => {
    const files = await savePictures(3), page = await browser.page(server, `/jobs/${job.id}`);
    await page.locator(".title").getByRole("button", { name: "Predict" }).click();
    assert.ok(await page.locator("#classify-files").evaluate((input) => input === document.activeElement));
    await writeFile(join(dir, "notes.png"), "no picture");
    // Drops the files, as from a file manager.
    const dropped = await Promise.all([...files.map((f) => f.file), join(dir, "notes.png")].map(async (file) => [file.split("/").pop(), [...await readFile(file)]]));
    await page.locator("#drop").evaluate((zone, files) => {
      const data = new DataTransfer();
      for (const [name, bytes] of files) data.items.add(new File([new Uint8Array(bytes)], name, { type: "image/png" }));
      for (const kind of ["dragover", "drop"]) zone.dispatchEvent(new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true }));
    }, dropped);
    await until("each file has a result", async () => (await page.locator("#classify-results > li").count()) === 4);
    assert.match(await page.locator("#classify-reliability").textContent(), /^Validation accuracy of this checkpoint: [0-9.]+ %( ± [0-9.]+| \(at (least|most) [0-9.]+ %\))? of 187 pictures\.$/);
    const cards = page.locator("#classify-results > li");
    assert.match(await cards.nth(3).textContent(), /notes\.png.*not a JPEG, PNG/);
    for (const width of [390, 1440]) {
      await page.setViewportSize({ width, height: 1000 });
      await assertFits(page, `cards at ${width}`);
      await assertReadable(page, `cards at ${width}`);
      const boxes = await cards.evaluateAll((all) => all.map((card) => ({ card: card.getBoundingClientRect().toJSON(), cut: [...card.querySelectorAll("p, b, meter, .error")].filter((node) => node.getBoundingClientRect().right > card.getBoundingClientRect().right + 1).length })));
      for (const [i, { card, cut }] of boxes.entries()) {
        assert.equal(cut, 0, `an element overflows card ${i} at ${width}`);
        for (const { card: other } of boxes.slice(i + 1)) assert.ok(card.right <= other.left + 1 || other.right <= card.left + 1 || card.bottom <= other.top + 1 || other.bottom <= card.top + 1, `cards overlap at ${width}`);
      }
      assert.ok(await cards.nth(3).getByText("notes.png", { exact: true }).isVisible(), `the unreadable file is named at ${width}`);
      await savePicture(page, `classified-${width}`);
    }
    const predicted = JSON.parse(execFileSync(BINARY, ["predict", "--server", server.url, "--data-dir", server.dir, "--json", job.id, ...files.map((f) => f.file)]));
    for (let i = 0; i < 3; i++) {
      const lines = cards.nth(i).locator("ol li");
      assert.equal(await lines.count(), 5, "the five most probable classes are listed");
      assert.equal(await lines.first().locator("span").textContent(), predicted[i].classes[0].class);
      assert.ok(Math.abs(Number(await lines.first().locator("b").getAttribute("title")) - predicted[i].classes[0].probability) < 1e-6);
    }
    const local = JSON.parse(execFileSync(BINARY, ["predict", "--json", "--model", join(server.dir, "jobs", job.id, "checkpoints", "1-40"), files[0].file]));
    assert.deepEqual(local[0].classes, predicted[0].classes, "prediction without a server gives the same result");
  });

  test("is registered under a name on its job's page, and the name's alias is moved to another version", async () => {
    const page = await browser.page(server, `/jobs/${job.id}`, { expectedErrors: [/422/] }), dialog = page.locator("#register-dialog"), version = (n) => page.locator(`tr[data-version="${n}"]`);
    await page.locator("#checkpoints tr").first().getByRole("button", { name: "Register: checkpoint 1-40", exact: true }).click();
    assert.equal(await dialog.getByRole("heading").textContent(), "Register checkpoint 1-40");
    await dialog.getByLabel("Model", { exact: true }).fill("two words");
    await dialog.getByRole("button", { name: "Register", exact: true }).click();
    await until("the mistake in the name is shown", async () => /^has a space: .*two-words$/.test(await dialog.locator(".field", { hasText: "Model" }).locator(".error").textContent()));
    await dialog.getByLabel("Model", { exact: true }).fill("clothes");
    await dialog.getByLabel("Description", { exact: true }).fill("the first try");
    await dialog.getByRole("button", { name: "Register", exact: true }).click();
    await page.waitForURL(`${server.url}/models/clothes`);
    const text = await version(1).innerText();
    for (const part of ["1-40 of looked at", " of 187 pictures", "fashion-mnist", "the first try"]) assert.ok(text.includes(part), `${part} in ${text}`);
    assert.equal(await version(1).getByRole("link", { name: "1-40 of looked at" }).getAttribute("href"), `/jobs/${job.id}?checkpoint=${job.id}-1-40`);
    for (const name of ["Download the weights of version 1", "Download version 1 as ONNX"]) {
      const file = await version(1).getByRole("link", { name }).getAttribute("href");
      assert.ok((await page.request.get(`${server.url}${file}`)).ok(), name);
    }
    // The form suggests the alias champion.
    const setAlias = page.locator("#alias").getByRole("button", { name: "Set", exact: true }), alias = (n) => version(n).locator(".tag");
    await setAlias.click();
    await until("version 1 is the champion", async () => (await alias(1).allTextContents()).join() === "champion");
    await server.ask("/models", { name: "clothes", job: job.id });
    await page.reload();
    await page.getByLabel("Version", { exact: true }).selectOption("2");
    await setAlias.click();
    await until("the alias has moved to version 2", async () => (await alias(2).allTextContents()).join() === "champion" && (await alias(1).count()) === 0);
    await page.goto(`${server.url}/jobs/new`);
    await page.getByLabel("Pretrained weights", { exact: true }).focus();
    const offered = () => page.locator("#weights option").evaluateAll((all) => all.map((option) => option.value).join());
    await until("the form suggests the model and the checkpoint", async () => (await offered()) === `models:/clothes@champion,${job.id}-1-40,resnet18,resnet34,resnet50,resnet101,resnet152`);
    await page.goto(`${server.url}/models/clothes`);
    await version(2).getByRole("link", { name: "Fine-tune version 2" }).click();
    await page.waitForURL(/\/jobs\/new/);
    // Pictures are prepared as the job that trained the weights prepared them.
    assert.equal(await page.getByLabel("Recipe", { exact: true }).inputValue(), "finetune");
    assert.deepEqual(await Promise.all(["image_size", "crop_padding"].map((key) => page.locator(`[name="data.${key}"]`).inputValue())), ["8", "3"]);
    await page.goto(`${server.url}/models`);
    assert.match(await page.locator("tr[data-model=clothes]").innerText(), /^clothes\s+champion → 2\s+2\s.* of 187 pictures\s+looked at/);
    await page.getByRole("link", { name: "clothes", exact: true }).click();
    // A button acts only when the page's script has run.
    await page.waitForURL(`${server.url}/models/clothes`);
    await version(1).getByRole("button", { name: "Remove version 1" }).click();
    await page.getByRole("button", { name: "Remove it" }).click();
    await until("version 1 is removed", async () => (await version(2).isVisible()) && (await version(1).count()) === 0);
    await page.waitForLoadState();
    await version(2).getByRole("button", { name: "Remove the alias champion" }).click();
    await until("the alias is removed", async () => (await version(2).isVisible()) && (await alias(2).count()) === 0);
    await page.waitForLoadState();
    await version(2).getByRole("button", { name: "Remove version 2" }).click();
    await page.getByRole("button", { name: "Remove it" }).click();
    await page.waitForURL(`${server.url}/models`);
  });

  testInFullRun("is downloaded with all files, and is evaluated from its row", async () => {
    const page = await browser.page(server, `/jobs/${job.id}`);
    const row = page.locator("#checkpoints tr").first();
    await row.getByText("Download", { exact: true }).click();
    for (const name of ["Weights", "ONNX", "Optimizer", "State"]) {
      const link = new URL(await row.getByRole("link", { name }).getAttribute("href"), page.url());
      assert.ok((await page.request.get(link.href)).ok(), name);
    }
    const files = [];
    page.on("download", (d) => files.push(d.suggestedFilename()));
    await row.getByRole("button", { name: /Everything/ }).click();
    await until("all four files are downloaded", async () => files.length === 4);
    assert.ok(files.every((name) => /^looked-at-\d+-\d+-(model|optimizer|state|MANIFEST)\.\w+$/.test(name)), files.join());
    await row.getByRole("button", { name: /Evaluate/ }).click();
    await until("the evaluation opens", () => page.locator("#evaluation-out").isVisible());
    assert.equal(new URL(page.url()).searchParams.get("tab"), "evaluation");
  });
});

describe("data", () => {
  test("is shown by split and class, and with a job's augmentation", async () => {
    const page = await browser.page(server, "/datasets");
    const { info } = await server.ask("/datasets/fashion-mnist"), card = page.locator("[data-dataset=fashion-mnist]");
    const train = info.splits.find((s) => s.name === "train"), row = card.locator("tr", { hasText: "Sandal" });
    const preview = card.locator("[data-g=first] figcaption");
    await until("eight pictures of eight classes are shown", async () => new Set(await preview.allTextContents()).size === 8);
    assert.ok(await row.isVisible(), "a short list of classes is open");
    assert.ok((await row.textContent()).includes(train.per_class[info.classes.indexOf("Sandal")].toLocaleString("en")), "pictures of each class are counted");
    assert.match(await card.textContent(), new RegExp(info.mean[0].toFixed(3)), "the mean is shown");
    await page.getByText("Pictures", { exact: true }).click();
    const figures = page.locator("[data-g=grid] figure");
    await until("pictures are shown", async () => (await figures.count()) === 48);
    const classes = async () => (await figures.locator("figcaption span:first-child").allTextContents());
    assert.ok(new Set(await classes()).size > 5, "the pictures are of most classes");
    const shuffled = (await figures.allTextContents()).join();
    await card.getByRole("button", { name: "Shuffle" }).click();
    await until("pictures in another random order are shown", async () => (await figures.count()) === 48 && (await figures.allTextContents()).join() !== shuffled);
    assert.ok(new Set(await classes()).size > 5);
    await card.getByRole("button", { name: "More" }).click();
    await until("the next pictures are shown", async () => (await figures.count()) === 96);
    assert.equal(new Set(await figures.allTextContents()).size, 96, "no picture is shown twice");
    await page.locator("[data-g=order]").selectOption({ label: "as stored" });
    await until("pictures are shown in stored order", async () => /number 0$/.test(await figures.first().textContent()));
    await page.locator("[data-g=class]").selectOption("Sandal");
    await until("only pictures of the class are shown", async () => (await figures.count()) > 0 && (await figures.allTextContents()).every((t) => t.startsWith("Sandal")));
    await page.locator("[data-g=split]").selectOption("test");
    await until("pictures of the other split are shown", async () => /of \d+/.test(await page.locator("[data-g=note]").textContent()) && (await figures.count()) > 0);
    await until("the dataset's job is offered", async () => (await page.locator("[data-g=augmented] option").count()) === 2);
    await page.locator("[data-g=augmented]").selectOption(job.id);
    await until("five versions of each picture are shown", async () => (await figures.count()) === 40);
    const versions = await page.locator("[data-g=grid] img").evaluateAll((all) => all.slice(0, 5).map((i) => i.src));
    assert.ok(new Set(versions).size > 1, "the versions differ");
    const repeated = await server.ask(`/datasets/fashion-mnist/samples?augmented=${job.id}&limit=40`);
    assert.deepEqual(repeated.samples.slice(0, 5).map((s) => `data:image/png;base64,${s.png}`), versions, "the augmentation is seeded");
  });

  test("with a broken picture is accepted, and the picture is named", async () => {
    const [picture] = await savePictures(1), folder = join(dir, "pets");
    for (const name of ["cat", "dog"]) {
      await mkdir(join(folder, "train", name), { recursive: true });
      for (let i = 0; i < 3; i++) await copyFile(picture.file, join(folder, "train", name, `${i}.png`));
    }
    await writeFile(join(folder, "train/dog/torn.png"), "no picture");
    const page = await browser.page(server, "/datasets");
    await page.getByLabel("Name", { exact: true }).fill("pets");
    await page.getByLabel("Folder on the training machine").fill(folder);
    await page.getByRole("button", { name: "Add", exact: true }).click();
    const card = page.locator("[data-dataset=pets]");
    await until("the dataset is registered", () => card.isVisible());
    await card.locator(".broken summary").click();
    assert.match(await card.locator(".broken summary").textContent(), /^1 /);
    assert.match(await card.locator(".broken li").textContent(), /torn\.png.*\S/);
  });

  test("is uploaded as a zip file, shown, and removed with its files", async () => {
    const pictures = await savePictures(10), folder = join(dir, "photos");
    for (const [i, { file }] of pictures.entries()) {
      const classFolder = join(folder, i % 2 ? "even" : "odd");
      await mkdir(classFolder, { recursive: true });
      await copyFile(file, join(classFolder, `${i}.png`));
    }
    execFileSync("python3", ["-m", "zipfile", "-c", join(dir, "photos.zip"), folder]);
    // The dataset is smaller than the form's batch, so the form shows an error.
    const page = await browser.page(server, "/jobs/new", { expectedErrors: [/422/] });
    await page.getByRole("link", { name: "Upload pictures" }).click();
    const zipFile = page.getByLabel("Zip file");
    await zipFile.waitFor();  // The form is hidden until its script runs, and a file can be set in a hidden form.
    await zipFile.setInputFiles(pictures[0].file);
    await page.getByRole("button", { name: "Upload", exact: true }).click();
    await until("the mistake is shown beside the file", async () => /is not a zip file\. Pack a folder/.test(await page.locator("#u-file-error").textContent()));
    await page.getByLabel("Name of the dataset").fill("");
    await zipFile.setInputFiles(join(dir, "photos.zip"));
    assert.equal(await page.getByLabel("Name of the dataset").inputValue(), "photos");
    await page.getByRole("button", { name: "Upload", exact: true }).click();
    await page.waitForURL(`${server.url}/jobs/new?dataset=photos`);
    assert.match(await page.getByLabel("Dataset", { exact: true }).locator("option:checked").textContent(), /photos, 10 pictures, 2 classes/);
    await page.goto(`${server.url}/datasets`);
    const card = page.locator("[data-dataset=photos]");
    await card.scrollIntoViewIfNeeded();
    await until("eight pictures are shown", async () => (await card.locator("[data-g=first] img").count()) === 8);
    const { path } = await server.ask("/datasets/photos");
    assert.ok(await readFile(join(path, "odd/0.png")));
    await card.getByRole("button", { name: "Remove" }).click();
    assert.match(await page.locator("#confirm-text").textContent(), /^Its uploaded pictures are deleted\. /);
    await page.getByRole("button", { name: "Remove it" }).click();
    await until("the dataset is removed", async () => (await card.count()) === 0);
    await assert.rejects(readFile(join(path, "odd/0.png")), /ENOENT/);
  });

  testInFullRun("in a folder is inspected while the folder's path is typed", async () => {
    const page = await browser.page(server, "/datasets", { expectedErrors: [/422/] });
    await page.getByLabel("Folder on the training machine").fill("/nowhere/at/all");
    await until("the folder is reported as missing", async () => (await page.locator("#d-path-error").textContent()) !== "");
    await page.getByLabel("Folder on the training machine").fill(new URL("../../assets/fashion-mnist", import.meta.url).pathname);
    await until("the folder's format is shown", async () => /Found idx: [\d,]+ train.*28 × 28, 10 classes/.test(await page.locator("#add-status").textContent()));
    await page.getByLabel("Name", { exact: true }).fill("again");
    await page.getByRole("button", { name: "Add", exact: true }).click();
    await until("the dataset is registered", () => page.getByRole("heading", { name: "again" }).isVisible());
    const dialog = page.locator("#confirm");
    await until("a click opens the confirmation dialog", async () => {
      if (await dialog.isVisible()) return true;
      await page.locator("[data-dataset=again]").getByRole("button", { name: "Remove" }).click();
    });
    await page.getByRole("button", { name: "Remove it" }).click();
    await until("the dataset is removed", async () => !(await page.getByRole("heading", { name: "again" }).isVisible()));
    assert.ok(await readFile(new URL("../../assets/fashion-mnist/classes.txt", import.meta.url)), "the dataset's files are kept");
  });
});
