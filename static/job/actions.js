// Actions on a job: pause, resume, cancel, retry, fork, delete and annotate.

import { ask, byId, confirmThen, errorText, errorTexts, openForm, Problem, setMessage, setText } from "../page.js";
import { bytes, plural } from "../numbers.js";
import { frontPriority } from "../jobs/queue.js";
import { APPLIES, isActive, isWaiting } from "./states.js";

/**
 * Whether a job's priority has an effect: the job waits, or can be preempted by jobs of higher priority. The same as `has_priority` in
 * web/src/job.rs.
 */
const hasPriority = (job) => isWaiting(job) || (job.spec.preemptible === true && isActive(job.state));

export class Actions {
  /** Fields of the panel Notes in which the reader has unsaved text. */
  #touched = new Set();
  /** The button that was pressed last. */
  #pressed = null;

  /**
   * `page`: `job()`, `setJob(job)`, `checkpoints`. `showRefusal(why)` shows why an action was refused; null removes the text. `beforeDelete()`
   * is called before the job is deleted, and `deleteFailed()` if the deletion fails.
   */
  constructor(page) {
    this.page = page;
    for (const action of ["pause", "resume", "retry"]) byId(action).addEventListener("click", (event) => this.#do(action, event.currentTarget));
    document.querySelector(".title .actions").addEventListener("click", ({ target }) => { this.#pressed = target.closest("button"); });
    byId("confirm").addEventListener("close", () => this.#keepFocus());
    byId("cancel").addEventListener("click", () => this.#cancel());
    byId("delete").addEventListener("click", () => this.#delete());
    byId("fork").addEventListener("click", () => this.fork(null));
    byId("priority")?.addEventListener("change", ({ target }) => this.#setPriority(() => Number(target.value)));
    byId("to-front")?.addEventListener("click", () => this.#setPriority(frontPriority));
    this.#setUpAnnotations();
  }

  show() {
    const job = this.page.job();
    for (const [action, applies] of Object.entries(APPLIES)) byId(action).hidden = !applies(job);
    byId("fork").hidden = !this.page.checkpoints.usable.length;
    byId("predict").hidden = byId("fork").hidden || job.state !== "succeeded";
    const priority = byId("priority"), value = String(job.spec.priority);
    if (priority) byId("waits").hidden = !hasPriority(job);
    if (priority) byId("to-front").hidden = !isWaiting(job);
    if (priority && document.activeElement !== priority && priority.value !== value) priority.value = value;
    this.#keepFocus();
  }

  /** Moves the focus to a visible button if the focused button was hidden after a change of state. */
  #keepFocus() {
    const { activeElement } = document;
    if (!this.#pressed?.hidden || (activeElement !== this.#pressed && activeElement !== document.body)) return;
    this.#pressed = null;
    [...document.querySelectorAll(".title .actions button")].find((button) => button.checkVisibility())?.focus({ preventScroll: true });
  }

  hide() { for (const button of document.querySelectorAll(".title .actions > *")) button.hidden = true; }

  #post(action, body) { return ask(`/api/v1/jobs/${this.page.job().id}/${action}`, { method: "POST", body }); }

  async #do(action, button) {
    button.disabled = true;
    this.page.showRefusal(null);
    try { this.page.setJob(await this.#post(action)); } catch (error) { this.page.showRefusal(errorText(error)); }
    button.disabled = false;
  }

  async #setPriority(choose) {
    const status = byId("priority-status");
    try {
      await ask(`/api/v1/jobs/${this.page.job().id}`, { method: "PATCH", body: { priority: await choose() } });
      setText(status, "Saved");
    } catch (error) { setMessage(status, errorText(error)); }
  }

  #cancel() {
    const job = this.page.job(), { checkpoints } = this.page;
    // The job continues while the dialog is open, so the sentences name no step and no checkpoint.
    const kept = checkpoints.size ? "The job keeps its checkpoints, and Retry continues from the newest." : "If none can be written, the training is lost.";
    const stops = job.total_steps ? `Training stops. Ranks that train write a last checkpoint first. ${kept}` : "The job will not start.";
    confirmThen({ title: `Cancel ${job.name}?`, detail: job.external ? "The run counts as cancelled. Its program continues to train, unless it checks the server's responses." : stops, yes: "Cancel the job", act: () => this.#post("cancel") });
  }

  async #delete() {
    const job = this.page.job(), { checkpoints } = this.page;
    const { size_bytes } = await ask(`/api/v1/jobs/${job.id}/size`).catch(() => ({ size_bytes: checkpoints.bytes }));
    confirmThen({
      title: `Delete ${job.name}?`, yes: "Delete the job",
      detail: `Its metrics, log and ${plural(checkpoints.size, "checkpoint")} (${bytes(size_bytes)}) are deleted for good.`,
      act: async () => {
        // The page must not report the deletion that it requested itself.
        this.page.beforeDelete();
        try { await ask(`/api/v1/jobs/${job.id}`, { method: "DELETE" }); } catch (error) {
          this.page.deleteFailed();
          // Hides the button after a conflict (409), because the same request would be refused again, for example if checkpoints of the job
          // are registered as versions of a model.
          byId("confirm-yes").hidden = error.status === 409;
          if (error.status === 409) setText(byId("confirm-text"), "The job was not deleted.");
          throw error;
        }
        location.href = "/jobs";
      },
    });
  }

  /** Asks for settings to change, then starts a new job from a checkpoint of this job. */
  fork(checkpoint) {
    const choice = byId("fork-checkpoint");
    const { id, name, spec: { train }, total_steps } = this.page.job(), key = train.steps ? "steps" : "epochs";
    this.page.checkpoints.offer(choice, checkpoint);
    setText(byId("fork-title"), `Fork ${name}`);
    // From the last checkpoint, no steps are left unless the fork trains longer.
    const suggest = () => {
      const field = byId("fork-set"), longer = `train.${key} = ${2 * train[key]}`;
      const isLast = this.page.checkpoints.sorted.find(({ id }) => id === choice.value)?.step >= total_steps;
      if (isLast && train[key] && !field.value.trim()) field.value = longer;
      else if (!isLast && field.value === longer) field.value = "";
    };
    const choose = () => { suggest(); byId("fork-weights").href = `/jobs/new?from=${id}&set=model.pretrained=${choice.value}`; };
    choose();
    const labels = JSON.parse(byId("fork-set").dataset.labels);
    /** Returns the request that the fields describe. Throws an error about an invalid line. */
    const request = () => {
      const set = {};
      for (const line of byId("fork-set").value.split("\n").map((l) => l.trim()).filter(Boolean)) {
        const equals = line.indexOf("=");
        if (equals < 1) throw new Problem(400, { detail: `${line}: write key.path = value, such as train.lr = 0.001` });
        const name = line.slice(0, equals).trim(), key = labels[name.toLowerCase()] ?? name, valueText = line.slice(equals + 1).trim();
        try { set[key] = JSON.parse(valueText); } catch { set[key] = valueText; }
      }
      return { checkpoint: choice.value, set };
    };
    // Shows warnings before the fork is created. Mistakes are shown only when the reader creates the fork.
    const check = async () => {
      const thisCheck = this.newestCheck = Symbol("check");
      let warnings = [];
      if (byId("fork-set").value.trim()) try { ({ warnings } = await this.#post("fork/check", request())); } catch { /* While the reader types, a line is often incomplete. */ }
      if (thisCheck === this.newestCheck) setText(byId("fork-warnings"), warnings.map((w) => `${w[0].toUpperCase()}${w.slice(1)}.`).join(" "));
    };
    choice.onchange = () => { choose(); check(); };
    byId("fork-set").oninput = () => { clearTimeout(this.typing); this.typing = setTimeout(check, 300); };
    check();
    // A running job replaces its checkpoints.
    const offerAgain = () => {
      const chosen = choice.value;
      this.page.checkpoints.offer(choice, chosen);
      if (choice.value === chosen) return "";
      choose();
      check();
      return "The chosen checkpoint was removed. The newest checkpoint is chosen now.";
    };
    choice.onfocus = () => setText(byId("fork-error"), offerAgain());
    openForm("fork", async () => { location.href = `/jobs/${(await this.#post("fork", request())).id}`; }, (error) => [errorTexts(error), offerAgain()].filter(Boolean).join("\n"));
  }

  /** Sets up the panel with the job's notes, tags and project. */
  #setUpAnnotations() {
    const { id } = this.page.job(), status = byId("note-status");
    const fields = ["note", "tags", "project"].map(byId), [note, tags, project] = fields;
    const save = async (field, body) => {
      const error = byId(`${field.id}-error`);
      try {
        await ask(`/api/v1/jobs/${id}`, { method: "PATCH", body });
        setText(error, "");
        setText(status, "Saved");
        // Text that was typed while the request was sent is not saved yet.
        if (document.activeElement !== field) this.#touched.delete(field);
      } catch (problem) { setText(status, ""); setMessage(error, errorText(problem)); }
    };
    note.addEventListener("change", () => save(note, { notes: note.value }));
    tags.addEventListener("change", () => save(tags, { tags: tags.value.split(",") }));
    project.addEventListener("change", () => save(project, { project: project.value.trim() || "default" }));
    // `reloadAnnotations` must not overwrite text that the reader is typing.
    for (const field of fields) field.addEventListener("input", () => this.#touched.add(field));
    if (document.querySelector(".title .actions").dataset.readOnly !== undefined) {
      for (const field of fields) field.readOnly = true;
      setText(status, "Only the job's owner and admins can change these.");
    }
  }

  /** Reads the job's annotations again if their panel is open. */
  async reloadAnnotations() {
    if (byId("notes-panel").hidden) return;
    const job = await ask(`/api/v1/jobs/${this.page.job().id}`).catch(() => null);
    if (!job) return;
    const values = { note: job.notes ?? "", tags: job.tags.join(", "), project: job.project };
    for (const [name, value] of Object.entries(values)) {
      const field = byId(name);
      if (!this.#touched.has(field) && field.value !== value) field.value = value;
    }
  }
}
