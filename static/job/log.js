// The log: a view of a file that may have millions of lines. It follows the newest line until the reader scrolls up, reads older and newer
// lines when the reader scrolls to them, and searches on the server.

import { ask, byId, make, setText } from "../page.js";
import { readUrl, writeUrl } from "../address.js";
import { plural, timeOfDay } from "../numbers.js";
import { colourOf } from "./ranks.js";

/** Maximum number of lines on the page. Other lines are read when the reader scrolls. */
const MAX_LINES = 1000;
/** Number of events per request. */
const EVENTS_PER_REQUEST = 400;
/** Number of matching lines after which a search pauses, because they fill the panel. */
const MIN_FOUND_LINES = 25;
/** At most `FOLLOW_PIXELS` from its end the log follows new lines, and at most `READ_PIXELS` from either end it reads more lines. */
const FOLLOW_PIXELS = 24, READ_PIXELS = 400;
/** Words of lines that are marked as warnings, and as errors. */
const WARNING = /\b(warn(ing)?|retry|slow|skipped|stalled)\b/i;
const ERROR = /\b(error|failed|panicked|killed|fatal)\b/i;

export class Log {
  /** For each attempt and rank, the highest number of a received line. */
  #seen = new Map();
  #pending = [];
  #frame = 0;
  /** Number of new lines below the shown lines, and number of lines that the page has received. */
  #unread = 0;
  #lineCount = 0;
  #requests = 0;
  /** Whether the log has older and newer lines than the shown lines, and whether a request is open. */
  #hasOlder = false;
  #hasNewer = false;
  #isReading = false;
  #lastTop = 0;
  /** Sequence number of the newest event whose lines are not shown because the reader has scrolled up. */
  #heldSeq = 0;
  /** While searching: the cursor of older lines that have not been searched. */
  #cursor = null;

  /** `hasEnded()`: whether the job has ended. */
  constructor(job, hasEnded) {
    Object.assign(this, { job, hasEnded });
    this.box = byId("log-lines");
    this.followBox = byId("log-follow");
    this.rank = byId("log-rank");
    this.attempt = byId("log-attempt");
    this.search = byId("log-search");
    this.newestButton = byId("log-newest");
    this.search.value = readUrl("q").slice(0, this.search.maxLength);
    this.box.addEventListener("scroll", () => this.#handleScroll(), { passive: true });
    // A change of the page's size must not count as scrolling by the reader.
    new ResizeObserver(() => { if (this.followBox.checked) this.#scrollToEnd(); }).observe(this.box);
    this.followBox.addEventListener("change", () => { if (this.followBox.checked) this.showNewest(); });
    this.newestButton.addEventListener("click", () => { this.followBox.checked = true; this.showNewest(); });
    for (const choice of [this.rank, this.attempt]) choice.addEventListener("change", () => this.#applyFilter());
    let typing = 0;
    this.search.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(() => this.#applyFilter(), 200); });
    this.box.addEventListener("click", (event) => {
      const time = event.target.closest("time");
      if (time && !getSelection().toString()) this.#putIntoUrl(time.parentElement);
    });
  }

  /** Offers ranks and attempts in the filters. */
  offerFilters(rankCount, attemptCount) {
    for (let r = this.rank.options.length - 1; r < rankCount; r++) this.rank.add(new Option(`rank ${r}`, r));
    for (let a = this.attempt.options.length; a <= attemptCount; a++) this.attempt.add(new Option(a, a));
    if (readUrl("rank") !== "" && this.rank.value === "") this.rank.value = readUrl("rank");
    if (readUrl("attempt") !== "" && this.attempt.value === "") this.attempt.value = readUrl("attempt");
    byId("log-download").href = `/api/v1/jobs/${this.job}/logs?${this.#filter({ format: "text" })}`;
  }

  #filter(query = {}) {
    const given = { rank: this.rank.value, attempt: this.attempt.value, q: this.search.value.trim(), ...query };
    return new URLSearchParams(Object.entries(given).filter(([, v]) => v !== "" && v !== null && v !== undefined));
  }

  get #isSearching() { return this.search.value.trim() !== ""; }

  #applyFilter() {
    writeUrl({ rank: this.rank.value, attempt: this.attempt.value, q: this.search.value.trim(), line: "" });
    byId("log-download").href = `/api/v1/jobs/${this.job}/logs?${this.#filter({ format: "text" })}`;
    return this.load();
  }

  async #ask(query) {
    const thisRequest = ++this.#requests;
    this.#isReading = true;
    try {
      const response = await ask(`/api/v1/jobs/${this.job}/logs?${this.#filter(query)}`);
      return thisRequest === this.#requests ? response : null;
    } finally { if (thisRequest === this.#requests) this.#isReading = false; }
  }

  /** Shows the line that the page's URL names, or the newest lines. */
  async load() {
    const line = readUrl("line").match(/^(\d+)\.(\d+)\.(\d+)\.(\d+)$/)?.slice(1).map(Number);
    if (!line) return this.showNewest();
    const [seq, attempt, rank, number] = line;
    const [before, after] = await Promise.all([ask(`/api/v1/jobs/${this.job}/logs?${this.#filter({ sort: "-seq", limit: EVENTS_PER_REQUEST, before: seq })}`), ask(`/api/v1/jobs/${this.job}/logs?${this.#filter({ after: seq - 1, limit: EVENTS_PER_REQUEST })}`)]);
    this.followBox.checked = false;
    this.#cursor = before.next_cursor;
    this.#replaceLines([...before.lines.reverse(), ...after.lines], { hasOlder: before.next_cursor !== null, hasNewer: after.next_cursor !== null });
    const found = [...this.box.children].find((row) => row.dataset.at === `${seq}.${attempt}.${rank}.${number}`);
    found?.classList.add("marked");
    found?.scrollIntoView({ block: "center" });
  }

  /** Called after lines were missed: shows the newest lines if the log follows its end. Otherwise, scrolling reads the missed lines. */
  async handleGap() {
    // If an older database was restored, lines with the same numbers arrive again.
    this.#seen.clear();
    this.#heldSeq = 0;
    if (this.followBox.checked) return this.showNewest();
    this.#hasNewer = true;
    this.drawNote();
  }

  async showNewest() {
    const response = await this.#ask({ sort: "-seq", limit: this.#isSearching ? EVENTS_PER_REQUEST : MAX_LINES });
    if (!response) return;
    this.#cursor = response.next_cursor;
    this.#replaceLines(response.lines.reverse(), { hasOlder: response.next_cursor !== null, hasNewer: false });
    if (!this.followBox.checked && readUrl("line") === "") this.followBox.checked = true;
    this.#scrollToEnd();
    if (this.#isSearching) await this.#continueSearch();
  }

  /** Searches until the panel is full or the log's beginning is reached. The server searches for about a second per request. */
  async #continueSearch() {
    while (this.#isSearching && this.#hasOlder && this.box.querySelectorAll("[data-at]").length < MIN_FOUND_LINES) {
      if (await this.#loadOlder({ staysAtEnd: true })) continue;
      if (!this.#isReading) return;
      await new Promise((done) => setTimeout(done, 50));
    }
  }

  #replaceLines(lines, { hasOlder, hasNewer }) {
    this.#pending = [];
    this.#unread = 0;
    this.#lineCount = lines.length;
    this.#heldSeq = 0;
    const from = firstShown(lines);
    this.#hasOlder = hasOlder || from > 0;
    this.#hasNewer = hasNewer;
    for (const line of lines) this.#markSeen(line);
    this.box.replaceChildren(...lines.slice(from).map(row));
    this.drawNote();
    performance.mark("log shown");
  }

  #markSeen({ attempt, rank, number }) {
    const key = `${attempt}:${rank}`;
    if (number > (this.#seen.get(key) ?? 0)) this.#seen.set(key, number);
  }

  /** Handles a `log` event. Lines that are already shown (history and stream overlap) are skipped. */
  apply({ seq, attempt, rank, lines }) {
    if (this.rank.value !== "" && Number(this.rank.value) !== rank) return;
    if (this.attempt.value !== "" && Number(this.attempt.value) !== attempt) return;
    const q = this.search.value.trim().toLowerCase();
    for (const line of lines) {
      if (line.number > 0 && line.number <= (this.#seen.get(`${attempt}:${rank}`) ?? 0)) continue;
      this.#markSeen({ attempt, rank, number: line.number });
      if (!q || line.text.toLowerCase().includes(q)) this.#pending.push({ seq, attempt, rank, ...line });
    }
    // A hidden page draws no lines: only the newest lines are kept until the page is visible again.
    if (this.#pending.length > 4 * MAX_LINES) this.#dropPending();
    this.#frame ||= requestAnimationFrame(() => { this.#frame = 0; this.#flush(); });
  }

  /** Drops all pending lines except the newest. */
  #dropPending() { this.#lineCount += this.#pending.length - MAX_LINES; this.#pending = this.#pending.slice(-MAX_LINES); this.#hasOlder = true; }

  #flush() {
    const lines = this.#pending.splice(0);
    if (!lines.length) return this.drawNote();
    this.#lineCount += lines.length;
    // If the reader has scrolled up, newer lines are read when the reader scrolls to them.
    if (!this.followBox.checked) {
      this.#unread += lines.length;
      this.#hasNewer = true;
      this.#heldSeq = lines.at(-1).seq;
      return this.drawNote();
    }
    this.box.querySelector(".none")?.remove();
    const rows = document.createDocumentFragment();
    for (const line of lines.slice(-MAX_LINES)) rows.append(row(line));
    this.box.append(rows);
    this.#trim("first");
    this.#scrollToEnd();
  }

  /** Removes lines beyond the maximum, beginning at one end: `first` or `last`. */
  #trim(end) {
    while (this.box.childElementCount > MAX_LINES) {
      this.box[`${end}ElementChild`].remove();
      if (end === "first") this.#hasOlder = true; else this.#hasNewer = true;
    }
  }

  #scrollToEnd() {
    this.#unread = 0;
    this.box.scrollTop = this.box.scrollHeight;
    this.#lastTop = this.box.scrollTop;
    this.drawNote();
  }

  /** Number of pixels that can be scrolled down. */
  get #pixelsBelow() { return this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight; }

  #handleScroll() {
    const { box } = this, below = this.#pixelsBelow;
    if (below >= FOLLOW_PIXELS && box.scrollTop < this.#lastTop) this.followBox.checked = false;
    else if (below < FOLLOW_PIXELS && !this.#hasNewer && !this.followBox.checked) { this.followBox.checked = true; this.#unread = 0; }
    this.#lastTop = box.scrollTop;
    if (box.scrollTop < READ_PIXELS && this.#hasOlder) this.#loadOlder();
    else if (below < READ_PIXELS && this.#hasNewer) this.#loadNewer();
    this.drawNote();
  }

  /** Reads older lines. `staysAtEnd`: a log that follows its end stays at its end. Returns whether the server responded. */
  async #loadOlder({ staysAtEnd = false } = {}) {
    if (this.#isReading) return false;
    const first = this.box.querySelector("p[data-at]"), seq = Number(first?.dataset.at.split(".")[0]);
    if (this.#isSearching ? !this.#cursor : !seq) return false;
    const place = this.#isSearching ? { cursor: this.#cursor } : { before: seq };
    const response = await this.#ask({ sort: "-seq", limit: EVENTS_PER_REQUEST, ...place }).catch(() => null);
    if (!response) return false;
    response.lines.reverse();
    this.#cursor = response.next_cursor;
    this.#hasOlder = response.next_cursor !== null;
    const height = this.box.scrollHeight;
    if (response.lines.length) this.box.querySelector(".none")?.remove();
    this.box.prepend(...response.lines.map(row));
    if (staysAtEnd && this.followBox.checked) this.#scrollToEnd();
    else {
      this.box.scrollTop += this.box.scrollHeight - height;
      this.#trim("last");
      this.followBox.checked = false;
    }
    this.drawNote();
    return true;
  }

  async #loadNewer() {
    if (this.#isReading) return;
    const last = this.box.lastElementChild, seq = Number(last?.dataset.at?.split(".")[0]);
    if (!seq) return;
    const response = await this.#ask({ after: seq, limit: EVENTS_PER_REQUEST }).catch(() => null);
    if (!response) return;
    // Counts lines that arrived meanwhile as unread, because the response may lack these lines.
    this.#flush();
    this.#hasNewer = response.next_cursor !== null || this.#heldSeq > (response.lines.at(-1)?.seq ?? seq);
    if (!this.#hasNewer) this.#unread = 0;
    this.box.append(...response.lines.map(row));
    const top = this.box.scrollTop, height = this.box.scrollHeight;
    this.#trim("first");
    this.box.scrollTop = top - (height - this.box.scrollHeight);
    this.drawNote();
    // If the lines do not fill the panel, the reader cannot scroll to read the rest.
    if (this.#hasNewer && response.next_cursor === null && response.lines.length && this.#pixelsBelow < READ_PIXELS) await this.#loadNewer();
  }

  /** Writes this line into the page's URL. */
  #putIntoUrl(line) {
    for (const other of this.box.querySelectorAll(".marked")) other.classList.remove("marked");
    line.classList.add("marked");
    writeUrl({ line: line.dataset.at, tab: "" });
  }

  /** Shows the number of lines, or why there is no line. */
  drawNote() {
    this.newestButton.hidden = this.followBox.checked;
    if (!this.box.childElementCount) this.box.append(make("p", { className: "none" }));
    const none = this.box.querySelector(".none");
    const noLine = this.hasEnded() ? "No line: the job ended before a rank wrote one." : "No line yet. Ranks write here as soon as they start.";
    if (none) setText(none, !this.#isSearching ? noLine : this.#hasOlder ? "Searching older lines …" : "No line matches.");
    setText(byId("log-note"), this.#unread ? `not following, ${plural(this.#unread, "new line")} below`
      : this.#isSearching ? `${plural(this.box.querySelectorAll("[data-at]").length, "line")} found${this.#hasOlder ? ", older lines not searched yet" : ""}`
      : this.#hasOlder ? `${plural(this.box.childElementCount, "line")}, older lines above` : this.#lineCount ? plural(this.#lineCount, "line") : "");
    this.box.dataset.lines = this.#lineCount;
  }
}

/** Returns the index of the first of about `MAX_LINES` lines to show. It begins an event, because older lines are read by whole events. */
function firstShown(lines) {
  let from = Math.max(0, lines.length - MAX_LINES);
  while (from > 0 && from + 1 < lines.length && lines[from].seq === lines[from - 1].seq) from++;
  return from;
}

function row({ seq, attempt, rank, number, at, text }) {
  return make("p", { "data-at": `${seq}.${attempt}.${rank}.${number}`, className: ERROR.test(text) ? "bad" : WARNING.test(text) ? "loud" : "" },
    make("time", { dateTime: at, textContent: timeOfDay(at), title: "Put this line into the page's URL" }),
    make("b", { textContent: `rank ${rank}`, title: `attempt ${attempt}, line ${number}`, className: `of-${colourOf(rank)}` }), make("span", { textContent: text }));
}
