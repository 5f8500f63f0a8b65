// Which jobs: a search over all of them, chosen ones marked.

import { ask, byId } from "../page.js";
import { cut } from "../cut.js";
import { percent } from "../numbers.js";

const MOST = 30;

export class Picker {
  #jobs = [];
  #timer = 0;

  constructor(toggle, chosen, colour) {
    Object.assign(this, { toggle, chosen, colour, input: byId("search"), list: byId("picker") });
    this.input.addEventListener("input", () => { clearTimeout(this.#timer); this.#timer = setTimeout(() => this.load(), 150); });
    this.list.addEventListener("change", ({ target }) => this.toggle(target.value));
    this.load();
  }

  async load() {
    const query = new URLSearchParams({ limit: MOST, ...(this.input.value.trim() ? { name: this.input.value.trim() } : {}) });
    this.#jobs = (await ask(`/api/v1/jobs?${query}`).catch(() => ({ jobs: [] }))).jobs;
    this.draw();
  }

  draw() {
    const chosen = this.chosen(), focused = document.activeElement?.value;
    this.list.replaceChildren(...this.#jobs.map((job) => {
      const item = document.createElement("li"), label = document.createElement("label"), box = Object.assign(document.createElement("input"), { type: "checkbox", value: job.id, checked: chosen.has(job.id) });
      const name = document.createElement("span");
      cut(name, job.name);
      label.append(box, ...(chosen.has(job.id) ? [Object.assign(document.createElement("i"), { className: `swatch bg-${this.colour(job.id)}` })] : []), name, Object.assign(document.createElement("small"), { className: "muted", textContent: job.best ? percent(job.best.value) : job.state }));
      item.append(label);
      if (focused === job.id) queueMicrotask(() => box.focus());
      return item;
    }));
  }
}
