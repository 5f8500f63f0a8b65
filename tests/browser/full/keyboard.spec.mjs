// Same as keyboard.spec.mjs, in a narrow window.

import { test } from "node:test";
import { trainByKeyboard } from "../by-keys.mjs";
import { Browser, TestServer } from "../test-server.mjs";

test("a job is submitted, followed and cancelled by keyboard only in a narrow window", async (t) => {
  const server = await TestServer.open({ dataset: false });
  t.after(() => server.close());
  const browser = await Browser.open();
  t.after(() => browser.close());
  await trainByKeyboard(server, browser, { width: 390, height: 844 });
});
