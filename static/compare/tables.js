// The sortable table of results, and the table of settings, which also has the summaries of runs from elsewhere.

import { caution } from "./caution.js";
import { swatch } from "./colours.js";
import { settings, titleOf, withSummary } from "./names.js";
import { RESULTS } from "./columns.js";
import { ask, byId, make, makeButton, setText } from "../page.js";
import { writeShortened } from "../cut.js";
import { readUrl, writeUrl } from "../address.js";
import { formatSetting } from "../settings.js";
import { stateWords } from "../job/states.js";
import { trainedMark, uncertainty } from "../numbers.js";

/** Columns of the table of results. `get(job)`: the value, also for sorting. */
const COLUMNS = [
  { name: "job", get: (j) => j.name, format: (v) => v }, { name: "state", get: stateWords, format: (v) => v },
  ...RESULTS.map(({ name, get, format, about }) => ({ name, get: (j) => get(j) ?? NaN, format, about })),
];
/** Columns with the newest values. While a job runs, these values are marked as not final. */
const NEWEST = ["loss", "val. loss", "accuracy of the last batch", "val. accuracy"];
/** Columns whose values are measured on the validation pictures. */
const VALIDATED = ["val. accuracy", "best accuracy"];

export class Tables {
  #showsAllSettings = false;
  #isScrolled = false;
  /** Promises of the names of jobs whose weights others begin with, by id. */
  #names = new Map();

  /** `selected()`: ids of the selected jobs. */
  constructor(jobs, remove, selected) { Object.assign(this, { jobs, remove, selected }); }

  /** `which`: `all` or `different`. */
  showSettings(which) { this.#showsAllSettings = which === "all"; if (this.jobs().length) this.draw(); }

  draw() {
    const focused = byId("results-head").contains(document.activeElement) ? document.activeElement.textContent : null;
    this.#drawResults();
    this.#drawSettings();
    if (focused) [...byId("results-head").querySelectorAll("button")].find((b) => b.textContent === focused)?.focus();
  }

  #jobName(job) {
    const link = make("a", { href: `/jobs/${job.id}` });
    writeShortened(link, titleOf(job, this.jobs()));
    return make("span", { className: "job-name" }, swatch(job.id), link);
  }

  #drawResults() {
    const [key, direction] = readUrl("sort", "best accuracy:down").split(":"), column = COLUMNS.find(({ name }) => name === key) ?? COLUMNS.find(({ name }) => name === "best accuracy");
    const order = this.jobs().toSorted((a, b) => {
      const [x, y] = [column.get(a), column.get(b)];
      if (typeof x === "string") return x.localeCompare(y) * (direction === "up" ? 1 : -1);
      return (Number.isNaN(x) - Number.isNaN(y)) || (x - y) * (direction === "up" ? 1 : -1);
    });
    const head = make("tr");
    for (const { name, about } of COLUMNS) {
      const sort = () => { writeUrl({ sort: `${name}:${name === column.name && direction === "down" ? "up" : "down"}` }); this.#drawResults(); };
      const button = makeButton(name, sort, { className: "sort", title: about ?? "" }), th = make("th", { scope: "col", className: name === "job" || name === "state" ? "" : "num" }, button);
      if (name === column.name) th.setAttribute("aria-sort", direction === "up" ? "ascending" : "descending");
      head.append(th);
    }
    head.append(make("td", { className: "num" }));
    setText(byId("results-note"), caution(this.jobs()));
    byId("results-head").replaceChildren(head);
    const selected = this.selected();
    byId("results").replaceChildren(...order.map((job) => {
      const row = make("tr", { className: selected.has(job.id) ? "" : "out" });
      COLUMNS.forEach(({ name, get, format }, i) => {
        const v = get(job), cell = i ? make("td", { className: i > 1 ? "num" : "", "data-column": name }) : make("th", { scope: "row", "data-column": name }, this.#jobName(job));
        if (i) setText(cell, typeof v === "number" && Number.isNaN(v) ? "–" : format(v));
        if (typeof v === "number") cell.title = String(v);
        if (NEWEST.includes(name) && Number.isFinite(v) && !job.finished_at) cell.append(make("small", { className: "muted", textContent: " so far" }));
        if (VALIDATED.includes(name) && Number.isFinite(v)) cell.append(make("small", { className: "small uncertainty", textContent: uncertainty(v, job.last.val_pictures) + trainedMark(job.trained_validation), title: job.trained_validation ?? "" }));
        row.append(cell);
      });
      row.append(make("td", { className: "num" }, makeButton("Leave out", () => this.remove(job.id), { "aria-label": `Leave out ${titleOf(job, this.jobs())}` })));
      return row;
    }));
    if (!this.#isScrolled && order.length) this.#scrollToSorted(head);
  }

  /** Scrolls the table, once, so that the sorted column is in view on a small screen. */
  #scrollToSorted(head) {
    const box = head.closest(".scroll"), { offsetLeft, offsetWidth } = head.querySelector("[aria-sort]");
    box.scrollLeft = offsetLeft + offsetWidth - box.clientWidth;
    this.#isScrolled = true;
  }

  /** Adds the name of the job to the id of a checkpoint of this server. */
  async #nameSource(cell) {
    const [, id] = /^(j\w{20,})-/.exec(cell.textContent) ?? [];
    if (!id) return;
    if (!this.#names.has(id)) this.#names.set(id, ask(`/api/v1/jobs/${id}`).then(({ name }) => ` (${name})`).catch(() => ""));
    cell.append(await this.#names.get(id));
  }

  #drawSettings() {
    const jobs = this.jobs(), all = settings(jobs, withSummary), shown = all.filter((r) => this.#showsAllSettings || r.different).sort((a, b) => b.different - a.different);
    byId("settings-head").replaceChildren(make("tr", {}, make("th", { scope: "col", textContent: "setting" }), ...jobs.map((job) => make("th", { scope: "col" }, this.#jobName(job)))));
    byId("settings").replaceChildren(...shown.map(({ key, values, different }) => make("tr", { className: different ? "different" : "", "data-key": key },
      make("th", { scope: "row", textContent: key }), ...values.map((v) => make("td", { textContent: formatSetting(v) })))));
    for (const cell of document.querySelectorAll('#settings [data-key="model.pretrained"] td')) this.#nameSource(cell);
    setText(byId("settings-note"), jobs.length < 2 ? "" : `${all.filter((r) => r.different).length} of ${all.length} differ`);
    byId("settings-none").hidden = shown.length > 0;
    setText(byId("settings-none"), jobs.length < 2 ? "Choose a second job." : "All settings are the same.");
  }
}
