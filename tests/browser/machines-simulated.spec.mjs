// The page Machines with a simulated agent, which reports GPUs, measurements and findings; a machine that joins, and a machine that leaves.

import assert from "node:assert/strict";
import { execFileSync, spawn } from "node:child_process";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { after, before, describe, test } from "node:test";
import { machineSample, range, simulateAgent, spec } from "./agent.mjs";
import { assertAccessible } from "./looks.mjs";
import { BINARY, Browser, TestServer, testInFullRun, until, untilLive } from "./test-server.mjs";

let server, browser, agent;
/** The attempt that the first test starts and the test of findings ends. */
let runningAttempt;

/** Reports measurements with this utilisation of the CPU and of GPU 0. */
const reportSample = (share) => agent.say(machineSample(share, [
  { slot: 0, utilization: share, memory_used_bytes: Math.round(80e9 * share), temperature_celsius: 61.5, power_watts: 412.5 },
  { slot: 1, utilization: 0.015625, memory_used_bytes: 1e9, temperature_celsius: 33.5, power_watts: 71.5 },
]));

before(async () => {
  [server, browser] = await Promise.all([TestServer.open({ dataset: false, agent: false }), Browser.open()]);
  agent = await simulateAgent(browser.chromium, server, 2, { gpus: true });
});
after(async () => { await browser?.close(); await server?.close(); });

describe("machines with GPUs", () => {
  test("show each slot's job, measurements and charts", async () => {
    const body = spec("on a GPU", 1, 100);
    body.parallel.device = "cuda";
    runningAttempt = await agent.attempt((await server.ask("/jobs", body)).id);
    await reportSample(0.25);
    const page = await browser.page(server, "/machines"), slot = (n) => page.locator(`[data-slot="${n}"]`);
    await until("the first slot shows its measurements", async () => /25 %/.test(await slot(0).innerText()));
    for (const part of [/on a GPU/, /rank 0/, /20 GB/, /6[12] °C/, /41[23] W/]) assert.match(await slot(0).innerText(), part);
    for (const part of [/free/, /2 %/, /1\.0 GB/, /3[34] °C/, /7[12] W/]) assert.match(await slot(1).innerText(), part);
    // The server drops a sample that arrives too soon after the one before.
    await until("the measurements change", async () => {
      await reportSample(0.75);
      return /75 %/.test(await slot(0).innerText()) && /60 GB/.test(await slot(0).innerText());
    });
    await page.getByRole("button", { name: "10 min" }).click();
    for (const metric of ["utilization", "memory_used_bytes", "temperature_celsius", "power_watts"]) {
      await until(`${metric} of the first slot has a line`, async () => (await slot(0).locator(`[data-metric="${metric}"]`).getAttribute("d"))?.startsWith("M"));
    }
    for (const metric of ["memory_used_bytes", "disk_read_bytes_per_second", "network_sent_bytes_per_second"]) {
      await until(`${metric} of the machine has a line`, async () => (await page.locator(`.machine > .gauges [data-metric="${metric}"]`).getAttribute("d"))?.startsWith("M"));
    }
  });

  testInFullRun("show charts of the loss scale and the skipped steps for a float16 job", async () => {
    const body = spec("half", 1, 100);
    body.parallel.device = "cuda";
    body.train.precision = "fp16";
    const { id } = await server.ask("/jobs", body), page = await browser.page(server, `/jobs/${id}`);
    const heading = (name) => page.getByRole("heading", { name, exact: true });
    await untilLive(page);
    assert.ok(!(await heading("Loss scale").isVisible()), "the chart is hidden before its first point");
    const attempt = await agent.attempt(id);
    await agent.begin(attempt, { total_steps: 100 });
    await agent.reportSteps(attempt, 0, range(1, 4), { loss: (s) => 2 + 1 / s, loss_scale: (s) => (s === 1 ? 65536.5 : 32768.5), skipped_steps: (s) => (s === 1 ? 0.5 : 1.5) });
    for (const [name, title] of [["loss_scale", "Loss scale"], ["skipped_steps", "Skipped steps"]]) {
      await until(`${title} is drawn`, async () => (await heading(title).isVisible()) && Number(await page.locator(`#${name}-chart`).getAttribute("data-drawn")) > 0);
    }
    assert.match(await page.locator("#loss_scale-chart").getAttribute("aria-label") ?? "", /Loss scale/);
    await agent.endAttempt(attempt, { how: "succeeded", step: 100 });
  });

  test("show findings, and a version that differs from the server's", async () => {
    const page = await browser.page(server, "/machines"), warnings = page.locator(".warnings li");
    await until("the different version is shown", async () => /It runs version 0 and the server [\d.]+.*: install the same version on both/.test((await warnings.allTextContents()).join("\n")));
    await agent.say({ type: "findings", findings: [{ problem: true, text: "NCCL is missing: pip install nvidia-nccl-cu12" }, { problem: false, text: "Shared memory is small <b>here</b>" }] });
    await until("findings are listed, the worst first", async () => (await warnings.first().textContent()) === "NCCL is missing: pip install nvidia-nccl-cu12");
    assert.equal(await page.locator(".warnings li.bad").count(), 1);
    assert.ok((await warnings.allTextContents()).includes("Shared memory is small <b>here</b>"), "a finding's text is escaped");
    await agent.say({ type: "findings", findings: [] });
    await until("the finding is gone after a report without findings", async () => (await page.locator(".warnings li.bad").count()) === 0);
    await agent.endAttempt(runningAttempt, { how: "succeeded", step: 100 });
  });
});

describe("machines", () => {
  test("join by the commands that the page shows", async () => {
    const authServer = await TestServer.open({ dataset: false, agent: false, auth: true }), dir = await mkdtemp(join(tmpdir(), "lockstep-joins-"));
    const options = { cwd: dir, env: { ...process.env, PATH: `${dirname(BINARY)}:${process.env.PATH}` } };
    const page = await browser.page(authServer, "/machines");
    const commands = await page.locator(".join .command code").allTextContents(), createToken = commands.find((c) => /token create/.test(c)), joinMachine = commands.find((c) => /lockstep agent/.test(c));
    execFileSync("bash", ["-c", createToken], options);
    const agentProcess = spawn("bash", ["-c", `exec ${joinMachine}`], { ...options, stdio: "ignore" });
    const card = page.locator(".machine", { hasText: "node-1" });
    await until("the open page shows the machine as online", async () => /online/.test(await card.locator(".pill").first().textContent()));
    const exited = new Promise((done) => agentProcess.once("exit", done));
    agentProcess.kill("SIGTERM");
    await exited;
    await page.end();
    await authServer.close();
    await rm(dir, { recursive: true, force: true });
  });

  testInFullRun("that join need a reachable URL: the page explains --advertise and --listen", async () => {
    const page = await browser.page(server, "/machines"), joinCard = page.locator(".join");
    assert.match(await joinCard.innerText(), /only this machine reaches it/);
    assert.match(await joinCard.innerText(), /--advertise ADDRESS/);
    assert.match(await joinCard.innerText(), new RegExp(`lockstep serve --listen 0\\.0\\.0\\.0:${server.port} --tls-own-ca`));
  });

  test("can be removed once they are offline, after a confirmation", async () => {
    const page = await browser.page(server, "/machines"), card = page.locator(".machine"), remove = page.getByRole("button", { name: "Remove simulated" });
    await until("the machine is online", async () => /online/.test(await card.locator(".pill").first().textContent()));
    assert.equal(await remove.count(), 0, "an online machine has no button Remove");
    await agent.close();
    await until("the machine is offline", () => remove.isVisible());
    assert.ok((await card.locator(".slots li").allInnerTexts()).every((text) => /offline/.test(text)));
    await remove.focus();
    await remove.press("Enter");
    const dialog = page.getByRole("dialog", { name: "Remove simulated?" });
    await assertAccessible(page, "the confirmation");
    await dialog.getByRole("button", { name: "Keep it" }).click();
    assert.equal(await card.count(), 1);
    await remove.click();
    await dialog.getByRole("button", { name: "Remove it" }).click();
    await until("the machine is gone", async () => (await card.count()) === 0);
    await until("the page says that no machine has joined", () => page.getByRole("heading", { name: "No machine has joined" }).isVisible());
    assert.deepEqual((await server.ask("/agents")).agents, []);
  });
});
