// The page Machines: updates the cards every few seconds and when jobs start and end; drains and removes machines.

import { setUpChoices } from "./address.js";
import { ask, byId, confirmThen, errorText, setText } from "./page.js";
import { Lines } from "./machines/lines.js";
import { followJobs, morph, refresher } from "./machines/morph.js";

const lines = new Lines(byId("machines"));
let isChanging = false;

/** Updates the cards from the server's current page, because only the server renders cards. */
const refresh = refresher(async (page) => {
  for (const id of ["machines", "summary"]) {
    const fresh = page.getElementById(id), shown = byId(id);
    if (!fresh || !shown) { if (fresh || shown) location.reload(); continue; }
    morph(shown, fresh);
  }
  lines.draw();
  await lines.refresh();
});

byId("machines").addEventListener("click", async (event) => {
  const button = event.target.closest("[data-drain]");
  // The button is not disabled during the request, because a disabled button loses the focus.
  if (!button || isChanging) return;
  isChanging = true;
  try {
    await ask(`/api/v1/agents/${encodeURIComponent(button.dataset.id)}/${button.dataset.drain}`, { method: "POST" });
    setText(button.closest(".machine").querySelector(".error"), "");
    await refresh();
  } catch (error) { setText(button.closest(".machine").querySelector(".error"), errorText(error)); } finally { isChanging = false; }
});

byId("machines").addEventListener("click", (event) => {
  const button = event.target.closest("[data-remove]");
  if (!button) return;
  const { remove, name } = button.dataset;
  confirmThen({
    title: `Remove ${name}?`, detail: "The machine and its measurements are removed from this list. Checkpoints and logs on the server remain. An agent that is started on the machine again rejoins, unless its token or certificate is revoked.", yes: "Remove it",
    act: async () => { await ask(`/api/v1/agents/${encodeURIComponent(remove)}`, { method: "DELETE" }); await refresh(); },
  });
});

followJobs(refresh, 300);
// If the request fails, the next refresh repeats it.
setUpChoices("range", "1h", (range) => { lines.setRange(range).catch(() => {}); });
