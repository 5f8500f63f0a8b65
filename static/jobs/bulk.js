// Actions on the selected jobs of the list: pause, resume, retry, cancel, tag, compare and delete.

import { ask, byId, confirmThen, openForm, Problem, errorText, setMessage, setText } from "../page.js";
import { bytes, plural } from "../numbers.js";
import { APPLIES } from "../job/states.js";

export class Bulk {
  #selected = new Set();
  /** Ids of the jobs that were selected when the message was shown. */
  #messageFor = "";

  /** `find(id)`: returns a job of the list. `rowCount()`: returns the number of rows that can be selected. */
  constructor(rows, { find, rowCount }) {
    Object.assign(this, { rows, find, rowCount });
    rows.addEventListener("change", (event) => {
      const id = event.target.closest("tr")?.dataset.id;
      if (!event.target.matches("[data-f=choose]") || !id) return;
      if (event.target.checked) this.#selected.add(id); else this.#selected.delete(id);
      // When grouped by tag, a job may have several rows.
      for (const box of rows.querySelectorAll(`tr[data-id="${id}"] [data-f=choose]`)) box.checked = event.target.checked;
      this.draw();
    });
    byId("choose-all").addEventListener("change", ({ target }) => {
      this.#selected.clear();
      for (const box of rows.querySelectorAll("[data-f=choose]")) {
        box.checked = target.checked;
        if (box.checked) this.#selected.add(box.closest("tr").dataset.id);
      }
      this.draw();
    });
    for (const button of byId("bulk").querySelectorAll("[data-bulk]")) button.addEventListener("click", () => this.#do(button.dataset.bulk));
    this.draw();
  }

  forget(id) { if (this.#selected.delete(id)) this.draw(); }

  /** Deselects jobs without a row: actions apply only to jobs that are visibly selected. */
  forgetUnshown() {
    for (const id of this.#selected) if (!this.rows.querySelector(`tr[data-id="${id}"] [data-f=choose]:checked`)) this.#selected.delete(id);
    this.draw();
  }

  /** Shows an error about the selected jobs, until the selection changes. */
  #showMessage(message) {
    this.#messageFor = [...this.#selected].join();
    setMessage(byId("bulk-status"), message);
  }

  #jobs(action) { return [...this.#selected].map((id) => this.find(id)).filter((j) => j && (APPLIES[action]?.(j) ?? true)); }

  draw() {
    const n = this.#selected.size;
    byId("bulk").hidden = !n;
    if ([...this.#selected].join() !== this.#messageFor) this.#showMessage("");
    setText(byId("bulk-count"), `${plural(n, "job")} selected`);
    for (const button of byId("bulk").querySelectorAll("[data-bulk]")) {
      const applicable = this.#jobs(button.dataset.bulk).length;
      button.hidden = !applicable;
      button.title = applicable < n ? `${applicable} of the ${n}` : "";
    }
    const all = byId("choose-all"), rowCount = this.rowCount();
    all.checked = n > 0 && n >= rowCount;
    all.indeterminate = n > 0 && n < rowCount;
    // A group's box shows whether all jobs of the group are selected, or only some.
    for (const box of this.rows.querySelectorAll(".group-head input")) {
      const has = (which) => box.closest(".group").querySelector(`[data-f=choose]${which}`) !== null, some = has(":checked"), others = has(":not(:checked)");
      box.checked = some && !others;
      box.indeterminate = some && others;
    }
  }

  async #do(action) {
    const jobs = this.#jobs(action);
    this.#showMessage("");
    if (action === "compare") { location.href = `/compare?jobs=${jobs.map((j) => j.id).join(",")}`; return; }
    if (action === "tag") return this.#tag(jobs);
    const all = plural(jobs.length, "job"), names = jobs.map((j) => j.name).join(", ");
    if (action === "delete") {
      const sizes = await Promise.all(jobs.map((j) => ask(`/api/v1/jobs/${j.id}/size`).then((s) => s.size_bytes, () => 0)));
      return confirmThen({
        title: `Delete ${all}?`, yes: `Delete ${all}`,
        detail: `Their metrics, logs and checkpoints (${bytes(sizes.reduce((a, b) => a + b, 0))}) are deleted for good: ${names}.`,
        act: () => this.#each(jobs, (j) => ask(`/api/v1/jobs/${j.id}`, { method: "DELETE" })),
      });
    }
    const act = () => this.#each(jobs, (j) => ask(`/api/v1/jobs/${j.id}/${action}`, { method: "POST" }));
    if (action === "cancel") return confirmThen({ title: `Cancel ${all}?`, yes: `Cancel ${all}`, detail: `${names}. Their checkpoints stay.`, act });
    try { await act(); } catch (error) { this.#showMessage(errorText(error)); }
  }

  /**
   * Applies `work` to all jobs, then reports all failures. Jobs that succeed are removed from `jobs` and from the selection, so another
   * press repeats only the failed jobs.
   */
  async #each(jobs, work) {
    const all = [...jobs], results = await Promise.allSettled(all.map(work)), failures = [];
    jobs.length = 0;
    results.forEach((r, i) => {
      if (r.status === "fulfilled") return this.#selected.delete(all[i].id);
      jobs.push(all[i]);
      failures.push(`${all[i].name}: ${errorText(r.reason)}`);
    });
    for (const box of this.rows.querySelectorAll("[data-f=choose]")) box.checked = this.#selected.has(box.closest("tr").dataset.id);
    this.draw();
    if (failures.length) throw new Problem(409, { detail: `Not done for ${failures.length} of ${plural(all.length, "job")}. ${failures.join(" ")}` });
  }

  #tag(jobs) {
    openForm("tag", async () => {
      const tag = byId("tag-input").value.trim();
      if (!tag) throw new Problem(400, { detail: "Write a tag." });
      await this.#each(jobs, async (j) => {
        const { tags } = await ask(`/api/v1/jobs/${j.id}`);
        return ask(`/api/v1/jobs/${j.id}`, { method: "PATCH", body: { tags: [...tags, tag] } });
      });
    });
  }
}
