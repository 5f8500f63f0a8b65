// A server with an object store: the job's page says which checkpoints are not there yet.

import assert from "node:assert/strict";
import { mkdtemp, readdir, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { Browser, TestServer, until } from "../test-server.mjs";

let server, browser, store;
before(async () => {
  store = await mkdtemp(join(tmpdir(), "lockstep-artifacts-"));
  [server, browser] = await Promise.all([TestServer.open({ options: ["--artifacts", store] }), Browser.open()]);
});
after(async () => { await browser?.close(); await server?.close(); await rm(store, { recursive: true, force: true }); });

describe("the checkpoints of a job", () => {
  test("say that they are on their way into a store that is away, and no longer when they are there", async () => {
    // Where objects would be is a file.
    await writeFile(join(store, "jobs"), "");
    const { id } = await server.submit({ name: "kept twice", ranks: 1, train: { steps: 200 }, data: { image_size: 28 } });
    const page = await browser.page(server, `/jobs/${id}`), marks = page.locator('#checkpoints [data-f="uploading"]');
    await until("it is live", async () => (await page.locator("#live").textContent()) === "live");
    assert.ok(["queued", "starting", "running"].includes((await server.job(id)).state), "its checkpoint is still to come");
    await until("it is over, whatever the store does", async () => (await server.job(id)).state === "succeeded");
    await until("its checkpoint came while the page was open, and is marked", async () => (await marks.count()) > 0 && marks.first().isVisible());
    const again = await browser.page(server, `/jobs/${id}`);
    assert.ok(await again.locator('#checkpoints [data-f="uploading"]').first().isVisible(), "also on a page that is opened now");
    await rm(join(store, "jobs"));
    for (const one of [page, again]) await until("the mark is gone", async () => !(await one.locator('#checkpoints [data-f="uploading"]').first().isVisible()));
    assert.deepEqual(await readdir(join(store, "jobs")), [id]);
    const { checkpoints } = await server.ask(`/jobs/${id}/checkpoints`);
    assert.ok(checkpoints.every(({ stored }) => stored === "stored"));
  });
});
