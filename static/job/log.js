// The tail of the log. It follows the newest line until the reader scrolls up; then it holds still and
// counts what is new.

import { ask, byId, text } from "../page.js";
import { count, plural, timeOfDay } from "../numbers.js";
import { colourOf } from "./ranks.js";

/** Lines kept on the page; older ones are in the rank's log file. */
const KEEP = 1000;
const LOUD = /\b(warn(ing)?|retry|slow|skipped|stalled)\b/i;
const BAD = /\b(error|failed|panicked|killed|fatal)\b/i;

export class Log {
  #seen = new Map();
  #pending = [];
  #frame = 0;
  #unread = 0;
  #total = 0;

  constructor(job) {
    this.job = job;
    this.box = byId("log-lines");
    this.follow = byId("log-follow");
    this.rank = byId("log-rank");
    this.newest = byId("log-newest");
    this.box.addEventListener("scroll", () => this.#scrolled());
    this.follow.addEventListener("change", () => { if (this.follow.checked) this.#toEnd(); });
    this.newest.addEventListener("click", () => { this.follow.checked = true; this.#toEnd(); });
    this.rank.addEventListener("change", () => this.load());
  }

  /** The choices of the rank filter. */
  ranks(n) {
    for (let r = this.rank.options.length - 1; r < n; r++) this.rank.add(new Option(`rank ${r}`, r));
  }

  /** The newest lines of the chosen rank, or of all. */
  async load() {
    const rank = this.rank.value;
    const lines = await history(this.job, rank);
    if (rank !== this.rank.value) return;
    this.#seen.clear();
    this.#pending = [];
    this.#unread = 0;
    this.#total = 0;
    this.box.replaceChildren();
    for (const line of lines) this.#take(line.attempt, line.rank, line);
    this.#flush();
    this.#toEnd();
  }

  /** A `log` event. Lines already shown (the history and the stream overlap) are left out. */
  apply({ attempt, rank, lines }) {
    if (this.rank.value !== "" && Number(this.rank.value) !== rank) return;
    for (const line of lines) this.#take(attempt, rank, line);
    this.#frame ||= requestAnimationFrame(() => { this.#frame = 0; this.#flush(); });
  }

  #take(attempt, rank, line) {
    const key = `${attempt}:${rank}`;
    if (line.number <= (this.#seen.get(key) ?? 0)) return;
    this.#seen.set(key, line.number);
    this.#pending.push({ attempt, rank, ...line });
  }

  #flush() {
    const lines = this.#pending.splice(0);
    if (!lines.length) return this.#note();
    this.box.querySelector(".none")?.remove();
    this.#total += lines.length;
    const rows = document.createDocumentFragment();
    for (const line of lines.slice(-KEEP)) rows.append(row(line));
    this.box.append(rows);
    while (this.box.childElementCount > KEEP) this.box.firstElementChild.remove();
    if (this.follow.checked) this.#toEnd(); else this.#unread += lines.length;
    this.#note();
  }

  #toEnd() {
    this.#unread = 0;
    this.box.scrollTop = this.box.scrollHeight;
    this.#note();
  }

  #scrolled() {
    const atEnd = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 24;
    if (!atEnd && this.box.scrollTop < (this.last ?? 0)) this.follow.checked = false;
    else if (atEnd && !this.follow.checked) { this.follow.checked = true; this.#unread = 0; }
    this.last = this.box.scrollTop;
    this.#note();
  }

  #note() {
    this.newest.hidden = this.follow.checked;
    if (!this.box.childElementCount) {
      const none = Object.assign(document.createElement("p"), { className: "none", textContent: "No line yet. Ranks write here as soon as they start." });
      this.box.append(none);
    }
    text(byId("log-note"), this.#unread ? `held still, ${plural(this.#unread, "new line")}`
      : this.#total > KEEP ? `the newest ${count(KEEP)} lines` : this.#total ? plural(this.#total, "line") : "");
    this.box.dataset.lines = this.#total;
  }
}

function row({ attempt, rank, at, text: words }) {
  const line = document.createElement("p");
  const time = document.createElement("time"), who = document.createElement("b"), what = document.createElement("span");
  time.dateTime = at;
  time.textContent = timeOfDay(at);
  who.textContent = `rank ${rank}`;
  who.title = `attempt ${attempt}`;
  who.style.color = `var(--${colourOf(rank)})`;
  what.textContent = words;
  if (BAD.test(words)) line.className = "bad"; else if (LOUD.test(words)) line.className = "loud";
  line.append(time, who, what);
  return line;
}

async function history(job, rank) {
  const { lines } = await ask(`/api/v1/jobs/${job}/logs?tail=${KEEP}${rank === "" ? "" : `&rank=${rank}`}`);
  return lines;
}
