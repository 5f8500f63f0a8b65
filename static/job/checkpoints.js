// The checkpoints, newest first, each with its download.

import { byId, text } from "../page.js";
import { bytes, count, percent } from "../numbers.js";

export class Checkpoints {
  #all = new Map();

  constructor(initial) {
    for (const c of initial) this.#all.set(c.id, c);
  }

  get size() { return this.#all.size; }
  get newest() { return this.#sorted()[0]; }
  get bytes() { return [...this.#all.values()].reduce((sum, c) => sum + c.size_bytes, 0); }

  apply(event) {
    // `best` is best so far: a newer best takes the mark.
    if (event.best) for (const c of this.#all.values()) c.best = false;
    this.#all.set(event.id, { ...event });
    this.draw();
  }

  remove({ id }) {
    this.#all.delete(id);
    this.draw();
  }

  #sorted() { return [...this.#all.values()].sort((a, b) => b.step - a.step || b.attempt - a.attempt); }

  draw() {
    const body = byId("checkpoints"), sorted = this.#sorted();
    byId("checkpoint-table").hidden = !sorted.length;
    byId("no-checkpoints").hidden = sorted.length > 0;
    body.replaceChildren(...sorted.map((c) => {
      const row = byId("checkpoint-row").content.firstElementChild.cloneNode(true);
      const at = (name) => row.querySelector(`[data-f="${name}"]`);
      row.dataset.id = c.id;
      text(at("label"), `${c.epoch}-${c.step}`);
      at("best").hidden = !c.best;
      text(at("accuracy"), c.val_accuracy == null ? "" : percent(c.val_accuracy));
      text(at("size"), bytes(c.size_bytes));
      at("size").title = `${count(c.size_bytes)} bytes`;
      at("get").href = `/api/v1/checkpoints/${encodeURIComponent(c.id)}/model.safetensors`;
      at("get").setAttribute("aria-label", `Download the model of checkpoint ${c.epoch}-${c.step}`);
      return row;
    }));
  }
}
