// Signs in with another project's provider in a real Chromium: oidc-provider (certified by the OpenID Foundation) with its own pages. The
// provider has a certificate of a private CA, as is usual inside a network.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { createServer } from "node:https";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import Provider from "oidc-provider";
import { BINARY, Browser, TestServer, freePort, testInFullRun, until } from "./test-server.mjs";

const SECRET = "a client's secret: &=+%";
let folder, server, browser, issuer, providerServer;

/** Creates the private CA and the provider's certificate in the folder: ca.crt, provider.key, provider.crt. */
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
    // The server starts although the provider is not running yet.
    TestServer.open({ dataset: false, agent: false, auth: true, options: ["--oidc-issuer", issuer, "--oidc-client-id", "lockstep", "--oidc-name", "the team's provider",
      "--oidc-ca", join(folder, "ca.crt"), "--oidc-client-secret-file", join(folder, "secret"), "--oidc-role", "member", "--oidc-group-claim", "groups", "--oidc-admin-group", "ops"] }),
    Browser.open(),
  ]);
});
after(async () => {
  providerServer?.closeAllConnections();
  await new Promise((done) => (providerServer ? providerServer.close(done) : done()));
  await browser?.close();
  await server?.close();
  await rm(folder, { recursive: true, force: true });
});

/** Starts the provider, which accepts any name. Names `ops-...` belong to the group `ops`. */
async function startProvider() {
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
  providerServer = createServer({ key, cert }, provider.callback());
  await new Promise((done) => providerServer.listen(Number(new URL(issuer).port), "127.0.0.1", done));
}

/** A page in a new browser context, which ignores certificate errors, as a team's browsers would trust the private CA. */
const openStranger = async () => (await browser.chromium.newContext({ ignoreHTTPSErrors: true })).newPage();

/** Signs in on the provider's pages. */
async function signInAtProvider(page, name) {
  await page.waitForURL(`${issuer}/**`);
  await page.fill("input[name=login]", name);
  await page.fill("input[name=password]", "whatever");
  await page.click("button[type=submit]");
  await page.click("button[type=submit]");
}

describe("an OpenID provider", () => {
  test("that is down is reported on the sign-in page, where a token still works", async () => {
    const page = await openStranger();
    await page.goto(`${server.url}/login`);
    await page.click("text=Sign in with the team's provider");
    assert.match(await page.locator("#provider-error").textContent(), /cannot be reached at the moment/);
    await page.fill("#token", server.token);
    await page.click("form[action='/login'] button");
    await page.waitForURL(`${server.url}/jobs`);
    await page.context().close();
  });

  test("signs in a new person, who returns to the requested page and can sign out", async () => {
    await startProvider();
    const page = await openStranger();
    await until("the sign-in page leads to the provider", async () => {
      await page.goto(`${server.url}/datasets?x=1`);
      await page.click("#provider");
      return page.url().startsWith(issuer);
    });
    await signInAtProvider(page, "ada");
    await page.waitForURL(`${server.url}/datasets?x=1`);
    // The provider's cookies are listed too, as cookies ignore ports.
    const cookies = (await page.context().cookies(server.url)).filter((c) => c.name.startsWith("lockstep_"));
    assert.deepEqual(cookies.map((c) => [c.httpOnly, c.sameSite]), [[true, "Lax"]], "the session's cookie is the only one");
    assert.ok(cookies[0].expires - Date.now() / 1000 <= 24 * 3600);
    await page.goto(`${server.url}/account`);
    assert.match(await page.locator("main").textContent(), /ada, member/);
    const { people } = await server.ask("/people");
    assert.deepEqual(people.map((p) => [p.name, p.role, p.identity]), [["ada", "member", { issuer, subject: "ada" }]]);

    await page.locator("form[action='/logout'] button").first().click();
    await page.waitForURL(`${server.url}/login`);
    await page.goto(`${server.url}/jobs`);
    assert.ok(page.url().startsWith(`${server.url}/login`), "the session has ended");
    // The provider remembers the browser: one click is enough.
    await page.click("#provider");
    await page.waitForURL(`${server.url}/jobs`);
    await page.context().close();
  });

  testInFullRun("with a private CA is not trusted without --oidc-ca", async () => {
    const withoutCa = await TestServer.open({ dataset: false, agent: false, auth: true, options: ["--oidc-issuer", issuer, "--oidc-client-id", "lockstep"] });
    try {
      const page = await openStranger();
      await page.goto(`${withoutCa.url}/login`);
      await page.click("#provider");
      assert.match(await page.locator("#provider-error").textContent(), /cannot be reached at the moment/);
      await until("the log says why", () => /UnknownIssuer/.test(withoutCa.output));
      await page.context().close();
    } finally {
      await withoutCa.close();
    }
  });

  testInFullRun("decides by groups who is an admin; a cancelled sign-in is reported; a removed person cannot sign in", async () => {
    const page = await openStranger();
    await page.goto(`${server.url}/people`);
    await page.click("#provider");
    await signInAtProvider(page, "ops-grace");
    await page.waitForURL(`${server.url}/people`);
    assert.match(await page.locator("[data-person=ops-grace]").textContent(), /OpenID/);
    await page.context().close();

    const cancelling = await openStranger();
    await cancelling.goto(`${server.url}/login`);
    await cancelling.click("#provider");
    await cancelling.waitForURL(`${issuer}/**`);
    await cancelling.click("text=Cancel");
    await cancelling.waitForURL(`${server.url}/login/oidc/callback?**`);
    assert.match(await cancelling.locator("#provider-error").textContent(), /did not sign you in.*access_denied/s);
    await cancelling.context().close();

    const user = (...args) => execFileSync(BINARY, ["user", ...args, "--server", server.url], { env: { ...process.env, LOCKSTEP_TOKEN: server.token }, encoding: "utf8", stdio: ["ignore", "pipe", "pipe"] });
    assert.match(user("list"), /ada +member .*OpenID ada/);
    user("remove", "ada", "--yes");
    const ofAda = await openStranger();
    await ofAda.goto(`${server.url}/login`);
    await ofAda.click("#provider");
    await signInAtProvider(ofAda, "ada");
    await ofAda.waitForURL(`${server.url}/login/oidc/callback?**`);
    const error = await ofAda.locator("#provider-error").textContent();
    assert.match(error, /lockstep user add NAME --subject ada/);
    user("add", "lovelace", "--role", "viewer", "--subject", "ada");
    await ofAda.click("#provider");
    await ofAda.waitForURL(`${server.url}/jobs`);
    await ofAda.goto(`${server.url}/account`);
    assert.match(await ofAda.locator("main").textContent(), /lovelace, member/, "the role is by the provider's groups or by --oidc-role, not the role that `user add` has stored");
    await ofAda.context().close();
  });
});
