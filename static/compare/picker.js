// The choice of jobs: a search over all jobs, in which the chosen jobs are marked and come first.

import { ask, byId, make } from "../page.js";
import { writeShortened, SIDE } from "../cut.js";
import { percent } from "../numbers.js";
import { swatch } from "./colours.js";

/** Maximum number of jobs in the list, besides compared jobs. */
const MAX_LISTED = 30;

export class Picker {
  #jobs = [];
  #timer = 0;

  /** `toggle(id)`: adds or removes a job. `compared()`: the loaded jobs of the page. `chosen()`: ids of all jobs in the page's URL. */
  constructor(toggle, compared, chosen) {
    Object.assign(this, { toggle, compared, chosen, input: byId("search"), list: byId("picker") });
    this.input.addEventListener("input", () => { clearTimeout(this.#timer); this.#timer = setTimeout(() => this.load(), 150); });
    this.list.addEventListener("change", ({ target }) => this.toggle(target.value));
    this.load();
  }

  async load() {
    const name = this.input.value.trim(), query = new URLSearchParams({ limit: MAX_LISTED, ...(name ? { name } : {}) });
    const { jobs } = await ask(`/api/v1/jobs?${query}`).catch(() => ({ jobs: [] })), chosen = this.chosen();
    this.#jobs = name ? jobs : jobs.toSorted((a, b) => chosen.has(b.id) - chosen.has(a.id));
    this.draw();
  }

  draw() {
    const chosen = this.chosen(), focused = document.activeElement?.value;
    // Adds compared jobs that are too old for the list.
    if (!this.input.value.trim()) this.#jobs.unshift(...this.compared().filter(({ id }) => !this.#jobs.some((job) => job.id === id)));
    byId("no-jobs").hidden = this.#jobs.length > 0 || this.input.value.trim() !== "";
    this.list.replaceChildren(...this.#jobs.map((job) => {
      const box = make("input", { type: "checkbox", value: job.id, checked: chosen.has(job.id) }), name = make("span");
      writeShortened(name, job.name, SIDE);
      if (focused === job.id) queueMicrotask(() => box.focus());
      return make("li", {}, make("label", {}, box, ...(chosen.has(job.id) ? [swatch(job.id)] : []), name, make("small", { className: "muted", textContent: job.best ? percent(job.best.value) : job.state })));
    }));
  }
}
