// A server with an object store: the job's page marks checkpoints that are not uploaded yet.

import assert from "node:assert/strict";
import { mkdtemp, readdir, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { Browser, TestServer, until, untilLive } from "../test-server.mjs";

let server, browser, store;
before(async () => {
  store = await mkdtemp(join(tmpdir(), "lockstep-artifacts-"));
  [server, browser] = await Promise.all([TestServer.open({ options: ["--artifacts", store] }), Browser.open()]);
});
after(async () => { await browser?.close(); await server?.close(); await rm(store, { recursive: true, force: true }); });

describe("the checkpoints of a job", () => {
  test("are marked as uploading while the object store is unavailable, until they are stored", async () => {
    // A file in place of the store's folder makes uploads fail.
    await writeFile(join(store, "jobs"), "");
    const { id } = await server.submit({ name: "kept twice", ranks: 1, train: { steps: 200 }, data: { image_size: 28 } });
    const page = await browser.page(server, `/jobs/${id}`), marks = page.locator('#checkpoints [data-f="uploading"]');
    await untilLive(page);
    assert.ok(["queued", "starting", "running"].includes((await server.job(id)).state), "the job has no checkpoint yet");
    await until("the job succeeds without the store", async () => (await server.job(id)).state === "succeeded");
    await until("the checkpoint arrives on the open page and is marked", async () => (await marks.count()) > 0 && marks.first().isVisible());
    const laterPage = await browser.page(server, `/jobs/${id}`);
    assert.ok(await laterPage.locator('#checkpoints [data-f="uploading"]').first().isVisible(), "the checkpoint is also marked on a page that is opened later");
    await rm(join(store, "jobs"));
    for (const tab of [page, laterPage]) await until("the mark is gone", async () => !(await tab.locator('#checkpoints [data-f="uploading"]').first().isVisible()));
    assert.deepEqual(await readdir(join(store, "jobs")), [id]);
    const { checkpoints } = await server.ask(`/jobs/${id}/checkpoints`);
    assert.ok(checkpoints.every(({ stored }) => stored === "stored"));
  });
});
