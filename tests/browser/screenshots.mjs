// Takes the screenshots of README.md and docs/: a real server, real jobs on real pictures, every page in both themes and on a phone.
//
//   LOCKSTEP_BIN=target/release/lockstep node tests/browser/screenshots.mjs [DIRECTORY]
//
// WIDTH (default 1440): width of pages in pixels, except on a phone.

import { cp, mkdir, rm, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { Browser, TestServer, losses, until } from "./test-server.mjs";

const OUT = process.argv[2] ?? new URL("../../docs/screenshots", import.meta.url).pathname;
const WIDE = { width: Number(process.env.WIDTH ?? 1440), height: 900 }, PHONE = { width: 390, height: 844 };

await mkdir(OUT, { recursive: true });
const [server, browser] = await Promise.all([TestServer.open({ slots: 4, dataset: false }), Browser.open()]);
// The screenshots show this path, so it has no part of a person's home directory.
const DATA = "/tmp/fashion-mnist";
try {
  await cp(new URL("../../assets/fashion-mnist", import.meta.url).pathname, DATA, { recursive: true });
  await server.ask("/datasets", { name: "fashion-mnist", path: DATA });
  const job = (name, ranks, train, fields = {}) => server.ask("/jobs", {
    name, model: { arch: "resnet20" }, data: { dataset: "fashion-mnist", validation: "test", crop_padding: 2, horizontal_flip: true },
    train: { epochs: 2, global_batch_size: 64, lr: 0.1, schedule: "one_cycle", weight_decay: 0.0005, ...train }, parallel: { ranks, device: "cpu" }, ...fields,
  });
  const untilFinished = (id) => until("the job has finished", async () => (await server.job(id)).state === "succeeded", 540_000);
  const mainJob = await job("fashion-resnet20", 2, {}, { log: { histograms: 20 } });
  const others = [await job("low-lr", 2, { lr: 0.01, epochs: 1 }), await job("nesterov", 2, { optimizer: "nesterov", epochs: 1 })];
  for (const { id } of [mainJob, ...others]) await untilFinished(id);
  await server.ask(`/jobs/${mainJob.id}`, { tags: ["baseline"], notes: "one_cycle to 0.1" }, "PATCH");
  for (const { id } of others) await server.ask(`/jobs/${id}`, { tags: ["sweep"] }, "PATCH");
  const running = await job("four-ranks", 4, { epochs: 40 });
  const queued = await job("next-in-line", 2, { epochs: 5 }, { priority: 5 });

  /** Saves a screenshot of the window, or with `clip` of the page's first `clip` pixels from the top. */
  const shot = async (name, path, { scheme = "light", viewport = WIDE, ready, clip } = {}) => {
    const page = await browser.page(server, path, { colorScheme: scheme, viewport, reducedMotion: "reduce" });
    await until(`${name} is ready`, () => page.locator("h1").isVisible());
    if (ready) await until(`${name} is ready`, () => ready(page));
    await page.waitForLoadState("networkidle").catch(() => {});
    const tools = await page.context().newCDPSession(page);
    const { data } = await tools.send("Page.captureScreenshot", { format: "webp", quality: 82, ...(clip ? { captureBeyondViewport: true, clip: { x: 0, y: 0, width: viewport.width, height: Math.min(clip, await page.evaluate(() => document.documentElement.scrollHeight)), scale: 1 } } : {}) });
    await writeFile(join(OUT, `${name}.webp`), Buffer.from(data, "base64"));
    await page.end();
  };
  const drawn = (points) => async (page) => Object.values(await losses(page))[0]?.points > points;
  await until("the job runs", async () => (await server.job(running.id)).step > 60, 240_000);
  for (const scheme of ["light", "dark"]) {
    await shot(`job-running-${scheme}`, `/jobs/${running.id}?smooth=0.6`, { scheme, clip: 1250, ready: drawn(60) });
    await shot(`jobs-${scheme}`, "/jobs", { scheme, ready: async (page) => (await page.locator("#rows tr").count()) === 5 && (await page.locator(".tag").count()) >= 3 });
    await shot(`queue-${scheme}`, "/queue", { scheme, ready: async (page) => (await page.getByText("next-in-line").count()) > 0 });
    await shot(`machines-${scheme}`, "/machines", { scheme, ready: async (page) => (await page.locator(".slots .busy").count()) === 4 });
  }
  await shot("phone-queue", "/queue", { viewport: PHONE, clip: 2400, ready: async (page) => (await page.getByText("next-in-line").count()) > 0 });
  await server.ask(`/jobs/${queued.id}/cancel`, {});
  await server.ask(`/jobs/${running.id}/cancel`, {});
  await until("slots are free", async () => (await server.job(running.id)).state === "cancelled");
  await server.ask(`/jobs/${mainJob.id}/evaluation`);
  const panels = [
    { title: "Loss and learning rate", metrics: ["loss", "lr"], columns: 2, smoothing: 0.8 }, { title: "Time of a step", metrics: ["step_ms", "all_reduce_ms"], smoothing: 0.8 },
    { title: "Machine", metrics: ["cpu_utilization"] }, { title: "Accuracy of each rank", metrics: ["accuracy"], lines: "ranks", smoothing: 0.9, columns: 2 },
  ];
  const compared = `/compare?jobs=${[mainJob, ...others].map((j) => j.id).join(",")}&smooth=0.9`;
  const evaluated = async (page) => (await page.locator("#behind figure").count()) > 10;
  for (const scheme of ["light", "dark"]) {
    await shot(`job-${scheme}`, `/jobs/${mainJob.id}?lines=mean&smooth=0.9`, { scheme, clip: 1250, ready: drawn(100) });
    await server.ask(`/jobs/${mainJob.id}/panels`, { panels }, "PUT");
    await shot(`panels-${scheme}`, `/jobs/${mainJob.id}?lines=mean&smooth=0.9`, { scheme, clip: 1500, ready: async (page) => drawn(100)(page) && (await page.locator("#custom-grid .chart[data-drawn]:not([data-drawn='0'])").count()) === panels.length });
    await server.ask(`/jobs/${mainJob.id}/panels`, { panels: [] }, "PUT");
    await shot(`histograms-${scheme}`, `/jobs/${mainJob.id}?tab=histograms`, { scheme, clip: 1700, ready: async (page) => (await page.locator("#histogram-chart").count()) === 1 });
    await shot(`network-${scheme}`, `/jobs/${mainJob.id}?tab=network`, { scheme, clip: 1900, ready: async (page) => (await page.locator("#network-panel tbody tr").count()) > 5 });
    await shot(`groups-${scheme}`, "/jobs?group_by=tag", { scheme, ready: async (page) => (await page.getByText("sweep").count()) > 0 });
    await shot(`evaluation-${scheme}`, `/jobs/${mainJob.id}?tab=evaluation`, { scheme, clip: 1800, ready: evaluated });
    await shot(`compare-${scheme}`, compared, { scheme, clip: 1300, ready: async (page) => (await page.locator("#parallel .job").count()) === 3 });
    await shot(`datasets-${scheme}`, "/datasets?pictures=fashion-mnist", { scheme, clip: 1000, ready: async (page) => (await page.locator("[data-g=grid] figure").count()) > 40 });
    await shot(`new-job-${scheme}`, "/jobs/new", { scheme, clip: 1000, ready: async (page) => (await page.locator("#plan").textContent()) !== "" });
  }
  for (const [name, path] of [["jobs", "/jobs"], ["job", `/jobs/${mainJob.id}`], ["evaluation", `/jobs/${mainJob.id}?tab=evaluation`], ["groups", "/jobs?group_by=tag"], ["network", `/jobs/${mainJob.id}?tab=network`], ["compare", compared], ["datasets", "/datasets?pictures=fashion-mnist"], ["machines", "/machines"], ["new-job", "/jobs/new"]]) {
    await shot(`phone-${name}`, path, { viewport: PHONE, clip: 2400, ready: name === "evaluation" ? evaluated : undefined });
  }
} finally {
  await browser.close();
  await server.close();
  await rm(DATA, { recursive: true, force: true });
}
