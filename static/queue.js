// The page Queue. The server renders the rows; the script requests the page again every few seconds and when jobs start and end, and updates
// the rows. The reader can change the priority of waiting jobs, or cancel them.

import { ask, byId, confirmThen, pageNow, errorText, showLive, text } from "./page.js";
import { Stream } from "./stream.js";
import { morph } from "./machines/morph.js";

const REFRESH_INTERVAL_MS = 5000;
let refreshing = false, timer = 0;

async function refresh() {
  if (refreshing || document.hidden) return;
  refreshing = true;
  try {
    const page = await pageNow(location.pathname + location.search);
    if (!page) return;
    morph(byId("queue"), page.getElementById("queue"));
    text(byId("summary"), page.getElementById("summary").textContent);
    for (const field of byId("queue").querySelectorAll("[data-priority]")) if (field !== document.activeElement) field.value = field.defaultValue;
  } catch { /* The stream's status shows that the server is unreachable. */ } finally { refreshing = false; }
}

byId("queue").addEventListener("change", async ({ target }) => {
  const error = byId("queue-error");
  text(error, "");
  try {
    await ask(`/api/v1/jobs/${target.dataset.priority}`, { method: "PATCH", body: { priority: Number(target.value) } });
    clearTimeout(timer);
    timer = setTimeout(refresh, 600);
  } catch (e) { text(error, errorText(e)); }
});
byId("queue").addEventListener("click", (event) => {
  const { cancel, name } = event.target.closest("[data-cancel]")?.dataset ?? {};
  if (cancel) confirmThen({ title: `Cancel ${name}?`, detail: "The job leaves the queue. Its checkpoints and its log remain.", yes: "Cancel the job", act: async () => { await ask(`/api/v1/jobs/${cancel}/cancel`, { method: "POST" }); await refresh(); } });
});

new Stream({
  path: () => "/api/v1/stream",
  onStatus: showLive,
  // The scheduler considers the queue shortly after a job has been added or removed.
  onFrame: () => { clearTimeout(timer); timer = setTimeout(refresh, 600); },
});
setInterval(refresh, REFRESH_INTERVAL_MS);
document.addEventListener("visibilitychange", refresh);
