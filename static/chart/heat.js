// A heat map of histograms over steps: one column per step, darker for more values.

import { count } from "../numbers.js";
import { drawLabels, labelWidth, prepareCanvas } from "./axes.js";
import { onThemeChange, palette } from "./palette.js";
import { linear, linearTicks } from "./scale.js";

export class Heat {
  #all = [];
  /** Index of the selected histogram, or null. */
  #selected = null;
  #name = "";

  /**
   * `onSelect(histogram)`: called when the reader moves to a histogram, or with null when new content is shown and no histogram is selected.
   * `format(v)`: a value as text.
   */
  constructor(root, onSelect, format) {
    Object.assign(this, { root, onSelect, format });
    this.canvas = root.appendChild(document.createElement("canvas"));
    this.canvas.setAttribute("role", "img");
    new ResizeObserver(() => this.draw()).observe(root);
    onThemeChange(() => this.draw());
    root.addEventListener("pointermove", (event) => this.#move(event.clientX - root.getBoundingClientRect().left));
    root.addEventListener("pointerdown", (event) => this.#move(event.clientX - root.getBoundingClientRect().left));
    root.addEventListener("keydown", (event) => this.#key(event));
  }

  get newest() { return this.#all.at(-1); }

  /** Shows the histograms of one layer, by step. */
  show(name, histograms) {
    const step = this.#all[this.#selected]?.step, isSame = name === this.#name;
    this.#name = name;
    this.#all = histograms;
    this.#selected = isSame && step !== undefined ? histograms.findIndex((h) => h.step === step) : null;
    if (this.#selected === -1) this.#selected = null;
    const last = this.newest, label = last ? `${name} over ${histograms.length} steps; at the newest, ${last.step}, from ${this.format(last.min)} to ${this.format(last.max)}` : `${name}: none yet`;
    this.root.setAttribute("aria-label", `${name}. Arrow keys move from step to step.`);
    this.canvas.setAttribute("aria-label", label);
    this.root.dataset.steps = String(histograms.length);
    if (this.#selected === null) this.onSelect(null);
    this.draw();
  }

  draw() {
    const prepared = prepareCanvas(this.root, this.canvas);
    if (!prepared) return;
    const { ctx, width, height } = prepared, colours = palette(), all = this.#all;
    this.edges = null;
    if (!all.length) return;
    const lowest = Math.min(...all.map((h) => h.min)), highest = Math.max(...all.map((h) => h.max)), room = (highest - lowest) * 0.04 || Math.abs(lowest) * 0.1 || 0.5;
    const [y0, y1] = [lowest - room, highest + room], ticks = linearTicks(y0, y1, Math.max(2, Math.floor(height / 52)));
    const plot = { top: 8, bottom: height - 26, left: labelWidth(ctx, ticks.map(this.format), colours, 24) + 10, right: width - 10 };
    const y = linear([y0, y1], [plot.bottom, plot.top]), first = all[0].step, last = all.at(-1).step, x = linear([first, last > first ? last : first + 1], [plot.left, plot.right]);
    // A column extends halfway to each neighbour.
    const boundary = (i) => (i < 0 ? plot.left : i >= all.length - 1 ? plot.right : (x.to(all[i].step) + x.to(all[i + 1].step)) / 2);
    this.edges = all.map((_, i) => [boundary(i - 1), boundary(i)]);
    ctx.fillStyle = colours.accent;
    all.forEach(({ min, max, counts }, i) => {
      const [from, to] = this.edges[i], wide = Math.max(1, to - from), largest = Math.max(1, ...counts), bin = (max - min) / counts.length;
      counts.forEach((n, k) => {
        if (!n) return;
        const low = y.to(min + k * bin), high = y.to(min + (k + 1) * bin);
        ctx.globalAlpha = 0.08 + 0.92 * Math.sqrt(n / largest);
        ctx.fillRect(from, high - (low - high < 1 ? 1 : 0), wide + 0.3, Math.max(1, low - high + 0.3));
      });
    });
    ctx.globalAlpha = 1;
    ctx.font = colours.font;
    ctx.fillStyle = colours.muted;
    ctx.textBaseline = "middle";
    ctx.textAlign = "right";
    for (const t of ticks) ctx.fillText(this.format(t), plot.left - 8, y.to(t));
    const steps = last > first ? linearTicks(first, last, Math.max(2, Math.floor((plot.right - plot.left) / 90))).filter(Number.isInteger) : [first];
    drawLabels(ctx, steps.map((t) => [x.to(t), count(t)]), plot.left, plot.right, plot.bottom + 7);
    if (this.#selected === null) return;
    const [from, to] = this.edges[this.#selected];
    ctx.strokeStyle = colours.text;
    ctx.lineWidth = 1;
    ctx.strokeRect(Math.round(from) - 0.5, plot.top - 2, Math.max(2, Math.round(to - from) + 1), plot.bottom - plot.top + 4);
  }

  /** Selects a histogram by its index, which is limited to the existing histograms. */
  #select(index) {
    if (!this.#all.length) return;
    const at = Math.min(this.#all.length - 1, Math.max(0, index));
    if (at === this.#selected) return;
    this.#selected = at;
    this.onSelect(this.#all[at]);
    this.draw();
  }

  #move(p) {
    if (!this.edges) return;
    const at = this.edges.findIndex(([, to]) => p < to);
    this.#select(at < 0 ? this.edges.length - 1 : at);
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const last = this.#all.length - 1, current = this.#selected ?? last + 1, hop = event.shiftKey ? 10 : 1;
    const index = { ArrowLeft: current - hop, ArrowRight: current + hop, Home: 0, End: last }[event.key];
    if (index === undefined) return;
    event.preventDefault();
    this.#select(index);
  }
}
