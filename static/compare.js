// Jobs side by side: curves over each other, settings with the differences marked, results to sort by, and one
// line a job across everything that differs. Which jobs, and how they are shown, stands in the address.

import { ask, byId, press, sentence, showLive, text } from "./page.js";
import { Stream } from "./stream.js";
import { read, write } from "./address.js";
import { smoothingSlider } from "./chart/range.js";
import { assign, colour } from "./compare/colours.js";
import { Curves } from "./compare/curves.js";
import { Parallel } from "./compare/parallel.js";
import { Picker } from "./compare/picker.js";
import { Tables } from "./compare/tables.js";

const jobs = new Map();
const ids = () => read("jobs").split(",").filter(Boolean);
const list = () => ids().map((id) => jobs.get(id)).filter(Boolean);

const curves = new Curves(list, colour);
const tables = new Tables(list, colour, (id) => choose(ids().filter((other) => other !== id)));
const parallel = new Parallel(byId("parallel"), list, colour);
const picker = new Picker((id) => choose(ids().includes(id) ? ids().filter((other) => other !== id) : [...ids(), id]), () => new Set(ids()), colour);

async function choose(wanted) {
  write({ jobs: wanted.join(",") });
  await show();
}

async function show() {
  assign(ids());
  const missing = ids().filter((id) => !jobs.has(id)), gone = [];
  await Promise.all(missing.map(async (id) => {
    try { jobs.set(id, await ask(`/api/v1/jobs/${encodeURIComponent(id)}`)); } catch (error) { gone.push(`${id}: ${sentence(error)}`); }
  }));
  const any = list().length > 0;
  byId("nothing").hidden = any;
  byId("compared").hidden = !any;
  text(byId("compare-about"), gone.join(" ") || (any ? `${list().length} ${list().length === 1 ? "job" : "jobs"}` : ""));
  picker.draw();
  if (!any) return;
  tables.draw();
  parallel.draw();
  await curves.draw();
}

const group = (key, usual, apply) => {
  const buttons = [...document.querySelectorAll(`button[data-${key}]`)];
  const set = (button) => { press(buttons, button); apply(button.dataset[key]); };
  for (const button of buttons) button.addEventListener("click", () => { set(button); write({ [key]: button.dataset[key] === usual ? "" : button.dataset[key] }); });
  const wanted = buttons.find((b) => b.dataset[key] === read(key, usual));
  if (wanted) set(wanted);
};
group("metric", "loss", (v) => curves.setMetric(v));
group("axis", "step", (v) => curves.setAxis(v));
group("scale", "linear", (v) => curves.setScale(v));
smoothingSlider(byId("smooth"), byId("smooth-value"), (factor) => curves.setSmoothing(factor));
group("settings", "different", (v) => tables.setAll(v === "all"));
// --- live ---------------------------------------------------------------------------------------------

/** Between two readings of the curves of jobs that run. */
const CURVES_EVERY_MS = 2000;
const isOver = (job) => ["succeeded", "failed", "cancelled"].includes(job.state);
let frame = 0, stale = false;
new Stream({
  path: () => "/api/v1/stream",
  onStatus: showLive,
  onFrame(message) {
    const known = message.type === "job" ? jobs.get(message.job.id) : null;
    if (message.type === "live") { for (const job of list()) if (!isOver(job)) jobs.delete(job.id); show().catch(() => {}); }
    if (!known || known.last_seq > message.job.last_seq) return;
    jobs.set(known.id, message.job);
    curves.changed(known.id);
    stale = true;
    frame ||= setTimeout(() => { frame = 0; if (list().length) { tables.draw(); parallel.draw(); } }, 500);
  },
});
setInterval(() => { if (stale && !document.hidden) { stale = false; curves.draw(); } }, CURVES_EVERY_MS);

/** For tests and consoles. */
window.lockstep = { jobs: list, get chart() { return curves.chart; } };
show().catch((error) => text(byId("compare-about"), sentence(error)));
