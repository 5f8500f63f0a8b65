// Evaluation of a checkpoint on the validation pictures: scores by class, the confusion matrix, and the pictures of a cell.

import { activityIn, ask, byId, make, makeButton, Problem, errorText, setText } from "../page.js";
import { accuracyOf, count, percent, value } from "../numbers.js";
import { readUrl, writeUrl } from "../address.js";
import { predictionFigures } from "./pictures.js";

/** Number of pictures shown at first. A button shows more. */
const FIRST_PICTURES = 24;
const ASK_AGAIN_MS = 1500;
/** Maximum number of classes in the matrix. Of more classes, the most confused are shown. */
const MAX_MATRIX_CLASSES = 25;

const showActivity = activityIn("evaluation-status", "evaluation-secs");

export class Evaluation {
  #requests = 0;
  /** Id of the checkpoint whose evaluation is shown or being requested. */
  #shown = null;

  constructor(job, checkpoints) {
    Object.assign(this, { job, checkpoints });
    this.choice = byId("evaluation-checkpoint");
    this.choice.addEventListener("change", () => this.choose(this.choice.value));
    byId("neighbours").addEventListener("click", () => this.showNeighbours());
    byId("behind-back").addEventListener("click", () => this.#showMistakes());
    checkpoints.changeListeners.add(() => this.#offerCheckpoints());
    this.#offerCheckpoints();
  }

  /** The list selects the best checkpoint until the reader has chosen another one, which the URL then names. */
  #offerCheckpoints() {
    this.checkpoints.offer(this.choice, this.checkpoints.idOrBest(readUrl("checkpoint")));
    this.choice.disabled = !this.checkpoints.usable.length;
    if (!byId("evaluation-panel").hidden) this.update();
  }

  /** Selects and shows a checkpoint. */
  choose(id) { this.choice.value = id; writeUrl({ checkpoint: id }); this.update(); }

  /** Requests the evaluation of the selected checkpoint, unless it is shown. */
  update() { if (this.choice.value !== this.#shown) this.#load(); }

  async #load() {
    const thisRequest = ++this.#requests, out = byId("evaluation-out"), began = Date.now();
    this.#shown = this.choice.value;
    out.hidden = true;
    setText(byId("neighbours-sum"), "");
    if (!this.choice.value) return showActivity(this.checkpoints.size ? "The files of all checkpoints are missing." : "No checkpoint yet. The first checkpoint can be evaluated here.");
    const found = await this.#request("evaluation", "Evaluating on the validation pictures …", (activity) => showActivity(activity, `${Math.round((Date.now() - began) / 1000)} s`));
    if (found) this.#show(found);
    else if (thisRequest === this.#requests) {
      this.#shown = null;
      showActivity(byId("evaluation-status").textContent);
    }
  }

  /** Shows how often the nearest training pictures have the right class. */
  async showNeighbours() {
    if (!this.choice.value) return;
    const sum = byId("neighbours-sum");
    const found = await this.#request("evaluation/neighbours", "Embedding the pictures …", (activity) => setText(sum, activity));
    if (found) setText(sum, `${accuracyOf(found.weighted, found.samples, 2)} right by ${found.k} nearest neighbours among ${count(found.gallery)} training pictures, weighted by similarity; ${percent(found.majority, 2)} if all neighbours count the same`);
  }

  /**
   * Requests `path` for the chosen checkpoint until the result is available. Calls `show(activity)` before each request, and after a
   * problem. Returns null after a problem, or if another checkpoint is chosen meanwhile.
   */
  async #request(path, activity, show) {
    const thisRequest = this.#requests;
    for (;;) {
      show(activity);
      let found;
      try { found = await ask(`/api/v1/jobs/${this.job}/${path}?checkpoint=${encodeURIComponent(this.choice.value)}`); } catch (error) {
        if (thisRequest !== this.#requests) return null;
        activity = errorText(error);
        if (error instanceof Problem && error.status !== 503) { show(activity); return null; }
      }
      if (thisRequest !== this.#requests) return null;
      if (found && !found.detail) return found;
      if (found?.detail) activity = found.detail.replace("; ask again", " …");
      await new Promise((done) => setTimeout(done, ASK_AGAIN_MS));
      if (thisRequest !== this.#requests) return null;
    }
  }

  #show(found) {
    const names = found.classes.map((c) => c.name), out = byId("evaluation-out");
    this.found = found;
    showActivity("");
    setText(byId("evaluation-sum"), `${accuracyOf(found.accuracy, found.samples, 2)} right · 95 % interval ${found.interval.map((end) => percent(end)).join(" to ")} · loss ${value(found.loss)} · took ${found.secs.toFixed(1)} s`);
    setText(byId("evaluation-note"), found.note ? `${found.note[0].toUpperCase()}${found.note.slice(1)}.` : "");
    // A class without pictures has no scores, and a class that is never predicted has no precision.
    const isPredicted = (i) => found.confusion.some((row) => row[i] > 0);
    const scores = ({ samples, precision, recall, f1 }, i) => [count(samples), ...[isPredicted(i) ? precision : null, recall, f1].map((share) => (samples && share !== null ? percent(share) : "–"))].map((textContent) => make("td", { textContent, className: "num" }));
    byId("class-rows").replaceChildren(...found.classes.map((c, i) => make("tr", {}, make("th", { textContent: c.name, scope: "row" }), ...scores(c, i))));
    this.#drawMatrix(found, names);
    out.hidden = false;
    this.#showMistakes();
  }

  #showMistakes() {
    byId("behind-back").hidden = true;
    this.#showPictures("Most confident mistakes", this.found.mistakes, this.found.classes.map((c) => c.name));
  }

  #drawMatrix({ confusion, classes }, names) {
    let chosen = names.map((_, i) => i);
    if (chosen.length > MAX_MATRIX_CLASSES) {
      const mistakeCount = (i) => confusion[i].reduce((sum, n, j) => sum + (i === j ? 0 : n + confusion[j][i]), 0);
      chosen = chosen.toSorted((a, b) => mistakeCount(b) - mistakeCount(a)).slice(0, MAX_MATRIX_CLASSES).sort((a, b) => a - b);
    }
    setText(byId("matrix-note"), chosen.length < names.length ? `the ${MAX_MATRIX_CLASSES} most confused of ${count(names.length)} classes` : "rows: true class, columns: predicted class");
    const name = (i, scope) => make("th", { textContent: names[i], scope, title: names[i] });
    const cell = (i, j) => {
      const n = confusion[i][j], share = n / Math.max(1, classes[i].samples);
      // The style sheet has eight shades, because inline styles are not allowed.
      const td = make("td", { className: i === j ? "right" : "wrong", "data-share": n ? Math.max(1, Math.ceil(share * 8)) : 0 });
      if (!n) return td;
      td.append(makeButton(count(n), () => this.#showCell(i, j, names), { className: "", "aria-label": `${count(n)} of ${names[i]} ${i === j ? "are right" : `taken for ${names[j]}`}` }));
      return td;
    };
    const head = make("tr", {}, make("td"), ...chosen.map((j) => name(j, "col")));
    byId("matrix").replaceChildren(head, ...chosen.map((i) => make("tr", {}, name(i, "row"), ...chosen.map((j) => cell(i, j)))));
  }

  #showCell(i, j, names) {
    const { mistakes, right, confusion } = this.found;
    const entries = (i === j ? right : mistakes).filter((m) => m.label === i && m.predicted === j);
    this.#showPictures(i === j ? `${names[i]}, recognised` : `${names[i]}, taken for ${names[j]}`, entries, names, confusion[i][j]);
    byId("behind-back").hidden = false;
    byId("behind-title").scrollIntoView({ block: "nearest" });
  }

  async #showPictures(title, entries, names, total = entries.length) {
    const thisRequest = this.shownPictures = Symbol(title), box = byId("behind"), moreButton = byId("behind-more");
    setText(byId("behind-title"), title);
    const note = entries.length < total ? `${count(entries.length)} of ${count(total)} are stored` : "";
    box.replaceChildren();
    let shown = 0;
    const showMore = async () => {
      moreButton.hidden = true;
      const part = entries.slice(shown, shown + FIRST_PICTURES);
      setText(byId("behind-note"), part.length ? "Reading …" : note);
      if (!part.length) return box.append(make("p", { textContent: "None.", className: "muted" }));
      box.setAttribute("aria-busy", "true");
      try {
        const figures = await predictionFigures(this.job, part, names);
        if (thisRequest !== this.shownPictures) return;
        box.append(...figures);
        setText(byId("behind-note"), note);
        shown += part.length;
        moreButton.hidden = shown >= entries.length;
        moreButton.onclick = showMore;
      } catch (error) { if (thisRequest === this.shownPictures) setText(byId("behind-note"), errorText(error)); }
      box.removeAttribute("aria-busy");
    };
    await showMore();
  }
}
