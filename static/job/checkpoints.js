// The checkpoints, newest first, with their actions.

import { ask, byId, make, setText } from "../page.js";
import { bytes, count, percent, uncertainty } from "../numbers.js";

/** Returns `epoch 3` for an evaluation, or `step 120` if its epoch is unknown. The same as `Measured::at` in protocol/src/job.rs. */
const measuredAt = ({ epoch, step }) => (epoch ? `epoch ${epoch}` : `step ${step}`);

/**
 * Describes the best evaluation with its epoch, and the best checkpoint's accuracy if this accuracy differs. The same as `best_words` in
 * protocol/src/best.rs.
 */
export function bestWords(best, checkpoint) {
  const shown = percent(best.value), ofCheckpoint = checkpoint?.val_accuracy == null ? shown : percent(checkpoint.val_accuracy);
  return `best ${shown} at ${measuredAt(best)}${ofCheckpoint === shown ? "" : `, best checkpoint ${ofCheckpoint}`}`;
}

/**
 * Whether an evaluation is better than the best evaluation before: a higher accuracy; with equal accuracies, the lower loss; with equal losses,
 * the newer evaluation. The same as `is_better` in protocol/src/best.rs.
 */
export const isBetter = ({ accuracy, loss }, best) => !best || accuracy > best.value || (accuracy === best.value && (best.loss == null || loss <= best.loss));

/** Interval of requests while checkpoints are being copied to the object store. */
const ASK_EVERY_MS = 3000;

export class Checkpoints {
  #all = new Map();
  /** Functions that are called when a checkpoint is added or removed. */
  changeListeners = new Set();

  /** The job's id if the server copies checkpoints to an object store, otherwise null. Events do not report these copies. */
  #uploadingJob;
  #refreshTimer = 0;

  /** `act(action, checkpoint)`: performs `evaluate`, `classify`, `fork` or `register`. `uploadingJob`: see `#uploadingJob`. */
  constructor(initial, act, uploadingJob) {
    this.#uploadingJob = uploadingJob;
    for (const c of initial) this.#all.set(c.id, c);
    byId("checkpoints").addEventListener("click", (event) => {
      const action = event.target.closest("[data-do]")?.dataset.do, id = event.target.closest("tr")?.dataset.id;
      if (event.target.closest("a[download]")) event.target.closest("details").open = false;
      if (action === "everything") downloadAll(id, event.target.closest("details"));
      else if (action) act(action, this.#all.get(id));
    });
    // `toggle` events do not bubble.
    byId("checkpoints").addEventListener("toggle", ({ target }) => { if (target.open) target.lastElementChild.scrollIntoView({ block: "nearest" }); }, true);
  }

  get size() { return this.#all.size; }
  get newest() { return this.sorted[0]; }
  /** The checkpoint that commands call `best`. */
  get best() { return this.sorted.find((c) => c.best); }
  has(step) { return [...this.#all.values()].some((c) => c.step === step); }
  get bytes() { return [...this.#all.values()].reduce((sum, c) => sum + c.size_bytes, 0); }
  /** The checkpoints whose files exist, newest first. */
  get usable() { return this.sorted.filter((c) => !c.missing); }
  get sorted() { return [...this.#all.values()].sort((a, b) => b.step - a.step || b.attempt - a.attempt); }

  /** Returns `id`, or the id of the best checkpoint if no usable checkpoint has the id `id`. */
  idOrBest(id) { return this.usable.some((c) => c.id === id) ? id : this.best?.id; }

  /** Offers the usable checkpoints in a list of choices. `chosen`: id of the selected checkpoint. */
  offer(choice, chosen) {
    choice.replaceChildren(...this.usable.map((c) => new Option(`${c.epoch}-${c.step}${c.best ? ", best" : ""}`, c.id, false, c.id === chosen)));
  }

  apply(event) {
    // `best` means best so far: the mark moves to a better checkpoint.
    if (event.best) for (const c of this.#all.values()) c.best = false;
    this.#all.set(event.id, { ...event, stored: this.#uploadingJob && "uploading" });
    this.draw();
  }

  /** Replaces all checkpoints, after an interruption in which events were missed. */
  replace(all) {
    this.#all = new Map(all.map((c) => [c.id, c]));
    this.draw();
  }

  remove({ id }) {
    this.#all.delete(id);
    this.draw();
  }

  draw() {
    const body = byId("checkpoints"), { sorted } = this;
    byId("checkpoint-table").hidden = !sorted.length;
    byId("no-checkpoints").hidden = sorted.length > 0;
    const rows = new Map([...body.children].map((row) => [row.dataset.id, row]));
    body.replaceChildren(...sorted.map((c) => {
      const row = rows.get(c.id) ?? byId("checkpoint-row").content.firstElementChild.cloneNode(true);
      const element = (name) => row.querySelector(`[data-f="${name}"]`), label = `${c.epoch}-${c.step}`;
      row.dataset.id = c.id;
      setText(element("label"), label);
      element("best").hidden = !c.best;
      element("uploading").hidden = c.stored !== "uploading";
      element("missing").hidden = !c.missing;
      row.querySelector(".row-actions").hidden = Boolean(c.missing);
      setText(element("accuracy"), c.val_accuracy == null ? "" : percent(c.val_accuracy) + uncertainty(c.val_accuracy, c.validation?.pictures));
      setText(element("size"), bytes(c.size_bytes));
      element("size").title = `${count(c.size_bytes)} bytes`;
      for (const link of row.querySelectorAll("a[download]")) link.href = `/api/v1/checkpoints/${encodeURIComponent(c.id)}/${link.getAttribute("href").split("/").at(-1)}`;
      const average = element("average");
      if (average) average.hidden = c.step < Number(average.dataset.from);
      row.querySelector("summary").setAttribute("aria-label", `Download checkpoint ${label}`);
      for (const button of row.querySelectorAll("[data-do]")) button.setAttribute("aria-label", `${button.textContent}: checkpoint ${label}`);
      return row;
    }));
    for (const listener of this.changeListeners) listener();
    if (this.#uploadingJob && sorted.some((c) => c.stored === "uploading")) this.#refreshTimer ||= setTimeout(() => this.#ask(), ASK_EVERY_MS);
  }

  async #ask() {
    const { checkpoints } = await ask(`/api/v1/jobs/${this.#uploadingJob}/checkpoints?fields=id,stored`).catch(() => ({ checkpoints: [] }));
    for (const { id, stored } of checkpoints) if (this.#all.has(id)) this.#all.get(id).stored = stored;
    this.#refreshTimer = 0;
    this.draw();
  }
}

/**
 * Starts the downloads of all files of a checkpoint with pauses, so that the browser asks only once for permission. The server lists the
 * files, because a sharded checkpoint has parts.
 */
async function downloadAll(id, menu) {
  menu.open = false;
  const url = `/api/v1/checkpoints/${encodeURIComponent(id)}`, { files } = await ask(url).catch(() => ({ files: {} }));
  for (const [i, file] of [...Object.keys(files), "MANIFEST.json"].entries()) {
    setTimeout(() => make("a", { href: `${url}/${file}`, download: "" }).click(), i * 300);
  }
}
