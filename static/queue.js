// The page Queue. The server renders the rows; the script requests the page again every few seconds and when jobs start and end, and updates
// the rows. The reader can change the priority of waiting jobs, move them to the front, or cancel them.

import { ask, byId, confirmThen, errorTexts, setMessage, setText } from "./page.js";
import { frontPriority } from "./jobs/queue.js";
import { followJobs, morph, refresher } from "./machines/morph.js";

const refresh = refresher((page) => {
  morph(byId("queue"), page.getElementById("queue"));
  setText(byId("summary"), page.getElementById("summary").textContent);
  for (const field of byId("queue").querySelectorAll("[data-priority]")) if (field !== document.activeElement) field.value = field.defaultValue;
});
// The scheduler considers the queue shortly after a job has been added or removed.
const refreshSoon = followJobs(refresh, 600);

/** Sets a job's priority to the result of `choose`. */
async function setPriority(id, choose) {
  const error = byId("queue-error");
  setText(error, "");
  try {
    await ask(`/api/v1/jobs/${id}`, { method: "PATCH", body: { priority: await choose() } });
    refreshSoon();
  } catch (e) { setMessage(error, errorTexts(e)); }
}

byId("queue").addEventListener("change", ({ target }) => setPriority(target.dataset.priority, () => Number(target.value)));
byId("queue").addEventListener("click", (event) => {
  const { cancel, front, name } = event.target.closest("[data-cancel], [data-front]")?.dataset ?? {};
  if (front) setPriority(front, frontPriority);
  if (!cancel) return;
  setText(byId("queue-error"), "");
  confirmThen({ title: `Cancel ${name}?`, detail: "The job leaves the queue. Its checkpoints and its log remain.", yes: "Cancel the job", act: async () => { await ask(`/api/v1/jobs/${cancel}/cancel`, { method: "POST" }); await refresh(); } });
});
