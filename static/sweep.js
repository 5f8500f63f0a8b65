// The page of a sweep. The server renders the page; the script requests it again every few seconds until the sweep has ended, and changes
// the parts that differ. The script also draws the parallel coordinates, like the page Compare.

import { ask, byId, confirmThen, errorText, setMessage, setText } from "./page.js";
import { caution } from "./compare/caution.js";
import { assignLooks, swatch } from "./compare/colours.js";
import { Parallel } from "./compare/parallel.js";
import { Selection } from "./compare/selection.js";
import { morph, refresher } from "./machines/morph.js";

const REFRESH_INTERVAL_MS = 4000, JOBS_PER_REQUEST = 200;
const sweep = byId("sweep"), url = `/api/v1/sweeps/${encodeURIComponent(sweep.dataset.sweep)}`;
let jobs = [];

const selection = new Selection(() => jobs), parallel = new Parallel(byId("parallel"), () => jobs, selection);

/** Reads the trials' jobs, which have values that the table lacks, and draws the parallel coordinates. */
async function draw() {
  const loaded = [];
  for (let cursor = ""; cursor !== null;) {
    const page = await ask(`/api/v1/jobs?tag=${encodeURIComponent(sweep.dataset.sweep)}&limit=${JOBS_PER_REQUEST}${cursor && `&cursor=${encodeURIComponent(cursor)}`}`);
    loaded.push(...page.jobs);
    cursor = page.next_cursor;
  }
  jobs = loaded.filter((job) => job.trial?.sweep === sweep.dataset.sweep).sort((a, b) => a.trial.number - b.trial.number);
  setText(byId("caution"), caution(jobs));
  assignLooks(jobs.map((job) => job.id));
  byId("settings-and-results").hidden = jobs.length < 2;
  markTrials();
  if (jobs.length > 1) parallel.draw();
}

/** Shows the colour of each trial's line in the table. */
function markTrials() {
  if (jobs.length < 2) return;
  for (const { id, trial } of jobs) {
    const cell = sweep.querySelector(`[data-id="trials"] tr[data-id="${trial.number}"] td`);
    cell?.querySelector(".swatch")?.remove();
    cell?.prepend(swatch(id));
  }
}

const refresh = refresher((page) => {
  morph(sweep, page.getElementById("sweep"));
  markTrials();
  return draw();
});

async function act(action) {
  setText(byId("sweep-error"), "");
  await ask(`${url}/${action}`, { method: "POST" });
  await refresh();
}

sweep.addEventListener("click", (event) => {
  const action = event.target.closest("[data-act]")?.dataset.act;
  if (action === "cancel") confirmThen({ title: "Cancel the sweep?", detail: "Its unfinished trials are cancelled. They keep their checkpoints and logs.", yes: "Cancel the sweep", act: () => act(action) });
  else if (action === "delete") confirmThen({ title: "Delete the sweep?", detail: "Its jobs stay, with their logs and checkpoints, as jobs without a sweep.", yes: "Delete the sweep", act: async () => { await ask(url, { method: "DELETE" }); location.href = "/sweeps"; } });
  else if (action) act(action).catch((error) => setMessage(byId("sweep-error"), errorText(error)));
});

draw().catch((error) => setMessage(byId("sweep-error"), errorText(error)));
setInterval(() => { if (sweep.dataset.over === undefined) refresh(); }, REFRESH_INTERVAL_MS);
