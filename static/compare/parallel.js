// Parallel coordinates: axes for the first `SETTINGS` settings that differ and for the `RESULTS`, and a line for each job. Dragging along an
// axis selects the jobs whose lines cross the dragged part.

import { makeSvg, setText } from "../page.js";
import { colour, dash } from "./colours.js";
import { titleOf } from "./names.js";
import { columns, shorten, varies } from "./columns.js";

/** Height of the drawing, and its margins at the top and bottom, in pixels. */
const HEIGHT = 330, TOP = 34, BOTTOM = 26;
/** Minimum width of an axis, in pixels. */
const AXIS_WIDTH = 112;
/** Maximum number of settings with an axis. */
const SETTINGS = 10;
/** Results with an axis. */
const RESULTS = ["result:loss", "result:val_loss", "result:best"];
/** Minimum movement of a pointer that makes a brush, in pixels. */
const MIN_BRUSH = 4;
/** Radius of a point, in pixels. */
const DOT = 4;
/** Part of an axis by which an arrow key moves the end of a brush. */
const KEY_STEP = 0.05;

export class Parallel {
  #drag = null;

  constructor(root, jobs, selection) {
    Object.assign(this, { root, jobs, selection, note: root.closest(".card").querySelector(".card-head .small") });
    new ResizeObserver(() => { if (this.jobs().length) this.draw(); }).observe(root);
    selection.addEventListener("change", () => { if (this.jobs().length) this.draw(); });
    root.addEventListener("pointerdown", (event) => this.#begin(event));
    root.addEventListener("pointermove", (event) => this.#move(event));
    for (const type of ["pointerup", "pointercancel"]) root.addEventListener(type, (event) => this.#end(event));
    root.addEventListener("keydown", (event) => this.#key(event));
  }

  /** Returns the pointer's position along an axis, from 0 (bottom) to 1. */
  #place(event) {
    const top = this.root.querySelector("svg").getBoundingClientRect().top;
    return Math.min(1, Math.max(0, (HEIGHT - BOTTOM - (event.clientY - top)) / (HEIGHT - TOP - BOTTOM)));
  }

  #begin(event) {
    const hit = event.target.closest?.("[data-axis]");
    if (!hit || event.button !== 0) return;
    event.preventDefault();
    hit.focus({ preventScroll: true });
    this.#drag = { axis: hit.dataset.axis, from: this.#place(event), y: event.clientY, moved: false };
    this.root.setPointerCapture(event.pointerId);
  }

  #move(event) {
    const drag = this.#drag;
    if (!drag || (!drag.moved && Math.abs(event.clientY - drag.y) < MIN_BRUSH)) return;
    drag.moved = true;
    const to = this.#place(event), column = this.axes.find(({ key }) => key === drag.axis);
    // A point that the brush touches is selected.
    const touch = DOT / (HEIGHT - TOP - BOTTOM);
    if (column) this.selection.set([[column, [Math.max(0, Math.min(drag.from, to) - touch), Math.min(1, Math.max(drag.from, to) + touch)]]]);
  }

  /** A click without dragging removes the axis's brush. */
  #end(event) {
    const drag = this.#drag, column = drag && this.axes.find(({ key }) => key === drag.axis);
    this.#drag = null;
    if (column && !drag.moved && event.type === "pointerup") this.selection.set([[column, null]]);
  }

  /** Up and Down move the lower end of a brush, with Shift the upper end; Escape removes the brush. */
  #key(event) {
    const key = event.target.closest?.("[data-axis]")?.dataset.axis, column = this.axes?.find((c) => c.key === key);
    if (!column || !["ArrowUp", "ArrowDown", "Escape"].includes(event.key)) return;
    event.preventDefault();
    const [low, high] = this.selection.range(column) ?? [0, 1], by = event.key === "ArrowUp" ? KEY_STEP : -KEY_STEP;
    const moved = event.shiftKey ? [low, Math.min(1, Math.max(low, high + by))] : [Math.max(0, Math.min(high, low + by)), high];
    this.selection.set([[column, event.key === "Escape" || (moved[0] === 0 && moved[1] === 1) ? null : moved]]);
  }

  draw() {
    const jobs = this.jobs(), { settings, results } = columns(jobs), selected = this.selection.ids();
    const axes = this.axes = [...settings.filter((c) => c.different && varies(c)).slice(0, SETTINGS), ...results.filter((c) => RESULTS.includes(c.key) && c.values.some(Number.isFinite))];
    const width = Math.max(this.root.clientWidth, axes.length * AXIS_WIDTH), focused = document.activeElement?.dataset?.axis;
    const x = (i) => 62 + i * (width - 124) / Math.max(1, axes.length - 1), y = (v) => HEIGHT - BOTTOM - v * (HEIGHT - TOP - BOTTOM);
    const svg = makeSvg("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "group", "aria-label": `One line per job across ${axes.map((a) => a.name).join(", ")}` });
    jobs.map((job, j) => ({ job, j })).sort((a, b) => selected.has(a.job.id) - selected.has(b.job.id)).forEach(({ job, j }) => {
      const points = axes.map((a, i) => [x(i), y(a.at(a.values[j]))]).filter(([, v]) => Number.isFinite(v)), texts = axes.map((a) => `${a.name} ${a.format(a.values[j])}`);
      const line = makeSvg("g", { class: `job stroke-${colour(job.id)} ${dash(job.id)}${selected.has(job.id) ? "" : " out"}`, tabindex: 0, role: "img", "data-job": job.id, "aria-label": `${titleOf(job, jobs)}: ${texts.join(", ")}` });
      line.append(makeSvg("title", {}, `${titleOf(job, jobs)}\n${texts.join("\n")}`), makeSvg("polyline", { points: points.map((p) => p.map((v) => v.toFixed(1)).join(",")).join(" ") }), ...points.map(([cx, cy]) => makeSvg("circle", { cx, cy, r: 3.5 })));
      svg.append(line);
    });
    axes.forEach((axis, i) => {
      const range = this.selection.range(axis), name = makeSvg("text", { x: x(i), y: 12, class: "name" }, shorten(axis.name));
      name.append(makeSvg("title", {}, axis.name));
      svg.append(makeSvg("line", { x1: x(i), x2: x(i), y1: TOP, y2: HEIGHT - BOTTOM, class: "axis" }), name,
        makeSvg("text", { x: x(i), y: TOP - 8, class: "end" }, shorten(axis.ends[1])), makeSvg("text", { x: x(i), y: HEIGHT - 8, class: "end" }, shorten(axis.ends[0])));
      if (range) svg.append(makeSvg("rect", { x: x(i) - 8, width: 16, y: y(range[1]) - 2, height: y(range[0]) - y(range[1]) + 4, rx: 3, class: "brush" }));
      const rangeText = range ? (axis.kinds ? this.selection.brushes.get(axis.key).texts.join(", ") : range.map((v) => axis.format(axis.from(v))).join(" to ")) : "all";
      svg.append(makeSvg("rect", {
        x: x(i) - 14, width: 28, y: TOP - 8, height: HEIGHT - TOP - BOTTOM + 16, class: "hit", tabindex: 0, role: "slider", "data-axis": axis.key, "aria-orientation": "vertical",
        "aria-label": `Select jobs by ${axis.name}`, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": Math.round(100 * (range?.[0] ?? 0)), "aria-valuetext": rangeText,
      }));
    });
    this.root.replaceChildren(svg);
    // On a phone, a scroll bar is visible only while it is used.
    const scrolls = width > this.root.clientWidth + 1;
    this.root.parentElement.classList.toggle("more-beside", scrolls);
    setText(this.note, `one line per job; on the axes of results, better is higher; drag along an axis to select jobs${scrolls ? `; scroll sideways for all ${axes.length} axes` : ""}`);
    if (focused) [...svg.querySelectorAll("[data-axis]")].find((node) => node.dataset.axis === focused)?.focus({ preventScroll: true });
  }
}
