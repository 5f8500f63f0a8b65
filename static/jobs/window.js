// Rows far from what is on the screen are not laid out: a list of ten thousand then scrolls as one of a hundred. A table's rows
// cannot be left to `content-visibility`, so the far ones are hidden, and an empty row of their height stands for them. Only rows
// that enter or leave are touched.

/** Fewer are all laid out; rows beyond the screen that are laid out on either side, and how few of them may be left there: cards differ in
 *  height, and a row more or less must not move the others to and fro. */
const FEW = 200, BEYOND = 24, LEAST = 8;

export class Window {
  /** Rows that are laid out. */
  shown = new Set();
  /** Height of a row with the space below it: of cards, which differ, a mean. */
  #height = 0;
  #whole = true;
  /** Places of the first row that is laid out and of the one behind the last; none once rows have come or gone. */
  #range = null;
  #frame = 0;

  /** `enter(row)`: a row that was hidden is about to be seen. */
  constructor(rows, enter) {
    Object.assign(this, { rows, enter });
    const pad = () => {
      const body = document.createElement("tbody"), row = body.insertRow(), cell = row.insertCell();
      body.hidden = true;
      row.className = "pad";
      body.setAttribute("aria-hidden", "true");
      return body;
    };
    this.above = pad();
    this.below = pad();
    rows.before(this.above);
    rows.after(this.below);
    for (const row of rows.children) if (!row.hidden) this.shown.add(row);
    // A row that moves is taken away and added.
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

  /** After the next frame's rows or place are known. */
  draw() { this.#frame ||= requestAnimationFrame(() => { this.#frame = 0; this.#lay(); }); }

  #lay() {
    const all = this.rows.children, { length } = all;
    if (length <= FEW) {
      if (this.#whole) return;
      for (const row of all) this.#show(row);
      this.#pad(this.above, 0);
      this.#pad(this.below, 0);
      this.#whole = true;
      return;
    }
    this.#whole = false;
    const height = this.#height ||= this.#measure(), top = (this.above.hidden ? this.rows : this.above).getBoundingClientRect().top;
    const first = Math.floor(-top / height), last = Math.max(0, Math.ceil((innerHeight - top) / height)), [now, end] = this.#range ?? [Infinity, 0];
    if (now <= Math.max(0, first - LEAST) && end >= Math.min(length, last + LEAST)) return;
    const from = Math.max(0, Math.min(first - BEYOND, length - 2 * BEYOND)), to = Math.min(length, last + BEYOND);
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
    this.enter(row);
    row.hidden = false;
    this.shown.add(row);
  }

  /** From rows that are laid out and stand one behind the other. */
  #measure() {
    const laid = [...this.rows.children].filter((row) => !row.hidden), first = laid[0]?.getBoundingClientRect(), last = laid.at(-1)?.getBoundingClientRect();
    return (laid.length > 1 ? (last.top - first.top) / (laid.length - 1) : first?.height) || 58;
  }

  #pad(body, height) {
    body.hidden = height <= 0;
    const cell = body.rows[0].cells[0], words = `${Math.max(0, height)}px`;
    if (cell.style.height !== words) cell.style.height = words;
  }
}
