// The page Queue. The server renders the rows; the script reads the page again every few seconds and when jobs start and end, and replaces the
// rows. The reader can change the priority of waiting jobs, or cancel them.

import { ask, byId, confirmThen, pageNow, sentence, showLive, text } from "./page.js";
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
    for (const field of byId("queue").querySelectorAll("[data-priority]")) if (field !== document.activeElement) field.value = field.defaultValue;
  } catch { /* the stream says that the server is away */ } finally { asking = false; }
}

byId("queue").addEventListener("change", async ({ target }) => {
  const error = byId("queue-error");
  text(error, "");
  try {
    await ask(`/api/v1/jobs/${target.dataset.priority}`, { method: "PATCH", body: { priority: Number(target.value) } });
    clearTimeout(soon);
    soon = setTimeout(refresh, 600);
  } catch (e) { text(error, sentence(e)); }
});
byId("queue").addEventListener("click", (event) => {
  const { cancel, name } = event.target.closest("[data-cancel]")?.dataset ?? {};
  if (cancel) confirmThen({ title: `Cancel ${name}?`, detail: "It leaves the queue. Its checkpoints and its log stay.", yes: "Cancel the job", act: async () => { await ask(`/api/v1/jobs/${cancel}/cancel`, { method: "POST" }); await refresh(); } });
});

new Stream({
  path: () => "/api/v1/stream",
  onStatus: showLive,
  // The scheduler considers the queue shortly after a job has been added or removed.
  onFrame: () => { clearTimeout(soon); soon = setTimeout(refresh, 600); },
});
setInterval(refresh, EVERY_MS);
document.addEventListener("visibilitychange", refresh);
