// A drawing context that writes SVG. It has the methods of a canvas's context that charts use.

const escape = (text) => text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
const round2 = (v) => Number(v.toFixed(2));

export class SvgContext {
  globalAlpha = 1;
  fillStyle = "#000";
  strokeStyle = "#000";
  lineWidth = 1;
  lineJoin = "miter";
  font = "12px sans-serif";
  textAlign = "left";
  textBaseline = "alphabetic";
  #parts = [];
  #path = [];
  #dash = [];
  #stack = [];
  #clips = 0;
  #open = 0;

  /** `measurer`: the 2D context of a canvas, which measures texts. */
  constructor(width, height, measurer) {
    this.canvas = { width, height };
    this.measurer = measurer;
  }

  measureText(text) { this.measurer.font = this.font; return this.measurer.measureText(text); }
  /** Unlike a canvas's context, does not keep the dash, font, alignment and line join. */
  save() { this.#stack.push([this.globalAlpha, this.fillStyle, this.strokeStyle, this.lineWidth, this.#open]); }
  restore() {
    const [alpha, fill, stroke, width, open] = this.#stack.pop();
    Object.assign(this, { globalAlpha: alpha, fillStyle: fill, strokeStyle: stroke, lineWidth: width });
    while (this.#open > open) { this.#parts.push("</g>"); this.#open--; }
  }
  setLineDash(dash) { this.#dash = dash; }
  beginPath() { this.#path = []; }
  moveTo(x, y) { this.#path.push(`M${round2(x)} ${round2(y)}`); }
  lineTo(x, y) { this.#path.push(`L${round2(x)} ${round2(y)}`); }
  rect(x, y, w, h) { this.#path.push(`M${round2(x)} ${round2(y)}h${round2(w)}v${round2(h)}h${round2(-w)}z`); }
  /** Adds a full circle: the angles are ignored. */
  arc(x, y, r) { this.#path.push(`M${round2(x - r)} ${round2(y)}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0z`); }
  clip() {
    const id = `c${this.#clips++}`;
    this.#parts.push(`<clipPath id="${id}"><path d="${this.#path.join("")}"/></clipPath><g clip-path="url(#${id})">`);
    this.#open++;
  }
  stroke() {
    if (!this.#path.length) return;
    const dash = this.#dash.length ? ` stroke-dasharray="${this.#dash.join(" ")}"` : "";
    this.#parts.push(`<path d="${this.#path.join("")}" fill="none" stroke="${this.strokeStyle}" stroke-width="${this.lineWidth}" stroke-linejoin="${this.lineJoin}" opacity="${round2(this.globalAlpha)}"${dash}/>`);
  }
  fill() {
    if (this.#path.length) this.#parts.push(`<path d="${this.#path.join("")}" fill="${this.fillStyle}" opacity="${round2(this.globalAlpha)}"/>`);
  }
  fillRect(x, y, w, h) { this.beginPath(); this.rect(x, y, w, h); this.fill(); }
  /** Writes the text in 12px system-ui: charts use only the font of `palette()`. */
  fillText(text, x, y) {
    const anchor = { right: "end", center: "middle" }[this.textAlign] ?? "start";
    const base = { middle: "central", top: "hanging" }[this.textBaseline] ?? "auto";
    this.#parts.push(`<text x="${round2(x)}" y="${round2(y)}" fill="${this.fillStyle}" opacity="${round2(this.globalAlpha)}" text-anchor="${anchor}" dominant-baseline="${base}" font-family="system-ui, sans-serif" font-size="12">${escape(text)}</text>`);
  }

  /** Returns the whole picture. */
  toString() {
    const { width, height } = this.canvas;
    return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}">${this.#parts.join("")}</svg>\n`;
  }
}
