// Predictions of a checkpoint for pictures that the reader drops on the page.

import { Problem, ask, byId, make, errorText, setMessage, setText } from "../page.js";
import { accuracyOf, nouns, percent, plural } from "../numbers.js";
import { readUrl } from "../address.js";

/** Number of most probable classes that are listed for a picture. */
const MAX_CLASSES = 5;

export class Classify {
  /** Id of the checkpoint that the reader has chosen, here or with a link. Until then, the best checkpoint is selected. */
  #chosen = readUrl("checkpoint");
  /** Id of the checkpoint whose predictions are shown or being requested. */
  #shown = null;
  /** The pictures of each request whose predictions are shown or expected. A change of the checkpoint replaces the list. */
  #requested = [];

  constructor(checkpoints) {
    this.checkpoints = checkpoints;
    this.choice = byId("classify-checkpoint");
    this.results = byId("classify-results");
    const zone = byId("drop"), input = byId("classify-files");
    input.addEventListener("change", () => { this.#add([...input.files]); input.value = ""; });
    for (const kind of ["dragenter", "dragover"]) zone.addEventListener(kind, (event) => { event.preventDefault(); zone.classList.add("over"); });
    for (const kind of ["dragleave", "drop"]) zone.addEventListener(kind, () => zone.classList.remove("over"));
    zone.addEventListener("drop", (event) => { event.preventDefault(); this.#add([...event.dataTransfer.files]); });
    this.choice.addEventListener("change", () => this.choose(this.choice.value));
    checkpoints.changeListeners.add(() => this.#offerCheckpoints());
    this.#offerCheckpoints();
  }

  #offerCheckpoints() {
    this.checkpoints.offer(this.choice, this.checkpoints.idOrBest(this.#chosen));
    this.choice.disabled = byId("classify-files").disabled = !this.checkpoints.usable.length;
    this.#update();
  }

  /** Selects a checkpoint, and shows its predictions for the shown pictures. */
  choose(id) { this.choice.value = this.#chosen = id; this.#update(); }

  /** Classifies the shown pictures again if another checkpoint is selected than the one whose predictions are shown. */
  async #update() {
    const chosen = this.choice.value;
    if (chosen === this.#shown) return;
    this.#shown = chosen;
    this.results.replaceChildren();
    setText(byId("classify-reliability"), "");
    setText(byId("classify-status"), chosen ? "" : this.checkpoints.size ? "The files of all checkpoints are missing." : "No checkpoint yet. Classes can be predicted as soon as the first checkpoint is written.");
    const requested = this.#requested = [...this.#requested];
    if (chosen) for (const files of [...requested]) if (requested === this.#requested) await this.#send(files);
  }

  #add(files) {
    if (!files.length || !this.choice.value) return;
    this.#requested.push(files);
    this.#send(files);
  }

  /** Shows the predictions of the selected checkpoint for `files`, unless another checkpoint is selected meanwhile. */
  async #send(files) {
    const status = byId("classify-status"), requested = this.#requested, checkpoint = this.checkpoints.sorted.find(({ id }) => id === this.choice.value);
    setText(status, `Predicting ${plural(files.length, "picture")} …`);
    setText(byId("classify-reliability"), "");
    const form = new FormData();
    for (const file of files) form.append("picture", file, file.name);
    try {
      const content = await ask(`/api/v1/checkpoints/${encodeURIComponent(checkpoint.id)}/predict`, { method: "POST", body: form });
      const label = `${checkpoint.epoch}-${checkpoint.step}`;
      const cards = await Promise.all(content.predictions.map((p, i) => card(p, files[i], label)));
      if (requested !== this.#requested) return;
      this.results.prepend(...cards);
      setText(status, `${plural(content.predictions.filter((p) => !p.error).length, "picture")} classified with ${label}`);
      setText(byId("classify-reliability"), validationAccuracy(checkpoint));
    } catch (error) {
      if (requested !== this.#requested) return;
      // Refused pictures are not sent again to other checkpoints.
      if (error instanceof Problem && error.status < 500 && error.status !== 429) requested.splice(requested.indexOf(files), 1);
      setMessage(status, errorText(error));
    }
  }
}

/** Formats the validation accuracy of a checkpoint. Empty if the checkpoint was not validated. */
function validationAccuracy(checkpoint) {
  const { val_accuracy: accuracy, validation } = checkpoint;
  return accuracy == null || !validation ? "" : `Validation accuracy of this checkpoint: ${accuracyOf(accuracy, validation.pictures)} ${nouns(validation.pictures, "picture")}. ${byId("diagnosis").dataset.trainedValidation ?? ""}`.trim();
}

async function card(prediction, file, checkpoint) {
  const lines = prediction.classes.slice(0, MAX_CLASSES).map(({ class: label, probability }) => make("li", {},
    make("span", { textContent: label, title: label }),
    make("meter", { value: probability, "aria-label": `probability of ${label}` }),
    make("b", { textContent: percent(probability), title: String(probability) })));
  if (prediction.error) lines.unshift(make("li", { className: "error", textContent: `${file.name} ${prediction.error}` }));
  const canvas = await thumbnail(file), name = make("p", { className: "name", textContent: file.name, title: `checkpoint ${checkpoint}` });
  return make("li", {}, ...(canvas ? [canvas] : []), make("div", {}, name, make("ol", {}, ...lines)));
}

/** Returns a thumbnail. The thumbnail is drawn onto a canvas, because the page's content security policy allows canvases. */
async function thumbnail(file) {
  const bitmap = await createImageBitmap(file).catch(() => null);
  if (!bitmap) return null;
  const canvas = make("canvas", { role: "img", "aria-label": file.name }), side = 96, scale = side / Math.max(bitmap.width, bitmap.height);
  canvas.width = Math.max(1, bitmap.width * scale);
  canvas.height = Math.max(1, bitmap.height * scale);
  const ctx = canvas.getContext("2d");
  ctx.imageSmoothingEnabled = scale < 1;
  ctx.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas;
}
