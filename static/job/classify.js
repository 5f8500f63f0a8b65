// Predictions of a checkpoint for pictures that the reader drops on the page.

import { byId, Problem, errorText, text } from "../page.js";
import { percent, plural } from "../numbers.js";

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
    checkpoints.changed.add(() => this.#options());
    this.#options();
  }

  #options() {
    const all = this.checkpoints.sorted, wanted = this.choice.value || all.find((c) => c.best)?.id;
    this.choice.replaceChildren(...all.map((c) => new Option(`${c.epoch}-${c.step}${c.best ? ", best" : ""}`, c.id, false, c.id === wanted)));
    this.choice.disabled = byId("classify-files").disabled = !all.length;
    if (!all.length) text(byId("classify-status"), "No checkpoint yet. Classes can be predicted as soon as there is one.");
  }

  choose(id) { this.choice.value = id; }

  async #send(files) {
    const status = byId("classify-status");
    if (!files.length) return;
    text(status, `Predicting ${plural(files.length, "picture")} …`);
    const form = new FormData();
    for (const file of files) form.append("picture", file, file.name);
    try {
      const response = await fetch(`/api/v1/checkpoints/${encodeURIComponent(this.choice.value)}/predict`, { method: "POST", body: form, headers: { accept: "application/json" } });
      const content = await response.json().catch(() => null);
      if (!response.ok) throw new Problem(response.status, content);
      const label = this.choice.selectedOptions[0].textContent;
      this.results.prepend(...await Promise.all(content.predictions.map((p, i) => card(p, files[i], label))));
      text(status, `${plural(files.length, "picture")} classified with ${label}`);
    } catch (error) { text(status, errorText(error)); }
  }
}

async function card(prediction, file, checkpoint) {
  const item = document.createElement("li"), name = document.createElement("p"), list = document.createElement("ol");
  name.className = "name";
  name.textContent = file.name;
  name.title = `checkpoint ${checkpoint}`;
  const canvas = await thumbnail(file);
  if (canvas) item.append(canvas);
  if (prediction.error) list.append(Object.assign(document.createElement("li"), { className: "error", textContent: `${file.name} ${prediction.error}` }));
  for (const { class: label, probability } of prediction.classes.slice(0, TOP)) {
    const line = document.createElement("li"), meter = document.createElement("meter");
    meter.value = probability;
    meter.setAttribute("aria-label", `probability of ${label}`);
    const words = Object.assign(document.createElement("span"), { textContent: label, title: label }), share = Object.assign(document.createElement("b"), { textContent: percent(probability), title: String(probability) });
    line.append(words, meter, share);
    list.append(line);
  }
  const body = document.createElement("div");
  body.append(name, list);
  item.append(body);
  return item;
}

/** Returns a thumbnail, drawn onto a canvas, which the page's content security policy allows. */
async function thumbnail(file) {
  const bitmap = await createImageBitmap(file).catch(() => null);
  if (!bitmap) return null;
  const canvas = document.createElement("canvas"), side = 96, scale = side / Math.max(bitmap.width, bitmap.height);
  canvas.width = Math.max(1, bitmap.width * scale);
  canvas.height = Math.max(1, bitmap.height * scale);
  const ctx = canvas.getContext("2d");
  ctx.imageSmoothingEnabled = scale < 1;
  ctx.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", file.name);
  return canvas;
}
