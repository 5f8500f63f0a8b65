// The columns of the list: default columns, and any setting, metric or tag. The choice is in the URL, and the browser keeps it for the
// next visit.

import { writeShortened, NARROW } from "../cut.js";
import { count, rate, uncertainty } from "../numbers.js";
import { ask, byId, makeClosable, make, makeButton, Problem, errorText, store, readStored, setText } from "../page.js";
import { fullKey, flatten, setting, formatSetting } from "../settings.js";
import { ALL } from "../job/names.js";
import { setMetrics } from "./query.js";
import { readUrl, writeUrl } from "../address.js";

/** Default columns: name in the URL, and label. */
const DEFAULT_COLUMNS = ["progress", "loss", "best", "speed", "age"].map((name) => [name, document.querySelector(`#jobs .c-${name}`).textContent]);
/** `get(job)`: the job's value; null or undefined if the job has no value. */
const column = (label, get, format) => ({ label, get, format });
/** Columns that can be added, besides settings and tags. */
const METRICS = {
  ...Object.fromEntries(Object.entries(ALL).map(([name, { label, format }]) => [name, column(label, (j) => j.last[name], format)])),
  lr: column("Learning rate now", (j) => j.last.lr, ALL.lr.format),
  images_per_second: column("Images/s", (j) => j.images_per_second, rate), step: column("Step", (j) => j.step, count), epoch: column("Epoch", (j) => j.epoch, count),
  attempt: column("Attempt", (j) => j.attempt, count), ranks: column("Ranks", (j) => j.ranks, count),
  owner: column("Owner", (j) => j.owner, String), project: column("Project", (j) => j.project, String),
};
/** Metrics that the jobs of every response contain. */
const ALWAYS = ["loss", "accuracy", "lr", "val_loss", "val_accuracy", "images_per_second"];
/** Maximum number of added columns. */
const MAX_EXTRA = 12;
const STORAGE_KEY = "columns";
/** The default choice: all columns of `DEFAULT_COLUMNS`. */
const DEFAULT_CHOICE = DEFAULT_COLUMNS.map(([name]) => name).join(",");
/** The value in the URL if no column is chosen. */
const NONE = "none";

export class Columns {
  #extra = [];
  /** Metrics that were requested for the current jobs. */
  #requestedMetrics = [];

  /** `refill(needsRead)`: writes every row, and reads the jobs again if `needsRead`. `known()`: the current jobs and tags, to offer keys. */
  constructor({ refill, known }) {
    Object.assign(this, { refill, known, menu: byId("columns") });
    this.menu.hidden = false;
    const boxes = byId("own-columns");
    for (const [name, label] of DEFAULT_COLUMNS) {
      const box = make("input", { type: "checkbox", value: name });
      box.addEventListener("change", () => this.#choose());
      boxes.append(make("label", { className: "inline" }, box, label));
    }
    const add = byId("column-add");
    this.error = make("p", { className: "error", role: "alert" });
    byId("column-form").after(this.error);
    byId("column-form").addEventListener("submit", async (event) => {
      event.preventDefault();
      const typed = add.value, [job] = this.known().jobs, given = typed.trim().replace(/^spec\./, ""), key = job && !(given in METRICS) ? fullKey(job.spec, given) : given;
      setText(this.error, "");
      if (!key || this.#extra.includes(key)) return;
      if (this.#extra.length >= MAX_EXTRA) return setText(this.error, `At most ${MAX_EXTRA} columns can be added: remove a column first.`);
      const problem = await findMistake(key);
      if (problem) return setText(this.error, problem);
      if (this.#extra.includes(key)) return;
      this.#extra.push(key);
      // The reader may already have typed the next key.
      if (add.value === typed) add.value = "";
      this.#choose();
    });
    this.menu.addEventListener("toggle", () => { if (this.menu.open) this.#offer(); });
    makeClosable(this.menu);
    this.loadChoice();
  }

  /** Shows the columns in the URL, or otherwise the columns that were chosen last. */
  loadChoice() {
    const choice = readUrl("columns") || readStored(STORAGE_KEY) || DEFAULT_CHOICE, chosen = choice.split(",").filter((name) => name && name !== NONE);
    for (const box of byId("own-columns").querySelectorAll("input")) box.checked = chosen.includes(box.value);
    this.#extra = chosen.filter((name) => !DEFAULT_COLUMNS.some(([own]) => own === name)).slice(0, MAX_EXTRA);
    this.#draw();
  }

  /** Returns the visible columns, as in the URL. */
  choice() { return [...[...byId("own-columns").querySelectorAll("input:checked")].map((box) => box.value), ...this.#extra].join(",") || NONE; }

  /** The keys of the added columns. */
  get extra() { return this.#extra; }

  /** Returns the keys of settings with a single value of the jobs on the page. */
  settings() {
    const keys = new Set();
    for (const job of this.known().jobs.slice(0, 50)) for (const [key, v] of flatten(job.spec)) if (!Array.isArray(v)) keys.add(key);
    return [...keys];
  }

  #choose() {
    const choice = this.choice();
    store(STORAGE_KEY, choice === DEFAULT_CHOICE ? null : choice);
    writeUrl({ columns: choice === DEFAULT_CHOICE ? "" : choice });
    this.#draw();
  }

  #draw() {
    const table = document.querySelector("#jobs table"), hidden = [...byId("own-columns").querySelectorAll("input:not(:checked)")].map((box) => box.value);
    table.dataset.without = hidden.join(" ");
    table.classList.toggle("wide", this.#extra.length > 0);
    table.style.setProperty("--extra", this.#extra.length);
    const head = table.tHead.rows[0], before = head.querySelector(".c-age");
    for (const th of head.querySelectorAll(".c-extra")) th.remove();
    for (const key of this.#extra) before.before(make("th", { scope: "col", className: "num c-extra", textContent: label(key), title: key, "data-key": key, ...sortAttributes(key) }));
    byId("extra-columns").replaceChildren(...this.#extra.map((key) => makeButton(`${label(key)} ×`, () => {
      this.#extra = this.#extra.filter((k) => k !== key);
      this.#choose();
      byId("column-add").focus();
    }, { title: key, "aria-label": `Remove the column ${label(key)}` })));
    const wanted = this.#extra.filter((key) => key in ALL && !ALWAYS.includes(key)), needsRead = wanted.some((name) => !this.#requestedMetrics.includes(name));
    this.#requestedMetrics = wanted;
    setMetrics(wanted);
    this.refill(needsRead && this.isDrawn);
    this.isDrawn = true;
  }

  /** Fills the added cells of a row. */
  fill(row, job) {
    if (!this.#extra.length && !row.dataset.extra) return;
    row.dataset.extra = this.#extra.join(",");
    const cells = row.querySelectorAll(".c-extra"), before = row.querySelector(".c-age");
    if (cells.length !== this.#extra.length || this.#extra.some((key, i) => cells[i].dataset.key !== key)) {
      for (const cell of cells) cell.remove();
      for (const key of this.#extra) before.before(make("td", { className: "num c-extra", "data-key": key, "data-label": label(key) }, make("span"), make("small", { className: "small uncertainty" })));
    }
    for (const cell of row.querySelectorAll(".c-extra")) {
      const text = valueOf(job, cell.dataset.key);
      writeShortened(cell.firstChild, text, NARROW);
      setText(cell.lastChild, cell.dataset.key === "val_accuracy" && text ? uncertainty(job.last.val_accuracy, job.last.val_pictures) + (job.trained_validation ? " *" : "") : "");
    }
  }

  #offer() {
    const { jobs, tags } = this.known(), keys = new Set(Object.keys(METRICS));
    for (const job of jobs.slice(0, 50)) for (const [key] of flatten(job.spec)) if (key !== "name") keys.add(key);
    for (const tag of tags) keys.add(`tag:${tag}`);
    byId("column-keys").replaceChildren(...[...keys].map((key) => make("option", { value: key, label: METRICS[key]?.label ?? "" })));
  }
}

/** Returns what is wrong with a column's key; empty for a valid key. The server knows every setting. */
async function findMistake(key) {
  if (key in METRICS || key.startsWith("tag:")) return "";
  try { await ask(`/api/v1/jobs?limit=1&fields=id&sort=${encodeURIComponent(`spec.${key}`)}`); return ""; } catch (error) {
    return error instanceof Problem && error.status === 400 ? `${error.message} There is no metric “${key}”, either.` : errorText(error);
  }
}

const label = (key) => METRICS[key]?.label ?? key.replace(/^tag:/, "#");

/** Returns the attributes of a column's heading for the order: see `drawHeads`. Keys of settings begin with `spec.`. */
function sortAttributes(key) {
  const isTag = key.startsWith("tag:"), metric = METRICS[key], descends = isTag || (metric && metric.format !== String && !/(^|_)loss$/.test(key));
  return { "data-sort": isTag || metric ? key : `spec.${key}`, ...(descends && { "data-descends": "" }) };
}

function valueOf(job, key) {
  if (key.startsWith("tag:")) return job.tags.includes(key.slice(4)) ? "yes" : "";
  const metric = METRICS[key];
  if (metric) { const v = metric.get(job); return v == null ? "" : metric.format(v); }
  const v = setting(job.spec, key);
  return v == null ? "" : formatSetting(v);
}
