// The main pages, on a crowded and on an empty server: no page scrolls sideways, no control is covered, cut texts can be read in full, and axe
// finds nothing. The quick tests check each page on a screen in the light theme and on a phone in the dark theme, the full tests at every
// width in both themes. With LOCKSTEP_PICTURES set to a folder, screenshots of the pages are stored there.

import { after, before, describe, test } from "node:test";
import { PAGES, fillServer } from "./crowded.mjs";
import { ALL_VIEWS, TWO_VIEWS, checkPage } from "./looks.mjs";
import { Browser, IS_FULL, TestServer, testInFullRun, signIn } from "./test-server.mjs";

const views = IS_FULL ? ALL_VIEWS : TWO_VIEWS;
let server, emptyServer, authServer, browser, jobs;
const withoutAgent = { dataset: false, agent: false };
before(async () => {
  [server, emptyServer, authServer, browser] = await Promise.all([TestServer.open(withoutAgent), IS_FULL ? TestServer.open(withoutAgent) : null, TestServer.open({ ...withoutAgent, auth: true }), Browser.open()]);
  jobs = await fillServer(server, browser, IS_FULL ? 60 : 20);
});
after(async () => { await browser?.close(); await Promise.all([server?.close(), emptyServer?.close(), authServer?.close()]); });

describe("a page of a crowded server fits, is readable and accessible:", () => {
  for (const [name, path, ready] of PAGES) test(name, () => checkPage(browser, server, path(jobs), name, { views, ready }));
});

describe("a page of an empty server fits, is readable and accessible:", () => {
  // Without the server's token, `browser.page` does not sign in.
  test("sign-in", () => checkPage(browser, { url: authServer.url }, "/login?next=%2Fjobs", "login", { views }));
  test("the list of a member", () => checkPage(browser, { url: authServer.url }, "/jobs", "empty-jobs-of-a-member", {
    views: TWO_VIEWS, prepare: (page) => signIn(page.context(), authServer, "member"), options: { expectedErrors: [/401|404/] },
  }));
  for (const path of ["/jobs", "/jobs/new", "/compare", "/datasets", "/machines", "/queue", "/audit", "/sweeps", "/models"]) testInFullRun(path, () => checkPage(browser, emptyServer, path, `empty${path.replaceAll("/", "-")}`));
});
