// Predictions of a checkpoint for pictures that the reader drops on the page.

import { ask, byId, make, errorText, text } from "../page.js";
import { accuracyOf, percent, plural } from "../numbers.js";

const TOP = 5;

export class Classify {
  constructor(checkpoints) {
    this.checkpoints = checkpoints;
    this.choice = byId("classify-checkpoint");
    this.results = byId("classify-results");
    const zone = byId("drop"), input = byId("classify-files");
    input.addEventListener("change", () => { this.#send([...input.files]); input.value = ""; });
    for (const kind of ["dragenter", "dragover"]) zone.addEventListener(kind, (event) => { event.preventDefault(); zone.classList.add("over"); });
    for (const kind of ["dragleave", "drop"]) zone.addEventListener(kind, () => zone.classList.remove("over"));
    zone.addEventListener("drop", (event) => { event.preventDefault(); this.#send([...event.dataTransfer.files]); });
    checkpoints.changed.add(() => this.#offerCheckpoints());
    this.#offerCheckpoints();
  }

  #offerCheckpoints() {
    this.checkpoints.offer(this.choice, this.choice.value || this.checkpoints.best?.id);
    this.choice.disabled = byId("classify-files").disabled = !this.checkpoints.size;
    if (!this.checkpoints.size) text(byId("classify-status"), "No checkpoint yet. Classes can be predicted as soon as the first checkpoint is written.");
  }

  choose(id) { this.choice.value = id; }

  async #send(files) {
    const status = byId("classify-status");
    if (!files.length) return;
    text(status, `Predicting ${plural(files.length, "picture")} …`);
    text(byId("classify-reliability"), "");
    const chosen = this.choice.value;
    const form = new FormData();
    for (const file of files) form.append("picture", file, file.name);
    try {
      const content = await ask(`/api/v1/checkpoints/${encodeURIComponent(chosen)}/predict`, { method: "POST", body: form });
      const label = this.choice.selectedOptions[0].textContent;
      this.results.prepend(...await Promise.all(content.predictions.map((p, i) => card(p, files[i], label))));
      text(status, `${plural(content.predictions.filter((p) => !p.error).length, "picture")} classified with ${label}`);
      text(byId("classify-reliability"), validationAccuracy(this.checkpoints.sorted.find(({ id }) => id === chosen)));
    } catch (error) { text(status, errorText(error)); }
  }
}

/** Formats the validation accuracy of a checkpoint. Empty if the checkpoint was not validated. */
function validationAccuracy(checkpoint) {
  const { val_accuracy: accuracy, validation } = checkpoint ?? {};
  return accuracy == null || !validation ? "" : `Validation accuracy of this checkpoint: ${accuracyOf(accuracy, validation.pictures)} pictures.`;
}

async function card(prediction, file, checkpoint) {
  const lines = prediction.classes.slice(0, TOP).map(({ class: label, probability }) => make("li", {},
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
