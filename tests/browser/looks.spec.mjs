// The main pages once, full of what a year of use leaves behind, on a screen by day and on a phone by night: nothing stands out to the right,
// nothing covers a control, words that are cut can be read in whole, and axe finds nothing. full/looks.spec.mjs looks at more, and in all ways.

import { after, before, describe, test } from "node:test";
import { PAGES, crowd } from "./crowded.mjs";
import { TWO_VIEWS as views, look } from "./looks.mjs";
import { Browser, TestServer, signIn } from "./test-server.mjs";

let server, signing, browser, jobs;
const made = { dataset: false, agent: false };
before(async () => {
  [server, signing, browser] = await Promise.all([TestServer.open(made), TestServer.open({ ...made, auth: true }), Browser.open()]);
  jobs = await crowd(server, browser);
});
after(async () => { await browser?.close(); await Promise.all([server?.close(), signing?.close()]); });

describe("a page of a crowded server fits, is readable and accessible:", () => {
  for (const [name, path, ready] of PAGES) test(name, () => look(browser, server, path(jobs), name, { views, ready }));
});

describe("a page of an empty server fits, is readable and accessible:", () => {
  test("sign-in", () => look(browser, { url: signing.url }, "/login?next=%2Fjobs", "login", { views }));
  for (const path of ["/account", "/jobs", "/compare", "/queue"]) {
    test(path, () => look(browser, { url: signing.url }, path, `empty${path}`, {
      views, prepare: (page) => signIn(page.context(), signing, "member"), options: { expected: [/401|404/] },
    }));
  }
});
