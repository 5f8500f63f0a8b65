// The history of a job: attempts, people's requests, alerts, and the jobs from which and into which it was forked.

import { ask, byId, make, setText } from "../page.js";
import { clock, count, plural, timeAndDay } from "../numbers.js";

/** Returns epoch and step from a checkpoint's id: `1-38`. */
const shortName = (id) => id.slice(id.indexOf("-") + 1);
const fromCheckpoint = (id) => (id ? `from checkpoint ${shortName(id)}` : "from the start");

/** Returns title and description of an entry. */
function describe(entry) {
  switch (entry.what) {
    case "submitted": return ["Submitted"];
    case "forked": return ["Forked", fromCheckpoint(entry.checkpoint)];
    case "started": return [`Attempt ${entry.attempt} started`, `${fromCheckpoint(entry.checkpoint)}${entry.agents.length ? ` on ${entry.agents.join(", ")}` : ""}${entry.reason ? `; ${entry.reason.words}` : ""}`];
    case "ended": return [`Attempt ${entry.attempt} ${entry.state}`, describeEnd(entry)];
    case "pause_requested": return ["Pause requested"];
    case "cancel_requested": return ["Cancel requested"];
    case "failed": return ["Failed", entry.reason?.words];
    case "alert": return [`${{ WARN: "Warning", ERROR: "Error" }[entry.level] ?? "Alert"}: ${entry.title}`, entry.text];
    case "precision_changed": return ["Precision changed", entry.reason?.words];
    default: return [entry.what.replaceAll("_", " ").replace(/^./, (c) => c.toUpperCase())];
  }
}

function describeEnd({ reason, rank, step, state, next_checkpoint }) {
  const parts = [];
  if (reason) parts.push(reason.words);
  if (rank != null && !reason?.words.includes(`rank ${rank}`)) parts.push(`rank ${rank}`);
  if (step != null && !reason?.words.includes(`step ${step}`)) parts.push(`${state === "succeeded" ? "after" : "at"} step ${count(step)}`);
  if (next_checkpoint) parts.push(`the next attempt continued from ${shortName(next_checkpoint)}`);
  return parts.join("; ");
}

export class History {
  #requests = 0;
  /** For each attempt, the reason why the previous attempt ended. Charts show the reason at the start of the attempt. */
  reasons = new Map();
  /** The job's place in the queue and its reason for waiting, `{ place, reason }`; null if the job does not wait. */
  queue = null;

  /** `onLoad()`: called after the history has been read. */
  constructor(job, onLoad) { Object.assign(this, { job, onLoad }); }

  /** Reads and shows the whole history. */
  async load() {
    const thisRequest = ++this.#requests, history = await ask(`/api/v1/jobs/${this.job}/history`);
    for (let cursor = history.next_cursor; cursor && thisRequest === this.#requests;) {
      const page = await ask(`/api/v1/jobs/${this.job}/history?cursor=${encodeURIComponent(cursor)}`);
      history.entries.push(...page.entries);
      cursor = page.next_cursor;
    }
    if (thisRequest !== this.#requests) return;
    this.queue = history.queue;
    const why = ({ state, reason }) => (state === "paused" ? "a pause on request" : reason?.code === "cancelled_by_user" ? "a cancellation" : reason?.words ?? state);
    this.reasons = new Map(history.entries.filter((e) => e.what === "ended").map((e) => [e.attempt + 1, why(e)]));
    byId("history-rows").replaceChildren(...history.entries.map(row));
    this.#drawRelatives(history);
    this.onLoad();
  }

  #drawRelatives({ parent, forks }) {
    const box = byId("lineage"), relative = ({ job, name, state, checkpoint, who, at }) => {
      const label = name ?? "a job that was deleted";
      return make("li", {}, name == null ? make("span", { className: "muted", textContent: label }) : make("a", { href: `/jobs/${job}`, textContent: label, title: label }),
        state ? make("span", { className: "pill", textContent: state, "data-state": state }) : "", make("span", { className: "small", textContent: `${fromCheckpoint(checkpoint)}${who ? ` by ${who}` : ""}` }), at ? timeNode(at) : "");
    };
    box.hidden = !parent && !forks.length;
    const list = (title, all) => (all.length ? [make("h3", { textContent: title }), make("ul", {}, ...all.map(relative))] : []);
    box.replaceChildren(...list("Forked from", parent ? [parent] : []), ...list(plural(forks.length, "fork"), forks));
    const link = byId("parent");
    if (link && parent?.name) setText(link, parent.name);
  }
}

const timeNode = (at) => make("time", { dateTime: at, title: at, textContent: timeAndDay(at, 8) });

function row(entry, i, all) {
  const [title, description] = describe(entry), at = new Date(entry.at), line = make("li", { "data-what": entry.what });
  if (entry.attempt) line.dataset.attempt = entry.attempt;
  if (entry.state) line.dataset.state = entry.state;
  if (entry.reason) line.dataset.code = entry.reason.code;
  const what = make("div", {}, make("b", { textContent: title }));
  if (entry.who) what.append(make("span", { className: "small", textContent: ` by ${entry.who}` }));
  if (entry.what === "ended") {
    const start = all.find((e) => e.what === "started" && e.attempt === entry.attempt);
    if (start) what.append(make("span", { className: "small", textContent: ` after ${clock((at - new Date(start.at)) / 1000)}` }));
  }
  if (description) what.append(make("p", { className: "small", textContent: description }));
  line.append(timeNode(entry.at), what);
  return line;
}
