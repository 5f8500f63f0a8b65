// The page Machines: updates the cards every few seconds and when jobs start and end; drains and removes machines.

import { read, write } from "./address.js";
import { ask, byId, confirmThen, pageNow, press, errorText, showLive, text } from "./page.js";
import { Stream } from "./stream.js";
import { Lines, RANGES } from "./machines/lines.js";
import { morph } from "./machines/morph.js";

const REFRESH_INTERVAL_MS = 5000;
const lines = new Lines(byId("machines"));
let refreshing = false, changing = false, timer = 0;

/** Requests the page again and updates the cards from it, because only the server renders cards. */
async function refresh() {
  if (refreshing || document.hidden) return;
  refreshing = true;
  try {
    const page = await pageNow("/machines");
    if (!page) return;
    for (const id of ["machines", "summary"]) {
      const fresh = page.getElementById(id), shown = byId(id);
      if (!fresh || !shown) { if (fresh || shown) location.reload(); continue; }
      morph(shown, fresh);
    }
    lines.draw();
    await lines.refresh();
  } catch { /* The stream's status shows that the server is unreachable. */ } finally { refreshing = false; }
}

byId("machines").addEventListener("click", async (event) => {
  const button = event.target.closest("[data-drain]");
  // The button is not disabled during the request, because it would lose the focus.
  if (!button || changing) return;
  changing = true;
  try {
    await ask(`/api/v1/agents/${encodeURIComponent(button.dataset.id)}/${button.dataset.drain}`, { method: "POST" });
    text(button.closest(".machine").querySelector(".error"), "");
    await refresh();
  } catch (error) { text(button.closest(".machine").querySelector(".error"), errorText(error)); } finally { changing = false; }
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

new Stream({
  path: () => "/api/v1/stream",
  onStatus: showLive,
  onFrame: () => { clearTimeout(timer); timer = setTimeout(refresh, 300); },
});
setInterval(refresh, REFRESH_INTERVAL_MS);
document.addEventListener("visibilitychange", refresh);

const ranges = [...document.querySelectorAll("#range button")], DEFAULT_RANGE = "1h";
function show(range) {
  press(ranges, ranges.find((button) => button.dataset.range === range));
  // If the request fails, the next refresh repeats it.
  lines.show(range).catch(() => {});
}
for (const button of ranges) button.addEventListener("click", () => { show(button.dataset.range); write({ range: button.dataset.range === DEFAULT_RANGE ? "" : button.dataset.range }); });
show(RANGES[read("range", DEFAULT_RANGE)] ? read("range", DEFAULT_RANGE) : DEFAULT_RANGE);
