// The pictures of a dataset, by split and class, with or without a job's augmentation.

import { ask, errorText, setText } from "../page.js";
import { count } from "../numbers.js";
import { readUrl, writeUrl } from "../address.js";
import { figure } from "../job/pictures.js";

/** Number of pictures per request without augmentation. */
const PICTURES_PER_REQUEST = 48;
/** Number of pictures that are shown before the reader asks for more, and number of pictures from which they are chosen. */
const PREVIEW_PICTURES = 8, PREVIEW_CHOICES = 32;
/** Number of pictures whose augmented versions are shown at a time, and number of versions of each picture. */
const AUGMENTED_PICTURES = 8, VERSIONS = 5;

/** Describes a job's augmentation in a few words. */
function augmentation(data) {
  const crop = data.random_resized_crop ? "resized crop" : data.crop_padding ? `crop ${data.crop_padding}` : "";
  const parts = [crop, data.horizontal_flip && "flip", data.vertical_flip && "vertical flip", data.color_jitter?.some((v) => v > 0) && "color jitter"];
  if (data.augment && data.augment !== "none") parts.push(`${data.augment} augment`);
  if (data.random_erasing > 0) parts.push("erasing");
  return parts.filter(Boolean).join(", ");
}

export class Gallery {
  #requests = 0;
  /** Number of visible pictures, and the cursor of the next pictures. */
  #shownCount = 0;
  #cursor = null;
  /** Seed of the random order, which is the default because stored pictures are often sorted by class. */
  #seed = 1;

  constructor(card, name) {
    Object.assign(this, { card, name });
    const element = (key) => card.querySelector(`[data-g="${key}"]`);
    this.element = element;
    // A page may have many datasets, so pictures are requested only for datasets in view.
    const observer = new IntersectionObserver((entries) => { if (entries.some((e) => e.isIntersecting)) { observer.disconnect(); this.#showPreview(); } });
    observer.observe(card);
    element("open").addEventListener("toggle", () => {
      element("first").hidden = element("open").open;
      if (!element("open").open) return writeUrl({ pictures: readUrl("pictures") === name ? "" : readUrl("pictures") });
      writeUrl({ pictures: name });
      if (!element("grid").childElementCount) { this.#offerJobs(); this.load(); }
    });
    for (const key of ["split", "class", "order", "augmented"]) element(key).addEventListener("change", () => this.load());
    element("shuffle").addEventListener("click", () => { this.#seed = Math.floor(Math.random() * 2 ** 32); element("order").value = "mixed"; this.load(); });
    element("more").addEventListener("click", () => this.#loadPictures(this.#cursor));
    for (const button of card.querySelectorAll("[data-class]")) button.addEventListener("click", () => { element("class").value = button.dataset.class; element("open").open = true; this.load(); });
    if (readUrl("pictures") === name) element("open").open = true;
  }

  /** Shows a few pictures of the training split, if possible of all classes: the first picture of each class, then the second, and so on. */
  async #showPreview() {
    const { element } = this, query = new URLSearchParams({ limit: PREVIEW_CHOICES, split: element("split").value, shuffle: this.#seed });
    try {
      const { samples, classes } = await ask(`/api/v1/datasets/${encodeURIComponent(this.name)}/samples?${query}`);
      const numberInClass = new Map(samples.map((s, i) => [s, samples.slice(0, i).filter(({ label }) => label === s.label).length]));
      const shown = samples.sort((a, b) => numberInClass.get(a) - numberInClass.get(b)).slice(0, PREVIEW_PICTURES);
      element("first").append(...shown.map((s) => figure(s.png, `${classes[s.label]}, picture ${s.index}`, [[classes[s.label]]])));
    } catch { element("first").hidden = true; /* The section Pictures shows the error. */ }
  }

  /** Offers the jobs whose augmentation can be shown. */
  async #offerJobs() {
    const { jobs } = await ask("/api/v1/jobs?limit=200").catch(() => ({ jobs: [] }));
    for (const job of jobs.filter((j) => j.spec.data.dataset === this.name).slice(0, 50)) {
      this.element("augmented").add(new Option(`${job.name}: ${augmentation(job.spec.data) || "none"}`, job.id));
    }
  }

  /** Shows the first pictures that match the choices. */
  load() {
    this.#shownCount = 0;
    this.element("grid").replaceChildren();
    return this.#loadPictures(null);
  }

  /** Adds pictures: the first pictures, or the pictures after `cursor`. */
  async #loadPictures(cursor) {
    const thisRequest = ++this.#requests, { element } = this, job = element("augmented").value, grid = element("grid");
    for (const key of ["split", "class", "order", "shuffle"]) element(key).disabled = job !== "";
    setText(element("note"), "Reading …");
    element("more").hidden = true;
    const query = new URLSearchParams({ limit: job ? AUGMENTED_PICTURES * VERSIONS : PICTURES_PER_REQUEST, split: element("split").value });
    if (cursor) query.set("cursor", cursor);
    if (job) query.set("augmented", job);
    else {
      if (element("class").value) query.set("class", element("class").value);
      if (element("order").value) query.set("shuffle", this.#seed);
    }
    try {
      const { samples, total, classes, next_cursor } = await ask(`/api/v1/datasets/${encodeURIComponent(this.name)}/samples?${query}`);
      if (thisRequest !== this.#requests) return;
      const source = (s) => (s.epoch != null ? `number ${count(s.index)}, epoch ${s.epoch + 1}` : s.file ? s.file.split("/").pop() : `number ${count(s.index)}`);
      grid.append(...samples.map((s) => figure(s.png, `${classes[s.label]}, picture ${s.index}`, [[classes[s.label]], [source(s), "muted"]])));
      grid.classList.toggle("by-five", job !== "");
      this.#shownCount += job ? AUGMENTED_PICTURES : PICTURES_PER_REQUEST;
      this.#cursor = next_cursor;
      setText(element("note"), job ? `each picture as augmented in the first ${VERSIONS} epochs; it is the same in every run, because the augmentation is seeded` : `${count(Math.min(this.#shownCount, total))} of ${count(total)}`);
      element("more").hidden = next_cursor === null;
    } catch (error) { if (thisRequest === this.#requests) setText(element("note"), errorText(error)); }
  }
}
