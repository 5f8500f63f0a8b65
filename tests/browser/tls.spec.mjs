// The dashboard as a team reaches it: https, through nginx, its websocket live. The certificate is one of `lockstep ca issue`, and
// Chromium is told that this one is to be trusted, by its public key.

import assert from "node:assert/strict";
import { execFileSync, spawn } from "node:child_process";
import { createHash, X509Certificate } from "node:crypto";
import { readFile, writeFile } from "node:fs/promises";
import { join as path } from "node:path";
import { after, before, describe, test } from "node:test";
import { chromium } from "playwright-core";
import { BINARY, Browser, CHROMIUM, CHROMIUM_ARGS, TestServer, freePort, losses, until } from "./test-server.mjs";

const HOST = "lockstep.example.org";
let server, outside, nginx, site;

before(async () => {
  const port = await freePort();
  server = await TestServer.open({ options: ["--trusted-proxy", "127.0.0.1", "--public-url", `https://${HOST}:${port}`] });
  const at = (name) => path(server.dir, name);
  const ca = (...args) => execFileSync(BINARY, ["ca", ...args, "--data-dir", server.dir], { stdio: "pipe" });
  ca("init");
  ca("issue", HOST, "--output", server.dir);
  await writeFile(at("nginx.conf"), `
    daemon off; master_process off; error_log stderr; pid ${at("nginx.pid")};
    events { worker_connections 256; }
    http {
      access_log off;
      client_body_temp_path ${at("body")}; proxy_temp_path ${at("proxy")}; fastcgi_temp_path ${at("fastcgi")};
      uwsgi_temp_path ${at("uwsgi")}; scgi_temp_path ${at("scgi")};
      map $http_upgrade $connection_upgrade { default upgrade; '' close; }
      server {
        listen 127.0.0.1:${port} ssl;
        ssl_certificate ${at(`${HOST}.crt`)};
        ssl_certificate_key ${at(`${HOST}.key`)};
        location / {
          proxy_pass http://127.0.0.1:${server.port};
          proxy_http_version 1.1;
          proxy_set_header Host $http_host;
          proxy_set_header Upgrade $http_upgrade;
          proxy_set_header Connection $connection_upgrade;
          proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
          proxy_set_header X-Forwarded-Proto $scheme;
          proxy_buffering off;
        }
      }
    }`);
  nginx = spawn("nginx", ["-p", server.dir, "-c", at("nginx.conf"), "-e", "stderr"], { stdio: ["ignore", "ignore", "pipe"] });
  let said = "";
  nginx.stderr.on("data", (text) => { said += text; });
  nginx.ended = new Promise((done) => nginx.once("exit", done));
  const key = new X509Certificate(await readFile(at(`${HOST}.crt`))).publicKey.export({ type: "spki", format: "der" });
  outside = new Browser();
  outside.chromium = await chromium.launchPersistentContext(at("profile"), {
    executablePath: CHROMIUM, viewport: { width: 1440, height: 1000 },
    args: [...CHROMIUM_ARGS, `--host-resolver-rules=MAP ${HOST} 127.0.0.1`, `--ignore-certificate-errors-spki-list=${createHash("sha256").update(key).digest("base64")}`],
  });
  site = { url: `https://${HOST}:${port}` };
  await until("nginx answers", async () => {
    assert.equal(nginx.exitCode, null, said);
    const page = await outside.chromium.newPage();
    try { return (await page.goto(`${site.url}/healthz`)).ok(); } finally { await page.close(); }
  }, 20_000);
});
after(async () => {
  await outside?.chromium?.close();
  nginx?.kill();
  await nginx?.ended;
  await server?.close();
});

describe("through nginx and TLS", () => {
  test("a job's page is live, its form submits, and the browser calls the way secure", async () => {
    const job = await server.submit({ name: "far away", train: { steps: 100_000 } });
    const { url: link } = await server.ask("/login-links", {});
    assert.ok(link.startsWith(`${site.url}/`), `a link that leads here: ${link}`);

    const page = await outside.chromium.newPage();
    page.faults = [];
    outside.watch(page, site, []);
    const sockets = [];
    page.on("websocket", (socket) => sockets.push(socket.url()));
    await page.goto(link);
    const [cookie] = await outside.chromium.cookies();
    assert.deepEqual([cookie.secure, cookie.httpOnly, cookie.sameSite], [true, true, "Lax"], "the session's cookie");
    const answer = await page.goto(`${site.url}/jobs/${job.id}`);
    assert.equal(answer.headers()["strict-transport-security"], "max-age=31536000");
    assert.equal(await page.evaluate(() => window.isSecureContext), true);
    const drawn = await until("it is drawn", async () => (await losses(page))["rank 0"]?.points);
    await until("it is live", async () => (await page.locator("#live").textContent()) === "live");
    assert.ok(sockets.length > 0 && sockets.every((url) => url.startsWith(`wss://${HOST}:`)), sockets.join(" "));
    await until("what comes is drawn", async () => (await losses(page))["rank 0"]?.points > drawn + 20);

    // A request that changes something, of our own page.
    const status = await page.evaluate(async (id) => (await fetch(`/api/v1/jobs/${id}/cancel`, { method: "POST" })).status, job.id);
    assert.ok(status < 300, String(status));
    assert.deepEqual(page.faults, [], "what the page did wrong");
    await page.close();
  });
});
