// Every page at every width in both themes, crowded and empty. With LOCKSTEP_PICTURES set to a folder, pictures of the pages are kept there.

import { after, before, describe, test } from "node:test";
import { PAGES, crowd } from "../crowded.mjs";
import { look } from "../looks.mjs";
import { Browser, TestServer } from "../test-server.mjs";

let server, empty, browser, jobs;
const made = { dataset: false, agent: false };
before(async () => {
  [server, empty, browser] = await Promise.all([TestServer.open(made), TestServer.open(made), Browser.open()]);
  jobs = await crowd(server, browser);
});
after(async () => { await browser?.close(); await Promise.all([server?.close(), empty?.close()]); });

describe("a page of a crowded server fits, is readable and accessible:", () => {
  for (const [name, path, ready] of PAGES) test(name, () => look(browser, server, path(jobs), name, { ready }));
});

describe("a page of an empty server fits, is readable and accessible:", () => {
  for (const path of ["/jobs", "/jobs/new", "/compare", "/datasets", "/machines", "/queue", "/audit"]) test(path, () => look(browser, empty, path, `empty${path.replaceAll("/", "-")}`));
});
