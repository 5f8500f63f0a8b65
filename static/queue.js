// The page Queue, read again every few seconds and when jobs come and go. The server renders the rows, and the script exchanges them.

import { byId, pageNow, showLive, text } from "./page.js";
import { Stream } from "./stream.js";
import { morph } from "./machines/morph.js";

const EVERY_MS = 5000;
let asking = false, soon = 0;

async function refresh() {
  if (asking || document.hidden) return;
  asking = true;
  try {
    const page = await pageNow(location.pathname + location.search);
    if (!page) return;
    morph(byId("queue"), page.getElementById("queue"));
    text(byId("summary"), page.getElementById("summary").textContent);
  } catch { /* the stream says that the server is away */ } finally { asking = false; }
}

new Stream({
  path: () => "/api/v1/stream",
  onStatus: showLive,
  // The scheduler considers the queue a moment after a job has come or gone.
  onFrame: () => { clearTimeout(soon); soon = setTimeout(refresh, 600); },
});
setInterval(refresh, EVERY_MS);
document.addEventListener("visibilitychange", refresh);
