// The list by groups. Each group has a row with the mean and the spread of every column over all its jobs, which the server computes. If
// the group is open, its jobs follow. The open groups are in the URL.

import { ask, make, makeButton, parseList, Problem, serverNow, setText } from "../page.js";
import { ALL } from "../job/names.js";
import { age, count, percent, plural, rate } from "../numbers.js";
import { readUrl, writeUrl } from "../address.js";
import { writeShortened } from "../cut.js";
import { metricsParameter, filter, MIN_PAUSE_MS, parameters, pauseAfter } from "./query.js";
import { groupedBy, describeGroup, isInGroup } from "./grouping.js";
import { createRow } from "./row.js";
import { arrange, order } from "./sort.js";

/** Number of groups in the first request. */
const FIRST_GROUPS = 100;
/** Number of a group's jobs in the first request. */
const FIRST_JOBS = 25;
/** Maximum number of groups, or of a group's jobs, in a request. */
const MAX_PER_REQUEST = 1000;
/** Maximum number of open groups. */
const MAX_OPEN = 20;
/** For each column of numbers, the format of its mean. */
const FORMATS = { ...Object.fromEntries(Object.entries(ALL).map(([name, { format }]) => [name, format])), best: percent, speed: rate };
/** The metric of each default column of numbers. */
const DEFAULT_METRICS = { loss: "loss", best: "best", speed: "speed" };
/** Columns of numbers that the server knows by the same names. All other added columns are settings. */
const NUMBERS = [...Object.keys(ALL), "step", "epoch", "attempt", "ranks"];
/** The list's sort keys for which groups have no mean, each with the sort key of groups that replaces it. */
const NO_MEAN = { created: "newest", started: "newest", finished: "newest", name: "group", state: "group", project: "group", owner: "group" };

const plain = (v) => String(Number(v.toPrecision(4)));

/** Returns a row with a button below the names. A cell that spans more columns than the table has would add columns of full width. */
const buttonRow = (button) => make("tr", { className: "group-rest" }, make("td"), make("td"), make("td", { className: "c-name" }, button));

/** Returns the open groups in the URL, by their values. */
const openKeys = () => new Set(parseList(readUrl("open")).slice(0, MAX_OPEN).map((values) => JSON.stringify(values)));

export class Groups {
  /** Visible jobs, by id. */
  jobs = new Map();
  isEmpty = false;
  /** The groups on the page, by their values. */
  #shown = new Map();
  #nextCursor = null;
  #loads = 0;
  #reloadTimer = 0;
  #pause = MIN_PAUSE_MS;
  /** Added columns of texts, for which the server has no mean. */
  #textColumns = new Set();

  /**
   * `fill(row, job)`: writes a job's row. `extra()`: returns the keys of added columns. `onChange()`: called after rows are added or
   * removed. `onRead(job)`: called whenever a visible job is read.
   */
  constructor(table, { fill, extra, onChange, onRead }) {
    Object.assign(this, { table, fill, extra, onChange, onRead });
    this.moreGroups = make("tbody", { className: "group-more", hidden: true }, buttonRow(makeButton("More groups", () => this.#read(this.#nextCursor))));
    table.append(this.moreGroups);
  }

  get isGrouped() { return groupedBy().length > 0; }

  /** The number of job rows that can be selected. */
  get rowCount() { let n = 0; for (const { rows } of this.#shown.values()) n += rows.length; return n; }

  clear() {
    this.#loads++;
    for (const { body } of this.#shown.values()) body.remove();
    this.#shown.clear();
    this.jobs.clear();
    this.moreGroups.hidden = true;
    this.#nextCursor = null;
  }

  /** Reads all groups again, and the jobs of open groups. */
  load() { return this.#read(null); }

  /** Returns the order of groups that corresponds to the order of the list. */
  #groupOrder(metrics) {
    const listOrder = order(), sign = listOrder.startsWith("-") ? "-" : "", by = listOrder.replace(/^-/, ""), mean = NO_MEAN[by] ?? by;
    return sign + (NO_MEAN[by] || metrics.includes(mean) ? mean : "group");
  }

  /** Returns the names of metrics, by column. */
  #metrics() {
    const extra = this.extra().filter((key) => !key.startsWith("tag:") && !["owner", "project"].includes(key) && !this.#textColumns.has(key));
    return new Map([...Object.entries(DEFAULT_METRICS), ...extra.map((key) => [key, NUMBERS.includes(key) ? key : `spec.${key.replace(/^spec\./, "")}`])]);
  }

  async #ask(cursor) {
    const limit = Math.min(MAX_PER_REQUEST, Math.max(FIRST_GROUPS, cursor ? 0 : this.#shown.size));
    for (;;) {
      const metrics = this.#metrics(), names = new Set(metrics.values()), by = order().replace(/^-/, "");
      if (!NO_MEAN[by] && !this.#textColumns.has(by)) names.add(by);
      const query = new URLSearchParams([...parameters(filter()), ["by", groupedBy().join(",")], ["metrics", [...names].join(",")], ["sort", this.#groupOrder([...names])], ["limit", limit]]);
      if (cursor) query.set("cursor", cursor);
      try { return await ask(`/api/v1/jobs/groups?${query}`); } catch (error) {
        // A column of texts has no mean, and the error names it. A longer name may contain a shorter one, so it is looked for first.
        const message = error instanceof Problem && error.status === 400 ? error.message : "", added = [...metrics].filter(([key]) => !(key in DEFAULT_METRICS));
        const [textColumn] = added.sort(([, a], [, b]) => b.length - a.length).find(([, name]) => message.includes(name)) ?? (names.has(by) && message.includes(by) ? [by] : []);
        if (!textColumn) throw error;
        this.#textColumns.add(textColumn);
      }
    }
  }

  async #read(cursor) {
    const thisLoad = ++this.#loads, began = performance.now(), response = await this.#ask(cursor);
    this.#pause = pauseAfter(began);
    if (thisLoad !== this.#loads || !this.isGrouped) return;
    const open = openKeys(), seen = new Set();
    for (const group of response.groups) {
      const key = JSON.stringify(group.values);
      seen.add(key);
      let entry = this.#shown.get(key);
      if (!entry) { entry = this.#createEntry(group, key); this.#shown.set(key, entry); }
      entry.group = group;
      this.#fillHead(entry);
    }
    if (!cursor) for (const [key, entry] of this.#shown) if (!seen.has(key)) { entry.body.remove(); this.#shown.delete(key); }
    if (!cursor) arrange(this.table, response.groups.map((group) => this.#shown.get(JSON.stringify(group.values)).body), this.table.querySelector(".group"));
    this.#nextCursor = response.next_cursor;
    this.moreGroups.hidden = !this.#nextCursor;
    this.isEmpty = !this.#shown.size;
    this.onChange();
    await Promise.all([...this.#shown].filter(([key]) => open.has(key)).map(([, entry]) => this.#openJobs(entry)));
  }

  #createEntry(group, key) {
    const cell = (className, ...children) => make("td", { className }, ...children), title = describeGroup(group.values);
    const name = make("span"), toggle = make("button", { type: "button", className: "group-name", "aria-label": title, "aria-expanded": "false" }, name);
    writeShortened(name, title);
    const box = make("input", { type: "checkbox", "aria-label": `Select the jobs of ${title}` });
    const head = make("tr", { className: "group-head" }, cell("c-choose", box), cell("c-state"), make("th", { scope: "rowgroup", className: "c-name" }, toggle), cell("c-progress", make("span", { className: "states" })), cell("c-loss"), cell("num c-best"), cell("num c-speed"), cell("num c-age"));
    const entry = { group, key, title, rows: [], toggle, head, body: make("tbody", { className: "group" }, head) };
    toggle.addEventListener("click", () => this.#toggle(entry));
    box.addEventListener("change", async () => {
      const { checked } = box;
      if (toggle.getAttribute("aria-expanded") === "false" && checked) await this.#toggle(entry);
      for (const row of entry.rows) {
        const mark = row.querySelector("[data-f=choose]");
        if (mark.checked !== checked) { mark.checked = checked; mark.dispatchEvent(new Event("change", { bubbles: true })); }
      }
    });
    this.moreGroups.before(entry.body);
    return entry;
  }

  /** Writes a mean with its spread, `0.412 ± 0.003`, the number of jobs if not all jobs have a value, and the best of several accuracies. */
  #writeSpread(cell, spread, format, jobCount) {
    cell.replaceChildren();
    cell.title = "";
    if (!spread || spread.mean === null) return;
    const { n, mean, std, min, max } = spread;
    cell.append(make("b", { textContent: format(mean) }));
    if (std !== null) cell.append(" ", make("span", { className: "spread", textContent: `± ${format(std).replace(/ %$/, "")}` }));
    if (n !== jobCount) cell.append(" ", make("small", { className: "muted", textContent: `n ${n}` }));
    // The order of groups follows from their best jobs.
    if (n > 1 && cell.matches(".c-best")) cell.append(" ", make("small", { className: "muted", textContent: `best ${format(max)}` }));
    cell.title = `mean of ${plural(n, "job")}${std === null ? "" : `, standard deviation ${format(std)}`}, ${format(min)} to ${format(max)}`;
  }

  #fillHead(entry) {
    const { group, head, body, title } = entry, element = (name) => head.querySelector(`.${name}`), metrics = this.#metrics();
    setText(element("c-state"), plural(group.jobs, "job"));
    setText(element("states"), Object.entries(group.states).map(([state, n]) => `${count(n)} ${state}`).join(" · "));
    element("c-progress").title = element("states").textContent;
    for (const [name, metric] of Object.entries(DEFAULT_METRICS)) this.#writeSpread(element(`c-${name}`), group.metrics[metric], FORMATS[name], group.jobs);
    for (const cell of head.querySelectorAll(".c-extra")) cell.remove();
    for (const key of this.extra()) {
      const cell = make("td", { className: "num c-extra", "data-label": key });
      this.#writeSpread(cell, group.metrics[metrics.get(key)], FORMATS[key] ?? plain, group.jobs);
      element("c-age").before(cell);
    }
    setText(element("c-age"), age(Date.parse(group.newest_at), serverNow()));
    element("c-age").title = `The newest: ${group.newest_at}`;
    body.setAttribute("aria-label", title);
  }

  fillAll() {
    for (const entry of this.#shown.values()) {
      this.#fillHead(entry);
      for (const row of entry.rows) { const job = this.jobs.get(row.dataset.id); if (job) this.fill(row, job); }
    }
  }

  #writeOpenGroups() {
    const keys = [...this.#shown.values()].filter(({ toggle }) => toggle.getAttribute("aria-expanded") === "true").map(({ key }) => key).slice(0, MAX_OPEN);
    writeUrl({ open: keys.length ? `[${keys.join(",")}]` : "" });
  }

  async #toggle(entry) {
    const opens = entry.toggle.getAttribute("aria-expanded") === "false";
    if (opens) await this.#openJobs(entry).catch(() => {}); else this.#close(entry);
    this.#writeOpenGroups();
    this.onChange();
  }

  #close(entry) {
    entry.toggle.setAttribute("aria-expanded", "false");
    for (const row of entry.rows) row.remove();
    entry.rows = [];
    entry.rest?.remove();
    entry.rest = null;
    this.#forgetUnshown();
  }

  /** Reads the jobs of a group: the first jobs again, or the jobs after `cursor`. */
  async #openJobs(entry, cursor = null) {
    const limit = cursor ? FIRST_JOBS : Math.min(MAX_PER_REQUEST, Math.max(FIRST_JOBS, entry.rows.length));
    const query = new URLSearchParams([...parameters(filter()), ["by", groupedBy().join(",")], ["group", entry.key], ["sort", order()], ["limit", limit], ...metricsParameter()]);
    if (cursor) query.set("cursor", cursor);
    entry.toggle.setAttribute("aria-expanded", "true");
    const thisLoad = this.#loads, { jobs, next_cursor: next } = await ask(`/api/v1/jobs?${query}`);
    if (thisLoad !== this.#loads || entry.toggle.getAttribute("aria-expanded") === "false") return;
    const before = new Map(entry.rows.map((row) => [row.dataset.id, row])), rows = cursor ? [...entry.rows] : [];
    for (const job of jobs) {
      const known = this.jobs.get(job.id);
      this.onRead(job);
      if (!known || known.last_seq <= job.last_seq) this.jobs.set(job.id, job);
      const row = before.get(job.id) ?? createRow(job);
      this.fill(row, this.jobs.get(job.id));
      if (!rows.includes(row)) rows.push(row);
    }
    for (const row of entry.rows) if (!rows.includes(row)) row.remove();
    entry.rows = rows;
    let last = entry.head;
    for (const row of rows) { if (last.nextElementSibling !== row) last.after(row); last = row; }
    entry.rest?.remove();
    entry.rest = null;
    if (next) {
      entry.rest = buttonRow(makeButton(`${rows.length} of ${count(entry.group.jobs)}: show more`, () => this.#openJobs(entry, next).catch(() => {})));
      entry.body.append(entry.rest);
    }
    this.#forgetUnshown();
    this.onChange();
  }

  #forgetUnshown() {
    const shown = new Set([...this.#shown.values()].flatMap(({ rows }) => rows.map((row) => row.dataset.id)));
    for (const id of this.jobs.keys()) if (!shown.has(id)) this.jobs.delete(id);
  }

  /** Handles a job from the stream: the job's rows change at once, and groups are read again soon. */
  handleJob(job) {
    const known = this.jobs.get(job.id);
    if (known && known.last_seq <= job.last_seq) {
      // Jobs of the stream do not tell whether the initial weights were trained on the validation pictures.
      job.trained_validation ??= known.trained_validation;
      this.jobs.set(job.id, job);
      for (const { rows, group } of this.#shown.values()) {
        const row = rows.find((row) => row.dataset.id === job.id);
        if (row && isInGroup(job, group.values)) this.fill(row, job);
      }
    }
    this.reloadSoon();
  }

  /** Writes the rows of a job again. */
  refill(job) {
    for (const { rows } of this.#shown.values()) for (const row of rows) if (row.dataset.id === job.id) this.fill(row, job);
  }

  reloadSoon = () => {
    this.#reloadTimer ||= setTimeout(() => {
      this.#reloadTimer = 0;
      // A hidden page is read again when it becomes visible.
      if (document.hidden) document.addEventListener("visibilitychange", this.reloadSoon, { once: true });
      else if (this.isGrouped) this.load().catch(() => {});
    }, this.#pause);
  };
}
