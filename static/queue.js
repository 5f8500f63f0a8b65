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
/** The scheduler considers the queue shortly after a change. */
const CHANGE_MS = 600;
followJobs(refresh, CHANGE_MS);

/** Sets a job's priority to the result of `choose`. */
async function setPriority(id, choose) {
  const error = byId("queue-error"), status = byId("queue-status");
  setText(error, "");
  setText(status, "Saving the priority …");
  try {
    const priority = await choose();
    await ask(`/api/v1/jobs/${id}`, { method: "PATCH", body: { priority } });
    setText(status, `Saved: priority ${priority} for ${document.querySelector(`[data-cancel="${id}"]`)?.dataset.name ?? "the job"}.`);
    // Not delayed further by changes of other jobs.
    setTimeout(refresh, CHANGE_MS);
  } catch (e) { setText(status, ""); setMessage(error, errorTexts(e)); }
}

byId("queue").addEventListener("change", ({ target }) => setPriority(target.dataset.priority, () => Number(target.value)));
byId("queue").addEventListener("click", (event) => {
  const { cancel, front, name } = event.target.closest("[data-cancel], [data-front]")?.dataset ?? {};
  if (front) setPriority(front, frontPriority);
  if (!cancel) return;
  setText(byId("queue-error"), "");
  confirmThen({ title: `Cancel ${name}?`, detail: "The job leaves the queue. Its checkpoints and its log remain.", yes: "Cancel the job", act: async () => { await ask(`/api/v1/jobs/${cancel}/cancel`, { method: "POST" }); await refresh(); } });
});
