// The main pages, full of what a year of use leaves behind and empty: nothing stands out to the right, nothing covers a control, words that are
// cut can be read in whole, and axe finds nothing. The quick tests look at each on a screen by day and on a phone by night, the full ones at every
// width in both themes. With LOCKSTEP_PICTURES set to a folder, pictures of the pages are kept there.

import { after, before, describe, test } from "node:test";
import { PAGES, fillServer } from "./crowded.mjs";
import { ALL_VIEWS, TWO_VIEWS, checkPage } from "./looks.mjs";
import { Browser, IS_FULL, TestServer, inFull, signIn } from "./test-server.mjs";

const views = IS_FULL ? ALL_VIEWS : TWO_VIEWS;
let server, empty, signing, browser, jobs;
const made = { dataset: false, agent: false };
before(async () => {
  [server, empty, signing, browser] = await Promise.all([TestServer.open(made), IS_FULL ? TestServer.open(made) : null, TestServer.open({ ...made, auth: true }), Browser.open()]);
  jobs = await fillServer(server, browser, IS_FULL ? 60 : 20);
});
after(async () => { await browser?.close(); await Promise.all([server?.close(), empty?.close(), signing?.close()]); });

describe("a page of a crowded server fits, is readable and accessible:", () => {
  for (const [name, path, ready] of PAGES) test(name, () => checkPage(browser, server, path(jobs), name, { views, ready }));
});

describe("a page of an empty server fits, is readable and accessible:", () => {
  test("sign-in", () => checkPage(browser, { url: signing.url }, "/login?next=%2Fjobs", "login", { views: TWO_VIEWS }));
  test("the list of a member", () => checkPage(browser, { url: signing.url }, "/jobs", "empty-jobs-of-a-member", {
    views: TWO_VIEWS, prepare: (page) => signIn(page.context(), signing, "member"), options: { expected: [/401|404/] },
  }));
  for (const path of ["/jobs", "/jobs/new", "/compare", "/datasets", "/machines", "/queue", "/audit"]) inFull(path, () => checkPage(browser, empty, path, `empty${path.replaceAll("/", "-")}`));
});
