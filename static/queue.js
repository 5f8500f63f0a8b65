// The page Queue. The server renders the rows; the script requests the page again every few seconds and when jobs start and end, and updates
// the rows. The reader can change the priority of waiting jobs, or cancel them.

import { ask, byId, confirmThen, errorText, text } from "./page.js";
import { followJobs, morph, refresher } from "./machines/morph.js";

const refresh = refresher((page) => {
  morph(byId("queue"), page.getElementById("queue"));
  text(byId("summary"), page.getElementById("summary").textContent);
  for (const field of byId("queue").querySelectorAll("[data-priority]")) if (field !== document.activeElement) field.value = field.defaultValue;
});
// The scheduler considers the queue shortly after a job has been added or removed.
const refreshSoon = followJobs(refresh, 600);

byId("queue").addEventListener("change", async ({ target }) => {
  const error = byId("queue-error");
  text(error, "");
  try {
    await ask(`/api/v1/jobs/${target.dataset.priority}`, { method: "PATCH", body: { priority: Number(target.value) } });
    refreshSoon();
  } catch (e) { text(error, errorText(e)); }
});
byId("queue").addEventListener("click", (event) => {
  const { cancel, name } = event.target.closest("[data-cancel]")?.dataset ?? {};
  if (cancel) confirmThen({ title: `Cancel ${name}?`, detail: "The job leaves the queue. Its checkpoints and its log remain.", yes: "Cancel the job", act: async () => { await ask(`/api/v1/jobs/${cancel}/cancel`, { method: "POST" }); await refresh(); } });
});
