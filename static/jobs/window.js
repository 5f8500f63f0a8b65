// Lays out only rows near the visible part, so that a list of ten thousand rows scrolls like a list of a hundred. `content-visibility` does
// not work for table rows. So all other rows are hidden, and empty rows above and below have the height of the hidden rows.

import { make } from "../page.js";

/** Up to this number of rows, all rows are laid out. */
const MIN_WINDOWED = 200;
/** Number of rows that are laid out on either side of the visible part. */
const OVERSCAN = 24;
/**
 * The range of rows stays while at least this number of rows is laid out on either side. Otherwise every small scroll would exchange rows
 * for empty space of the mean height, and cards, which differ in height, would jump.
 */
const MIN_OVERSCAN = 8;

export class Window {
  /** Rows that are laid out. */
  shown = new Set();
  /** Height of a row with the space below it; for cards, which differ in height, a mean. */
  #height = 0;
  #areAllShown = true;
  /** Indices of the first row that is laid out and of the row after the last; null after rows have been added or removed. */
  #range = null;
  #frame = 0;

  /** `onShow(row)`: called before a hidden row becomes visible. */
  constructor(rows, onShow) {
    Object.assign(this, { rows, onShow });
    const pad = () => make("tbody", { hidden: true, "aria-hidden": "true" }, make("tr", { className: "pad" }, make("td")));
    this.above = pad();
    this.below = pad();
    rows.before(this.above);
    rows.after(this.below);
    for (const row of rows.children) if (!row.hidden) this.shown.add(row);
    // Moving a row removes it and adds it.
    new MutationObserver((changes) => {
      this.#range = null;
      for (const { removedNodes, addedNodes } of changes) {
        for (const row of removedNodes) if (row.parentNode !== rows) this.shown.delete(row);
        for (const row of addedNodes) if (row.parentNode === rows && !row.hidden) this.shown.add(row);
      }
    }).observe(rows, { childList: true });
    addEventListener("scroll", () => this.draw(), { passive: true });
    addEventListener("resize", () => { this.#height = 0; this.#range = null; this.draw(); }, { passive: true });
  }

  /** Lays out rows in the next frame, when their number and position are known. */
  draw() { this.#frame ||= requestAnimationFrame(() => { this.#frame = 0; this.#layOut(); }); }

  #layOut() {
    const all = this.rows.children, { length } = all;
    if (length <= MIN_WINDOWED) {
      if (this.#areAllShown) return;
      for (const row of all) this.#show(row);
      this.#pad(this.above, 0);
      this.#pad(this.below, 0);
      this.#areAllShown = true;
      return;
    }
    this.#areAllShown = false;
    const height = this.#height ||= this.#measure(), top = (this.above.hidden ? this.rows : this.above).getBoundingClientRect().top;
    const first = Math.floor(-top / height), last = Math.max(0, Math.ceil((innerHeight - top) / height)), [shownFrom, shownTo] = this.#range ?? [Infinity, 0];
    if (shownFrom <= Math.max(0, first - MIN_OVERSCAN) && shownTo >= Math.min(length, last + MIN_OVERSCAN)) return;
    const from = Math.max(0, Math.min(first - OVERSCAN, length - 2 * OVERSCAN)), to = Math.min(length, last + OVERSCAN);
    this.#range = [from, to];
    const wanted = new Set();
    for (let i = from; i < to; i++) wanted.add(all[i]);
    for (const row of this.shown) if (!wanted.has(row)) { row.hidden = true; this.shown.delete(row); }
    for (const row of wanted) this.#show(row);
    this.#pad(this.above, from * height);
    this.#pad(this.below, (length - to) * height);
  }

  #show(row) {
    if (!row.hidden) return this.shown.add(row);
    this.onShow(row);
    row.hidden = false;
    this.shown.add(row);
  }

  /** Measures the height of a row in pixels from rows that are laid out one after another; 58 if no row is laid out. */
  #measure() {
    const laid = [...this.rows.children].filter((row) => !row.hidden), first = laid[0]?.getBoundingClientRect(), last = laid.at(-1)?.getBoundingClientRect();
    return (laid.length > 1 ? (last.top - first.top) / (laid.length - 1) : first?.height) || 58;
  }

  #pad(body, height) {
    body.hidden = height <= 0;
    const cell = body.rows[0].cells[0], cssHeight = `${Math.max(0, height)}px`;
    if (cell.style.height !== cssHeight) cell.style.height = cssHeight;
  }
}
