// Signing in with a provider that is not ours: oidc-provider (certified by the OpenID Foundation), its own pages, and a real Chromium. It
// speaks TLS with a certificate of the team's own authority, as a provider inside a network does.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { createServer } from "node:https";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import Provider from "oidc-provider";
import { BINARY, Browser, TestServer, freePort, inFull, until } from "./test-server.mjs";

const SECRET = "a client's secret: &=+%";
let folder, server, browser, issuer, listening;

/** Makes the team's authority and the provider's certificate in the folder: ca.crt, provider.key, provider.crt. */
async function certify() {
  await writeFile(join(folder, "names"), "subjectAltName=IP:127.0.0.1\n");
  const openssl = (...args) => execFileSync("openssl", args, { cwd: folder, stdio: "pipe" });
  const key = (name) => ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", `${name}.key`, "-subj", `/CN=the team's ${name}`];
  openssl("req", "-x509", ...key("authority"), "-days", "2", "-out", "ca.crt");
  openssl("req", "-new", ...key("provider"), "-out", "provider.csr");
  openssl("x509", "-req", "-in", "provider.csr", "-CA", "ca.crt", "-CAkey", "authority.key", "-CAcreateserial", "-days", "2", "-extfile", "names", "-out", "provider.crt");
}

before(async () => {
  folder = await mkdtemp(join(tmpdir(), "lockstep-oidc-"));
  await writeFile(join(folder, "secret"), `${SECRET}\n`, { mode: 0o600 });
  await certify();
  const port = await freePort();
  issuer = `https://127.0.0.1:${port}`;
  [server, browser] = await Promise.all([
    // The provider is down yet.
    TestServer.open({ dataset: false, agent: false, auth: true, options: ["--oidc-issuer", issuer, "--oidc-client-id", "lockstep", "--oidc-name", "the team's provider",
      "--oidc-ca", join(folder, "ca.crt"), "--oidc-client-secret-file", join(folder, "secret"), "--oidc-role", "member", "--oidc-group-claim", "groups", "--oidc-admin-group", "ops"] }),
    Browser.open(),
  ]);
});
after(async () => {
  listening?.closeAllConnections();
  await new Promise((done) => (listening ? listening.close(done) : done()));
  await browser?.close();
  await server?.close();
  await rm(folder, { recursive: true, force: true });
});

/** The provider, which knows everybody: who signs in there as `ops-...` is in the group `ops`. */
async function start() {
  const provider = new Provider(issuer, {
    clients: [{ client_id: "lockstep", client_secret: SECRET, redirect_uris: [`${server.url}/login/oidc/callback`], response_types: ["code"], grant_types: ["authorization_code"] }],
    pkce: { required: () => true },
    claims: { openid: ["sub"], profile: ["preferred_username"], email: ["email", "email_verified"], groups: ["groups"] },
    scopes: ["openid", "profile", "email", "groups"],
    cookies: { keys: ["only here"] },
    findAccount: (_, id) => ({
      accountId: id,
      claims: () => ({ sub: id, preferred_username: id, email: `${id}@example.org`, email_verified: true, groups: id.startsWith("ops-") ? ["ops"] : [] }),
    }),
  });
  const [key, cert] = await Promise.all(["provider.key", "provider.crt"].map((name) => readFile(join(folder, name))));
  listening = createServer({ key, cert }, provider.callback());
  await new Promise((done) => listening.listen(Number(new URL(issuer).port), "127.0.0.1", done));
}

/** A browser in which nobody is signed in anywhere. It asks nobody about the team's authority, which a team's browsers know. */
const stranger = async () => (await browser.chromium.newContext({ ignoreHTTPSErrors: true })).newPage();

/** On the provider's own pages. */
async function signInThere(page, name) {
  await page.waitForURL(`${issuer}/**`);
  await page.fill("input[name=login]", name);
  await page.fill("input[name=password]", "whatever");
  await page.click("button[type=submit]");
  await page.click("button[type=submit]");
}

describe("an OpenID provider", () => {
  test("the page to sign in says that it is down, and works otherwise", async () => {
    const page = await stranger();
    await page.goto(`${server.url}/login`);
    await page.click("text=Sign in with the team's provider");
    assert.match(await page.locator("#provider-error").textContent(), /cannot be reached at the moment/);
    await page.fill("#token", server.token);
    await page.click("form[action='/login'] button");
    await page.waitForURL(`${server.url}/jobs`);
    await page.context().close();
  });

  test("somebody new signs in through its pages, comes back where they wanted to go, and signs out", async () => {
    await start();
    const page = await stranger();
    await until("the provider is found", async () => {
      await page.goto(`${server.url}/datasets?x=1`);
      await page.click("#provider");
      return page.url().startsWith(issuer);
    }, 20_000);
    await signInThere(page, "ada");
    await page.waitForURL(`${server.url}/datasets?x=1`);
    // Of one host, so the provider's are there, too.
    const cookies = (await page.context().cookies(server.url)).filter((c) => c.name.startsWith("lockstep_"));
    assert.deepEqual(cookies.map((c) => [c.httpOnly, c.sameSite]), [[true, "Lax"]], "the session's cookie and no other");
    assert.ok(cookies[0].expires - Date.now() / 1000 <= 24 * 3600);
    await page.goto(`${server.url}/account`);
    assert.match(await page.locator("main").textContent(), /ada, member/);
    const { people } = await server.ask("/people");
    assert.deepEqual(people.map((p) => [p.name, p.role, p.identity]), [["ada", "member", { issuer, subject: "ada" }]]);

    await page.locator("form[action='/logout'] button").first().click();
    await page.waitForURL(`${server.url}/login`);
    await page.goto(`${server.url}/jobs`);
    assert.ok(page.url().startsWith(`${server.url}/login`), "the session is over");
    // The provider remembers the browser: one click is enough.
    await page.click("#provider");
    await page.waitForURL(`${server.url}/jobs`);
    await page.context().close();
  });

  inFull("a server that was not told of the provider's authority does not trust it", async () => {
    const untold = await TestServer.open({ dataset: false, agent: false, auth: true, options: ["--oidc-issuer", issuer, "--oidc-client-id", "lockstep"] });
    try {
      const page = await stranger();
      await page.goto(`${untold.url}/login`);
      await page.click("#provider");
      assert.match(await page.locator("#provider-error").textContent(), /cannot be reached at the moment/);
      await until("the log says why", () => /UnknownIssuer/.test(untold.output));
      await page.context().close();
    } finally {
      await untold.close();
    }
  });

  inFull("groups make an admin; who says no there is told so; who was removed stays out", async () => {
    const page = await stranger();
    await page.goto(`${server.url}/people`);
    await page.click("#provider");
    await signInThere(page, "ops-grace");
    await page.waitForURL(`${server.url}/people`);
    assert.match(await page.locator("[data-person=ops-grace]").textContent(), /OpenID/);
    await page.context().close();

    const second = await stranger();
    await second.goto(`${server.url}/login`);
    await second.click("#provider");
    await second.waitForURL(`${issuer}/**`);
    await second.click("text=Cancel");
    await second.waitForURL(`${server.url}/login/oidc/callback?**`);
    assert.match(await second.locator("#provider-error").textContent(), /did not sign you in.*access_denied/s);
    await second.context().close();

    const user = (...args) => execFileSync(BINARY, ["user", ...args, "--server", server.url], { env: { ...process.env, LOCKSTEP_TOKEN: server.token }, encoding: "utf8", stdio: ["ignore", "pipe", "pipe"] });
    assert.match(user("list"), /ada +member .*OpenID ada/);
    user("remove", "ada");
    const third = await stranger();
    await third.goto(`${server.url}/login`);
    await third.click("#provider");
    await signInThere(third, "ada");
    await third.waitForURL(`${server.url}/login/oidc/callback?**`);
    const said = await third.locator("#provider-error").textContent();
    assert.match(said, /lockstep user add NAME --subject ada/);
    user("add", "lovelace", "--role", "viewer", "--subject", "ada");
    await third.click("#provider");
    await third.waitForURL(`${server.url}/jobs`);
    await third.goto(`${server.url}/account`);
    assert.match(await third.locator("main").textContent(), /lovelace, member/, "the groups decide, and those in none have --oidc-role");
    await third.context().close();
  });
});
