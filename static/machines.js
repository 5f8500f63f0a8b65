// The page Machines: reads the machines again every few seconds and when jobs start and end, and drains machines.

import { read, write } from "./address.js";
import { ask, byId, confirmThen, pageNow, press, sentence, showLive, text } from "./page.js";
import { Stream } from "./stream.js";
import { Lines, RANGES } from "./machines/lines.js";
import { morph } from "./machines/morph.js";

const EVERY_MS = 5000;
const lines = new Lines(byId("machines"));
let asking = false, changing = false, soon = 0;

/** Updates the cards from a new version of the page, because only the server renders cards. */
async function refresh() {
  if (asking || document.hidden) return;
  asking = true;
  try {
    const page = await pageNow("/machines");
    if (!page) return;
    for (const id of ["machines", "summary"]) {
      const fresh = page.getElementById(id), here = byId(id);
      if (!fresh || !here) { if (fresh || here) location.reload(); continue; }
      morph(here, fresh);
    }
    lines.draw();
    await lines.refresh();
  } catch { /* The stream's status shows that the server is unreachable. */ } finally { asking = false; }
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
  } catch (error) { text(button.closest(".machine").querySelector(".error"), sentence(error)); } finally { changing = false; }
});

byId("machines").addEventListener("click", (event) => {
  const button = event.target.closest("[data-remove]");
  if (!button) return;
  const { remove, name } = button.dataset;
  confirmThen({
    title: `Remove ${name}?`, detail: "The machine and its measurements are removed from this list. Checkpoints and logs on the server stay. An agent that is started there again joins again, unless its token or certificate is revoked.", yes: "Remove it",
    act: async () => { await ask(`/api/v1/agents/${encodeURIComponent(remove)}`, { method: "DELETE" }); await refresh(); },
  });
});

new Stream({
  path: () => "/api/v1/stream",
  onStatus: showLive,
  onFrame: () => { clearTimeout(soon); soon = setTimeout(refresh, 300); },
});
setInterval(refresh, EVERY_MS);
document.addEventListener("visibilitychange", refresh);

const ranges = [...document.querySelectorAll("#range button")], usual = "1h";
function show(range) {
  press(ranges, ranges.find((button) => button.dataset.range === range));
  // If the request fails, the next round reads the lines.
  lines.show(range).catch(() => {});
}
for (const button of ranges) button.addEventListener("click", () => { show(button.dataset.range); write({ range: button.dataset.range === usual ? "" : button.dataset.range }); });
show(RANGES[read("range", usual)] ? read("range", usual) : usual);
