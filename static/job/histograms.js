// Histograms of weights and gradients: a layer over the steps as a heat map, and all layers at a step as a table.

import { ask, byId, make, makeButton, makeSvg, announce, errorText, setText } from "../page.js";
import { count, plural } from "../numbers.js";
import { setUpChoices, readUrl, writeUrl } from "../address.js";
import { Heat } from "../chart/heat.js";
import { formatTick } from "./names.js";

/** Pause between requests while the job trains. */
const RELOAD_INTERVAL_MS = 3000;
/** Number of table rows that are drawn at once. The other rows are drawn in the next frame. */
const FIRST_ROWS = 100;

const formatNumber = (v) => formatTick(Number(v.toPrecision(3)));

/** Returns the value below which the fraction `share` of the values is, as exactly as the bins allow. */
function quantile({ min, max, counts }, share) {
  const all = counts.reduce((a, b) => a + b, 0), width = (max - min) / counts.length;
  let below = 0;
  for (let i = 0; i < counts.length; i++) {
    if (counts[i] && below + counts[i] >= share * all) return min + width * (i + (share * all - below) / counts[i]);
    below += counts[i];
  }
  return max;
}

export class Histograms {
  #timer = 0;
  #requests = 0;
  #step = null;
  /** Whether the panel shows the newest step. */
  showsNewest = true;
  layer = readUrl("layer");

  constructor(job) {
    this.job = job;
    this.heat = new Heat(byId("histogram-chart"), (at) => this.#showStep(at), formatNumber);
    setUpChoices("values", "weight", (kind) => {
      this.kind = kind;
      if (!this.#isHidden) this.load();
    });
    byId("histogram-layer").addEventListener("change", (event) => this.#choose(event.target.value));
  }

  get #isHidden() { return byId("histograms-panel").hidden; }

  /** Called when the server has a new step. A hidden panel is loaded when it is opened. */
  handleStep() {
    if (!this.#isHidden) this.#timer ||= setTimeout(() => { this.#timer = 0; this.load(); }, RELOAD_INTERVAL_MS);
  }

  #choose(layer) {
    this.layer = layer;
    writeUrl({ layer });
    this.load();
  }

  #get(query) { return ask(`/api/v1/jobs/${this.job}/histograms?kind=${this.kind}${query}`); }

  async load() {
    const thisRequest = ++this.#requests;
    try {
      const { steps, layers } = await this.#get("");
      if (thisRequest !== this.#requests) return;
      const names = layers.map((layer) => layer.name);
      if (!names.includes(this.layer)) this.layer = names[0] ?? "";
      byId("histogram-layer").replaceChildren(...names.map((name) => new Option(name, name, false, name === this.layer)));
      this.#setStatus(names.length ? `${plural(names.length, "layer")} at ${plural(steps.length, "step")}${steps.length < Number(byId("histograms-panel").dataset.maxSteps) ? "" : ", the largest number that is kept, spread evenly over the run"}` : steps.length ? `There are no histograms of ${this.kind}s.` : "None yet: a job has histograms if log.histograms is set.");
      const { histograms } = this.layer ? await this.#get(`&layer=${encodeURIComponent(this.layer)}`) : { histograms: [] };
      if (thisRequest !== this.#requests) return;
      this.heat.show(`${this.kind === "weight" ? "Weights" : "Gradients"} of ${this.layer}`, histograms);
      if (!steps.includes(this.#step) || this.showsNewest) this.#step = steps.at(-1) ?? null;
      await this.#drawTable(thisRequest);
    } catch (error) { this.#setStatus(errorText(error)); }
  }

  /** Sets the status without announcing every new step to a screen reader. */
  #setStatus(text) {
    setText(byId("histogram-status"), text);
    announce(byId("histogram-said"), text);
  }

  /** Shows the step to which the reader has moved in the heat map. */
  #showStep(histogram) {
    if (!histogram) return setText(byId("histogram-at"), "Move over the picture, or use the arrow keys in the picture, to select a step. The table below shows the layers at this step.");
    const { step, attempt, min, max, counts } = histogram, all = counts.reduce((a, b) => a + b, 0);
    setText(byId("histogram-at"), `step ${count(step)}, attempt ${attempt}: ${plural(all, "value")} from ${formatNumber(min)} to ${formatNumber(max)}, median ${formatNumber(quantile(histogram, 0.5))}, nine of ten from ${formatNumber(quantile(histogram, 0.05))} to ${formatNumber(quantile(histogram, 0.95))}`);
    // The newest step is not announced to readers whose focus is elsewhere.
    if (this.heat.root === document.activeElement) setText(byId("histogram-at-said"), byId("histogram-at").textContent);
    this.#step = step;
    this.showsNewest = histogram === this.heat.newest;
    clearTimeout(this.soon);
    this.soon = setTimeout(() => this.#drawTable(this.#requests), 150);
  }

  async #drawTable(thisRequest) {
    const step = this.#step;
    if (step === null) return;
    const { histograms } = await this.#get(`&step=${step}`);
    if (thisRequest !== this.#requests || step !== this.#step) return;
    setText(byId("histogram-title"), `Every layer at step ${count(step)}`);
    const rows = histograms.map((h) => this.#row(h)), remaining = rows.splice(FIRST_ROWS);
    byId("histogram-rows").replaceChildren(...rows);
    if (remaining.length) requestAnimationFrame(() => { if (thisRequest === this.#requests) byId("histogram-rows").append(...remaining); });
  }

  #row(histogram) {
    const { layer, min, max, counts } = histogram, button = makeButton(layer, () => this.#choose(layer));
    if (layer === this.layer) button.setAttribute("aria-current", "true");
    const numbers = [formatNumber(min), formatNumber(quantile(histogram, 0.5)), formatNumber(max), count(counts.reduce((a, b) => a + b, 0))];
    return make("tr", {}, make("th", { scope: "row" }, button), profile(counts), ...numbers.map((textContent) => make("td", { className: "num", textContent })));
  }
}

/** Returns a table cell with the shape of a histogram. The next cells in the row have the range. */
function profile(counts) {
  const most = Math.max(1, ...counts), points = ["0,20", ...counts.flatMap((n, i) => { const y = (20 - 19 * n / most).toFixed(1); return [`${i},${y}`, `${i + 1},${y}`]; }), `${counts.length},20`].join(" ");
  return make("td", {}, makeSvg("svg", { class: "profile", viewBox: `0 0 ${counts.length} 20`, preserveAspectRatio: "none", "aria-hidden": "true" }, makeSvg("polygon", { points })));
}
