// The dashboard over HTTPS: with certificate files, with the server's own CA, and behind nginx with the configuration of docs/team.md.
// Chromium trusts the CA, which is imported as docs/team.md says.

import assert from "node:assert/strict";
import { execFileSync, spawn } from "node:child_process";
import { mkdir, mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { request } from "node:https";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { describe, test } from "node:test";
import { chromium } from "playwright-core";
import { BINARY, Browser, CHROMIUM, CHROMIUM_ARGS, ROOT, TestServer, freePort, losses, until, untilLive } from "../test-server.mjs";

const HOST = "lockstep.example.org";

/** A server that the tests reach over TLS under the name `HOST`. */
class TlsServer extends TestServer {
  fetch(url, { method = "GET", headers = {}, body } = {}) {
    return new Promise((done, failed) => {
      const options = { method, headers: { ...headers, host: new URL(this.site).host }, servername: HOST, ca: this.authority };
      const sent = request(url.replace("http://", "https://"), options, async (response) => {
        let text = "";
        for await (const part of response.setEncoding("utf8")) text += part;
        done({ ok: response.statusCode < 300, status: response.statusCode, text: async () => text });
      });
      sent.on("error", failed).end(body);
    });
  }
}

const ca = (dir, ...args) => execFileSync(BINARY, ["ca", ...args, "--data-dir", dir], { stdio: "pipe" });

/** Creates a CA that is not the server's, and a certificate for `HOST`. */
async function issue(dir) {
  await mkdir(dir, { recursive: true });
  ca(dir, "init");
  ca(dir, "issue", HOST, "--output", dir);
  return { authority: join(dir, "ca/ca.crt"), certificate: join(dir, `${HOST}.crt`), key: join(dir, `${HOST}.key`) };
}

/** Returns the nginx configuration of docs/team.md with these ports and certificates. Each replaced text must occur once. */
async function nginxConfig(dir, { certificate, key }, nginxPort, serverPort) {
  let block = (await readFile(join(ROOT, "docs/team.md"), "utf8")).match(/```nginx\n(.*?)```/s)[1];
  for (const [text, value] of [
    ["listen 443 ssl;", `listen 127.0.0.1:${nginxPort} ssl;`],
    [`/etc/letsencrypt/live/${HOST}/fullchain.pem`, certificate],
    [`/etc/letsencrypt/live/${HOST}/privkey.pem`, key],
    ["http://127.0.0.1:7070", `http://127.0.0.1:${serverPort}`],
  ]) {
    assert.equal(block.split(text).length, 2, `docs/team.md has exactly once: ${text}`);
    block = block.replace(text, value);
  }
  const temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"].map((name) => `${name}_temp_path ${join(dir, name)};`).join(" ");
  return `daemon off; master_process off; error_log stderr; pid ${join(dir, "nginx.pid")};
    events { worker_connections 256; }
    http { access_log off; ${temporary}\n${block}}`;
}

/** The setups. Each returns options of `serve`, the file of the CA, and nginx with its port if it is used. */
const SETUPS = {
  "certificates of files": async (dir, port) => {
    const { authority, certificate, key } = await issue(join(dir, "elsewhere"));
    return { options: ["--tls-cert", certificate, "--tls-key", key, "--public-url", `https://${HOST}:${port}`], authority };
  },
  "the server's own CA": async (dir, port) => {
    ca(dir, "init");
    return { options: ["--tls-own-ca", "--public-url", `https://${HOST}:${port}`], authority: join(dir, "ca/ca.crt") };
  },
  "nginx in front": async (dir, port) => {
    const files = await issue(join(dir, "elsewhere")), nginxPort = await freePort();
    const config = join(dir, "nginx.conf");
    await writeFile(config, await nginxConfig(dir, files, nginxPort, port));
    const nginx = spawn("nginx", ["-p", dir, "-c", config, "-e", "stderr"], { stdio: ["ignore", "ignore", "inherit"] });
    nginx.ended = new Promise((done) => nginx.once("exit", done));
    return { options: ["--trusted-proxy", "127.0.0.1", "--public-url", `https://${HOST}:${nginxPort}`], authority: files.authority, nginxPort, nginx };
  },
};

/** Starts a Chromium with its own home, in which the CA is imported by the command of docs/team.md. */
async function browserThatTrusts(authority, home) {
  await mkdir(join(home, ".pki/nssdb"), { recursive: true });
  const env = { ...process.env, HOME: home };
  const docs = await readFile(join(ROOT, "docs/team.md"), "utf8");
  const command = docs.match(/Chrome on Linux: `(certutil\s[^`]+)`/)[1].replaceAll("\n", " ");
  execFileSync("bash", ["-c", `certutil -d sql:$HOME/.pki/nssdb -N --empty-password && ${command.replace("lockstep-ca.crt", `'${authority}'`)}`], { env, stdio: "pipe" });
  const browser = new Browser();
  browser.chromium = await chromium.launchPersistentContext(join(home, "profile"), {
    executablePath: CHROMIUM, timeout: 120_000, viewport: { width: 1440, height: 1000 }, env, args: [...CHROMIUM_ARGS, `--host-resolver-rules=MAP ${HOST} 127.0.0.1`],
  });
  return browser;
}

for (const [setup, prepare] of Object.entries(SETUPS)) {
  describe(`TLS with ${setup}`, () => {
    test("lets a browser sign in, follow a job and use the API", async (t) => {
      const dir = await mkdtemp(join(tmpdir(), "lockstep-browser-")), home = await mkdtemp(join(tmpdir(), "lockstep-home-"));
      t.after(() => rm(home, { recursive: true, force: true, maxRetries: 5 }));
      const port = await freePort();
      const { options, authority, nginxPort, nginx } = await prepare(dir, port);
      t.after(async () => { nginx?.kill(); await nginx?.ended; });
      const site = { url: `https://${HOST}:${nginxPort ?? port}` };
      const server = new (nginxPort ? TestServer : TlsServer)();
      Object.assign(server, { site: site.url, authority: await readFile(authority) });
      t.after(() => server.close());
      await server.open({ options, dir, port });
      const browser = await browserThatTrusts(authority, home);
      t.after(() => browser.close());

      // The link that `serve` prints.
      const link = server.output.match(/sign in: (\S+)/)[1];
      assert.ok(link.startsWith(`${site.url}/`), `the link has the public URL: ${link}`);
      const page = await browser.chromium.newPage();
      page.faults = [];
      browser.watch(page, site, []);
      const sockets = [];
      page.on("websocket", (socket) => sockets.push(socket.url()));
      await page.goto(link);
      assert.equal(new URL(page.url()).pathname, "/jobs", "the link signs in");
      const [cookie] = await browser.chromium.cookies();
      assert.deepEqual([cookie.secure, cookie.httpOnly, cookie.sameSite], [true, true, "Lax"], "the session's cookie");

      // Uses the API from the page.
      const api = (method, route, body) => page.evaluate(async ([method, route, body]) => {
        const response = await fetch(`/api/v1${route}`, { method, headers: body && { "content-type": "application/json" }, body: body && JSON.stringify(body) });
        return { status: response.status, content: await response.json().catch(() => null) };
      }, [method, route, body]);
      const created = await api("POST", "/jobs", server.spec({ name: "far away", train: { steps: 100_000 } }));
      assert.equal(created.status, 201, JSON.stringify(created.content));
      const { id } = created.content;
      const listed = await api("GET", "/jobs?fields=id,name");
      assert.deepEqual([listed.status, listed.content.jobs], [200, [{ id, name: "far away" }]]);

      const response = await page.goto(`${site.url}/jobs/${id}`);
      assert.equal(response.headers()["strict-transport-security"], "max-age=31536000");
      assert.equal(await page.evaluate(() => window.isSecureContext), true);
      const drawn = await until("the chart is drawn", async () => (await losses(page))["rank 0"]?.points);
      await untilLive(page);
      assert.ok(sockets.length > 0 && sockets.every((url) => url.startsWith(site.url.replace("https", "wss"))), sockets.join(" "));
      await until("new points are drawn", async () => (await losses(page))["rank 0"]?.points > drawn + 20);

      const cancelled = await api("POST", `/jobs/${id}/cancel`);
      assert.ok(cancelled.status < 300, JSON.stringify(cancelled));
      await until("the page shows the cancellation", async () => (await page.locator("#state").textContent()) === "cancelled");
      assert.deepEqual(page.faults, [], "the page had no errors");
    });
  });
}

test("a browser that has not imported the CA refuses the connection", async (t) => {
  const dir = await mkdtemp(join(tmpdir(), "lockstep-browser-")), port = await freePort();
  const { options, authority } = await SETUPS["the server's own CA"](dir, port);
  const server = new TlsServer();
  Object.assign(server, { site: `https://${HOST}:${port}`, authority: await readFile(authority) });
  t.after(() => server.close());
  await server.open({ options, dir, port, dataset: false });
  const browser = await chromium.launch({ executablePath: CHROMIUM, args: [...CHROMIUM_ARGS, `--host-resolver-rules=MAP ${HOST} 127.0.0.1`] });
  t.after(() => browser.close());
  const page = await browser.newPage();
  await assert.rejects(page.goto(`${server.site}/login`), /ERR_CERT_AUTHORITY_INVALID/);
});
