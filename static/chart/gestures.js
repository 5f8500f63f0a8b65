// Pointer gestures on a chart. Dragging with a mouse, or with a finger after a long press, selects a range (a brush). A finger that moves
// without a long press moves the crosshair. Two fingers zoom and pan.

import { onLongPress } from "./hold.js";

/** Minimum width of a brush, and minimum distance of two fingers, in pixels. */
const MIN_BRUSH = 4, MIN_PINCH = 24;

export class Gestures {
  /** The brush, `{ from, to, held }` in pixels, or null. `to` is set by the first move; `held`: a long press began the brush. */
  brush = null;
  /** Whether a pointer is on the chart. */
  isPointerOver = false;
  /** Position of each finger in pixels, by pointer id. */
  #fingers = new Map();
  /** The two fingers of a pinch, each with the data under it when the pinch began: `{ id, at }`. */
  #pinch = null;

  /**
   * `chart`: has `root`, `view`, `plot` and `x`. `onBrush(from, to)`: called with the range of a finished brush, and during a pinch with
   * the range to show. `fullRange()`: the range that is shown without a zoom. `onChange()`: called when the brush is to be drawn again.
   */
  constructor(chart, { onBrush, fullRange, onChange }) {
    Object.assign(this, { chart, onBrush, fullRange, onChange });
    const { root, view } = chart;
    root.addEventListener("pointerenter", () => { this.isPointerOver = true; });
    root.addEventListener("pointerleave", () => { this.isPointerOver = false; if (!this.brush) view.setCursor(null); });
    root.addEventListener("pointerdown", (event) => this.#down(event));
    root.addEventListener("pointermove", (event) => this.#move(event));
    for (const type of ["pointerup", "pointercancel"]) root.addEventListener(type, (event) => this.#up(event));
    root.addEventListener("dblclick", () => view.setZoom(null));
    onLongPress(root, (event) => {
      if (!chart.plot || this.#pinch) return;
      const from = this.#place(event);
      // Drawn as a thin bar before the first move, as feedback that the long press was recognised.
      this.brush = { from, held: true };
      this.onChange();
    });
  }

  /** Returns the pointer's horizontal position in the chart, in pixels. */
  #place(event) {
    const { root, plot } = this.chart;
    return Math.min(plot.right, Math.max(plot.left, event.clientX - root.getBoundingClientRect().left));
  }

  #down(event) {
    const { root, view, plot, x } = this.chart;
    if (!plot || event.button !== 0) return;
    const place = this.#place(event);
    if (event.pointerType === "mouse") { root.setPointerCapture(event.pointerId); this.brush = { from: place }; return; }
    this.#fingers.set(event.pointerId, place);
    if (this.#fingers.size === 2) this.#pinch = [...this.#fingers].map(([id, p]) => ({ id, at: x.from(p) }));
    if (this.#fingers.size > 1) { this.brush = null; view.setCursor(null); this.onChange(); } else view.setCursor(x.from(place));
  }

  #move(event) {
    const { view, plot, x } = this.chart;
    if (!plot) return;
    const place = this.#place(event), { brush } = this;
    if (this.#fingers.has(event.pointerId)) this.#fingers.set(event.pointerId, place);
    if (this.#pinch) return this.#zoom();
    if (brush && Math.abs(place - brush.from) > MIN_BRUSH) brush.to = place;
    const before = view.cursor;
    view.setCursor(x.from(place));
    if (before === view.cursor && brush) this.onChange();
  }

  /** Zooms so that the data under the two fingers stays under them. */
  #zoom() {
    const { view, plot } = this.chart, [a, b] = this.#pinch.map(({ id, at }) => ({ p: this.#fingers.get(id), at })).sort((m, n) => m.p - n.p);
    if (b.p - a.p < MIN_PINCH || b.at <= a.at) return;
    const pixel = (b.at - a.at) / (b.p - a.p), [first, last] = this.fullRange();
    const low = Math.max(first, a.at - (a.p - plot.left) * pixel), high = Math.min(last, b.at + (plot.right - b.p) * pixel);
    if (low <= first && high >= last) { if (view.zoom) view.setZoom(null); } else this.onBrush(low, high);
  }

  #up(event) {
    const { brush } = this, { x } = this.chart, pinched = this.#pinch;
    this.#fingers.delete(event.pointerId);
    if (this.#fingers.size < 2) this.#pinch = null;
    if (pinched) return;
    this.brush = null;
    if (brush?.to === undefined || event.type === "pointercancel") return this.onChange();
    const ends = [brush.from, brush.to].sort((m, n) => m - n).map((p) => x.from(p));
    this.onBrush(...ends);
  }
}
