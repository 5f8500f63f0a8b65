// The sortable table of results, and the table of settings.

import { swatch } from "./colours.js";
import { settings, titleOf } from "./names.js";
import { RESULTS } from "./columns.js";
import { byId, text } from "../page.js";
import { cut } from "../cut.js";
import { read, write } from "../address.js";
import { formatted } from "../settings.js";
import { uncertainty } from "../numbers.js";

/** Columns of the table of results: name, value of a job (also for sorting), and format. */
const COLUMNS = [["job", (j) => j.name, (v) => v], ["state", (j) => j.state, (v) => v], ...RESULTS.map(([, name, of, words]) => [name, (j) => of(j) ?? NaN, words])];
/** Columns with the newest values. While a job runs, they are marked as not final. */
const NEWEST = ["loss", "val. loss", "accuracy", "val. accuracy"];
/** Columns whose values rest on the validation pictures. */
const VALIDATED = ["val. accuracy", "best accuracy"];

export class Tables {
  #all = false;

  /** `chosen()`: ids of the selected jobs. */
  constructor(jobs, remove, chosen) { Object.assign(this, { jobs, remove, chosen }); }

  setAll(all) { this.#all = all; if (this.jobs().length) this.draw(); }

  draw() {
    const focused = byId("results-head").contains(document.activeElement) ? document.activeElement.textContent : null;
    this.#results();
    this.#settings();
    if (focused) [...byId("results-head").querySelectorAll("button")].find((b) => b.textContent === focused)?.focus();
  }

  #swatch(job) {
    const name = document.createElement("span");
    const link = Object.assign(document.createElement("a"), { href: `/jobs/${job.id}` });
    name.className = "job-name";
    cut(link, titleOf(job, this.jobs()));
    name.append(swatch(job.id), link);
    return name;
  }

  #results() {
    const [key, way] = read("sort", "best accuracy:down").split(":"), column = COLUMNS.find(([name]) => name === key) ?? COLUMNS.find(([name]) => name === "best accuracy");
    const order = this.jobs().toSorted((a, b) => {
      const [x, y] = [column[1](a), column[1](b)];
      if (typeof x === "string") return x.localeCompare(y) * (way === "up" ? 1 : -1);
      return (Number.isNaN(x) - Number.isNaN(y)) || (x - y) * (way === "up" ? 1 : -1);
    });
    const head = document.createElement("tr");
    for (const [name] of COLUMNS) {
      const th = document.createElement("th"), button = document.createElement("button");
      th.scope = "col";
      th.className = name === "job" || name === "state" ? "" : "num";
      Object.assign(button, { type: "button", className: "sort", textContent: name });
      if (name === column[0]) th.setAttribute("aria-sort", way === "up" ? "ascending" : "descending");
      button.addEventListener("click", () => { write({ sort: `${name}:${name === column[0] && way === "down" ? "up" : "down"}` }); this.#results(); });
      th.append(button);
      head.append(th);
    }
    head.append(Object.assign(document.createElement("td"), { className: "num" }));
    byId("results-head").replaceChildren(head);
    const chosen = this.chosen();
    byId("results").replaceChildren(...order.map((job) => {
      const row = document.createElement("tr");
      row.classList.toggle("out", !chosen.has(job.id));
      COLUMNS.forEach(([name, of, words], i) => {
        const cell = document.createElement(i ? "td" : "th"), v = of(job);
        if (!i) cell.scope = "row";
        if (i > 1) cell.className = "num";
        if (!i) cell.append(this.#swatch(job)); else text(cell, typeof v === "number" && Number.isNaN(v) ? "–" : words(v));
        if (typeof v === "number") cell.title = String(v);
        cell.dataset.column = name;
        if (NEWEST.includes(name) && Number.isFinite(v) && !job.finished_at) cell.append(Object.assign(document.createElement("small"), { className: "muted", textContent: " so far" }));
        if (VALIDATED.includes(name) && Number.isFinite(v)) cell.append(Object.assign(document.createElement("small"), { className: "small uncertainty", textContent: uncertainty(v, job.last.val_pictures) }));
        row.append(cell);
      });
      const cell = document.createElement("td"), button = Object.assign(document.createElement("button"), { type: "button", className: "quiet", textContent: "Leave out" });
      button.setAttribute("aria-label", `Leave out ${titleOf(job, this.jobs())}`);
      button.addEventListener("click", () => this.remove(job.id));
      cell.className = "num";
      cell.append(button);
      row.append(cell);
      return row;
    }));
  }

  #settings() {
    const jobs = this.jobs(), all = settings(jobs), shown = all.filter((r) => this.#all || r.different).sort((a, b) => b.different - a.different), head = document.createElement("tr");
    head.append(Object.assign(document.createElement("th"), { scope: "col", textContent: "setting" }));
    for (const job of jobs) { const th = document.createElement("th"); th.scope = "col"; th.append(this.#swatch(job)); head.append(th); }
    byId("settings-head").replaceChildren(head);
    byId("settings").replaceChildren(...shown.map(({ key, values, different }) => {
      const row = document.createElement("tr");
      if (different) row.className = "different";
      row.append(Object.assign(document.createElement("th"), { scope: "row", textContent: key }), ...values.map((v) => Object.assign(document.createElement("td"), { textContent: formatted(v) })));
      return row;
    }));
    text(byId("settings-note"), jobs.length < 2 ? "" : `${all.filter((r) => r.different).length} of ${all.length} differ`);
    byId("settings-none").hidden = shown.length > 0;
  }
}
