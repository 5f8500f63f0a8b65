// The script that every page loads: keyboard shortcuts (`?` lists them), notifications, and the wrapping of long names.

import { ask, byId, make, openDialog, store, readStored } from "./page.js";
import { writeWrapped } from "./cut.js";
import { setUpNotifications } from "./notify.js";

const PAGES = { j: "/jobs", q: "/queue", n: "/jobs/new", c: "/compare", d: "/datasets", m: "/machines" };
const HELP = [
  ["/", "search"], ["g then j, q, c, d, m", "Jobs, Queue, Compare, Datasets, Machines"], ["n", "new job"],
  ["] and [", "next and previous job"], ["1, 2, 3 …", "tabs of a job, from the left"], ["← →", "in a chart: move the crosshair; Shift for larger steps"],
  ["+ − 0", "in a chart: zoom in, out, show all"],
  ["fingers", "on a chart: two fingers zoom; a long press and a move select a range to zoom to; two taps show all"], ["t", "light or dark"], ["?", "this list"], ["Esc", "close"],
];

/** Shortcuts without Ctrl or Alt disturb users of speech input (WCAG 2.1.4), so they can be switched off. */
const areShortcutsOff = () => readStored("shortcuts") === "off";

const isTextField = (target) => target.matches?.("input, textarea, select, [contenteditable]");
/** Time at which g was pressed. For 1.5 s, the key of a page then opens the page. */
let gPressedAt = 0;

/** Opens the next (`step` 1) or previous (`step` -1) of the newest 500 jobs. On another page, or for an older job, opens the newest job. */
async function openNeighbour(step) {
  const id = location.pathname.match(/^\/jobs\/(j\w{26})$/)?.[1];
  const { jobs } = await ask("/api/v1/jobs?limit=500");
  const at = jobs.findIndex((j) => j.id === id), job = jobs[at < 0 ? 0 : at + step];
  if (job) location.href = `/jobs/${job.id}`;
}

/** Focuses the search. Directly after a dialog has closed, elements behind the dialog may only get the focus in the next frame. */
function focusSearch(search, mayRetry = true) {
  search?.focus();
  search?.select();
  if (mayRetry && search && document.activeElement !== search) requestAnimationFrame(() => focusSearch(search, false));
}

/** Opens a panel of a job by its position, from 1, scrolls the panel into view, and focuses its tab. */
function openPanel(number) {
  const tab = document.querySelectorAll("#panels [role=tab]:not([hidden])")[number - 1];
  if (!tab) return;
  tab.click();
  tab.focus({ preventScroll: true });
  const { top } = tab.getBoundingClientRect();
  if (top < 0 || top > innerHeight / 2) byId("panels").scrollIntoView({ block: "start" });
}

function openHelp() {
  const box = make("input", { type: "checkbox", id: "shortcuts", checked: !areShortcutsOff() });
  box.addEventListener("change", () => store("shortcuts", box.checked ? null : "off"));
  const list = make("dl", {}, ...HELP.flatMap(([keys, what]) => [make("dt", { textContent: keys }), make("dd", { textContent: what })]));
  openDialog("help", "Keyboard", [make("label", { className: "inline" }, box, "single-key shortcuts"), list], make("a", { href: "/docs", className: "button", textContent: "Documentation" }));
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const search = byId("search") ?? byId("log-search") ?? byId("docs-search");
  if (event.key === "Escape" && isTextField(event.target)) return event.target.blur();
  if (isTextField(event.target) || areShortcutsOff()) return;
  const act = {
    "/": () => focusSearch(search), "?": openHelp, t: () => byId("theme").click(), n: () => { location.href = PAGES.n; },
    g: () => { gPressedAt = Date.now(); }, "]": () => openNeighbour(1), "[": () => openNeighbour(-1),
  }[event.key] ?? (/^[1-8]$/.test(event.key) && (() => openPanel(Number(event.key))));
  if (Date.now() - gPressedAt < 1500 && PAGES[event.key]) { event.preventDefault(); location.href = PAGES[event.key]; return; }
  // A chart has its own keys.
  if (!act || event.target.closest?.(".chart")) return;
  event.preventDefault();
  act();
});

setUpNotifications();
// Lets paths and long names wrap between two words.
for (const node of document.querySelectorAll("h1, .path code")) if (!node.firstElementChild) writeWrapped(node, node.textContent);
// On a phone, the links to pages are one row that scrolls.
document.querySelector(".bar nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });

const button = byId("keys");
if (button) { button.hidden = false; button.addEventListener("click", openHelp); }
