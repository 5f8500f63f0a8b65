// Results to sort by, and settings side by side.

import { byId, text } from "../page.js";
import { clock, count, percent, rate, value } from "../numbers.js";
import { read, write } from "../address.js";

const took = (j) => (j.started_at ? (Date.parse(j.finished_at ?? new Date().toISOString()) - Date.parse(j.started_at)) / 1000 : NaN);
/** Name, number to sort by, how it is written. */
const COLUMNS = [
  ["job", (j) => j.name, (v) => v], ["state", (j) => j.state, (v) => v],
  ["final loss", (j) => j.last.loss ?? NaN, value], ["final accuracy", (j) => j.last.val_accuracy ?? NaN, percent], ["best accuracy", (j) => j.best?.value ?? NaN, percent],
  ["images/s", (j) => (j.images_per_second ?? (took(j) ? j.step * batch(j) / took(j) : NaN)), rate], ["steps", (j) => j.step, count], ["time", took, clock],
];

/** Pictures of one step over all ranks. */
export function batch({ spec: { train, parallel } }) {
  return train.batch_size == null && train.global_batch_size != null ? train.global_batch_size : (train.batch_size ?? 32) * train.accumulate * parallel.ranks;
}

/** `train.lr` and its value, of every setting. */
export function flat(spec, at = "") {
  return Object.entries(spec).flatMap(([key, v]) => (v && typeof v === "object" && !Array.isArray(v) ? flat(v, `${at}${key}.`) : [[at + key, v]]));
}

export const written = (v) => (v === undefined || v === null ? "–" : Array.isArray(v) ? v.join(", ") : String(v));

/** Settings by key, each with its value for every job; names do not count. */
export function settings(jobs) {
  const specs = jobs.map((j) => new Map(flat(j.spec))), keys = [...new Set(specs.flatMap((s) => [...s.keys()]))].filter((k) => k !== "name");
  return keys.map((key) => ({ key, values: specs.map((s) => s.get(key)) })).map((row) => ({ ...row, different: new Set(row.values.map(written)).size > 1 }));
}

export class Tables {
  #all = false;

  constructor(jobs, colour, remove) { Object.assign(this, { jobs, colour, remove }); }

  setAll(all) { this.#all = all; if (this.jobs().length) this.draw(); }

  draw() { this.#results(); this.#settings(); }

  #swatch(job) {
    const name = document.createElement("span"), mark = document.createElement("i");
    mark.className = `swatch bg-${this.colour(job.id)}`;
    name.append(mark, Object.assign(document.createElement("a"), { href: `/jobs/${job.id}`, textContent: job.name }));
    return name;
  }

  #results() {
    const [key, way] = read("sort", "best accuracy:down").split(":"), column = COLUMNS.find(([name]) => name === key) ?? COLUMNS[4];
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
    byId("results").replaceChildren(...order.map((job) => {
      const row = document.createElement("tr");
      COLUMNS.forEach(([name, of, words], i) => {
        const cell = document.createElement(i ? "td" : "th"), v = of(job);
        if (!i) cell.scope = "row";
        if (i > 1) cell.className = "num";
        if (!i) cell.append(this.#swatch(job)); else text(cell, typeof v === "number" && Number.isNaN(v) ? "–" : words(v));
        if (typeof v === "number") cell.title = String(v);
        row.append(cell);
      });
      const cell = document.createElement("td"), button = Object.assign(document.createElement("button"), { type: "button", className: "quiet", textContent: "Leave out" });
      button.setAttribute("aria-label", `Leave out ${job.name}`);
      button.addEventListener("click", () => this.remove(job.id));
      cell.className = "num";
      cell.append(button);
      row.append(cell);
      return row;
    }));
  }

  #settings() {
    const jobs = this.jobs(), all = settings(jobs), shown = all.filter((r) => this.#all || r.different), head = document.createElement("tr");
    head.append(Object.assign(document.createElement("th"), { scope: "col", textContent: "setting" }));
    for (const job of jobs) { const th = document.createElement("th"); th.scope = "col"; th.append(this.#swatch(job)); head.append(th); }
    byId("settings-head").replaceChildren(head);
    byId("settings").replaceChildren(...shown.map(({ key, values, different }) => {
      const row = document.createElement("tr");
      if (different) row.className = "different";
      row.append(Object.assign(document.createElement("th"), { scope: "row", textContent: key }), ...values.map((v) => Object.assign(document.createElement("td"), { textContent: written(v) })));
      return row;
    }));
    text(byId("settings-note"), jobs.length < 2 ? "" : `${all.filter((r) => r.different).length} of ${all.length} differ`);
    byId("settings-none").hidden = shown.length > 0;
  }
}
