// Rows far from what is on the screen are not laid out: a list of ten thousand then scrolls as one of a hundred. A table's rows
// cannot be left to `content-visibility`, so the far ones are hidden, and an empty row of their height stands for them.

/** Fewer are all laid out; rows beyond the screen that are laid out on either side. */
const FEW = 200, BEYOND = 40;

export class Window {
  #from = 0;
  #to = Infinity;
  #frame = 0;

  constructor(rows) {
    this.rows = rows;
    const pad = () => {
      const body = document.createElement("tbody"), row = body.insertRow(), cell = row.insertCell();
      body.hidden = true;
      row.className = "pad";
      body.setAttribute("aria-hidden", "true");
      cell.colSpan = 100;
      return body;
    };
    this.above = pad();
    this.below = pad();
    rows.before(this.above);
    rows.after(this.below);
    // Rows are of one height where they are a table's; on a phone they are cards.
    this.table = matchMedia("(min-width: 721px)");
    this.table.addEventListener("change", () => this.draw());
    for (const event of ["scroll", "resize"]) addEventListener(event, () => this.draw(), { passive: true });
  }

  /** After the next frame's rows or place are known. */
  draw() { this.#frame ||= requestAnimationFrame(() => { this.#frame = 0; this.#lay(); }); }

  #lay() {
    const all = this.rows.children, { length } = all;
    if (length <= FEW || !this.table.matches) {
      if (!this.above.hidden || !this.below.hidden || this.#to !== Infinity) {
        for (const row of all) row.hidden = false;
        this.#pad(this.above, 0);
        this.#pad(this.below, 0);
        [this.#from, this.#to] = [0, Infinity];
      }
      return;
    }
    const height = this.#height(all), table = this.rows.parentElement, top = table.getBoundingClientRect().top + table.tHead.offsetHeight;
    const from = Math.max(0, Math.min(Math.floor(-top / height) - BEYOND, length - 2 * BEYOND)), to = Math.min(length, Math.ceil((innerHeight - top) / height) + BEYOND);
    // A row may have come or gone: each is asked, and written only where it differs.
    for (let i = 0; i < length; i++) {
      const far = i < from || i >= to;
      if (all[i].hidden !== far) all[i].hidden = far;
    }
    [this.#from, this.#to] = [from, to];
    this.#pad(this.above, from * height);
    this.#pad(this.below, (length - to) * height);
  }

  #height(all) {
    for (let i = Math.min(this.#from, all.length - 1); i < all.length; i++) if (!all[i].hidden) return all[i].getBoundingClientRect().height || 58;
    return 58;
  }

  #pad(body, height) {
    body.hidden = height <= 0;
    const cell = body.rows[0].cells[0], words = `${Math.max(0, height)}px`;
    if (cell.style.height !== words) cell.style.height = words;
  }
}
