// A scatter plot with a point for each job and a setting or a result on each axis. Dragging a rectangle selects the jobs in it.

import { colour, dash } from "./colours.js";
import { titleOf } from "./names.js";
import { byId, make, setText } from "../page.js";
import { readUrl, writeUrl } from "../address.js";
import { drawAxes, labelWidth, prepareCanvas } from "../chart/axes.js";
import { csvCell, headOf, saveMenu, tools } from "../chart/export.js";
import { onLongPress } from "../chart/hold.js";
import { drawPoint } from "../chart/lines.js";
import { onThemeChange, palette } from "../chart/palette.js";
import { linear, linearTicks, log, logTicks } from "../chart/scale.js";
import { plural } from "../numbers.js";
import { columns, shorten, varies } from "./columns.js";

/** In pixels: maximum distance at which a pointer hits a point, minimum movement that makes a brush, and radius of a point. */
const HIT_DISTANCE = 14, MIN_BRUSH = 4, RADIUS = 5;
/** Number of points by which an arrow key moves. */
const KEY_STEPS = { ArrowRight: 1, ArrowLeft: -1 };
/** Shapes of points for jobs with dashed and dotted lines. */
const SHAPES = { dashed: "ring", dotted: "square" };

export class Scatter {
  label = "Scatter of the jobs";
  #drag = null;
  #focusedJob = null;
  #points = [];

  constructor(root, jobs, selection) {
    Object.assign(this, { root, jobs, selection });
    // The canvas has this label until the first drawing.
    this.canvas = make("canvas", { role: "img", "aria-label": "Points of the jobs" });
    this.tip = make("div", { className: "tip", hidden: true });
    this.status = make("p", { className: "sr", role: "status" });
    root.append(this.canvas, this.tip, this.status);
    root.tabIndex = 0;
    root.setAttribute("role", "group");
    root.setAttribute("aria-label", "Scatter of the jobs. Left and right arrow keys go from job to job, Enter selects the jobs at the same position, Escape clears the selection.");
    for (const which of ["x", "y"]) byId(`scatter-${which}`).addEventListener("change", ({ target }) => { writeUrl({ [`scatter-${which}`]: target.value }); this.draw(); });
    selection.addEventListener("change", () => this.invalidate());
    new ResizeObserver(() => this.invalidate()).observe(root);
    onThemeChange(() => this.invalidate());
    this.#listen();
    headOf(root).append(tools(saveMenu(this, () => `scatter-${this.x?.name}-${this.y?.name}`, () => `${this.yName()} by ${this.xName()}`)));
  }

  xName() { return this.x?.name ?? ""; }
  yName() { return this.y?.name ?? ""; }

  /** Names and colours of the drawn jobs, for saved pictures. */
  get lines() { const colours = palette(); return this.jobs().map((job) => ({ label: titleOf(job, this.jobs()), colour: colours[colour(job.id)], shape: SHAPES[dash(job.id)] ?? "disc" })); }

  csv() {
    const rows = this.jobs().map((job, i) => [job.id, job.name, this.x.values[i], this.y.values[i]].map((v) => csvCell(String(v))).join(","));
    return new Blob([`${[["id", "name", this.xName(), this.yName()].map(csvCell).join(","), ...rows].join("\n")}\n`], { type: "text/csv" });
  }

  /** Reads the jobs again, and draws the plot. */
  draw() {
    const { all } = columns(this.jobs()), find = (key) => all.find((c) => c.key === key);
    // The default of the horizontal axis is, among the settings that differ, the setting that most jobs have.
    const valueCount = (column) => column.values.filter((v) => column.kinds || Number.isFinite(v)).length;
    const [mostGiven] = all.filter((c) => c.different && !c.result && varies(c)).toSorted((a, b) => valueCount(b) - valueCount(a));
    const hasBest = find("result:best").values.some(Number.isFinite);
    const defaults = { x: mostGiven ?? find("result:step"), y: find(hasBest ? "result:best" : "result:loss") };
    for (const which of ["x", "y"]) {
      const select = byId(`scatter-${which}`), wanted = readUrl(`scatter-${which}`);
      this[which] = find(wanted) ?? defaults[which];
      const offered = [...select.options].map((option) => option.value).join("\n");
      if (offered !== all.map((c) => c.key).join("\n")) {
        const part = (label, members) => make("optgroup", { label }, ...members.map((c) => new Option(c.name, c.key)));
        const parts = [["Settings that differ", all.filter((c) => !c.result && c.different)], ["Results", all.filter((c) => c.result)], ["Other settings", all.filter((c) => !c.result && !c.different)]];
        select.replaceChildren(...parts.filter(([, members]) => members.length).map(([label, members]) => part(label, members)));
      }
      select.value = this[which].key;
    }
    this.invalidate();
  }

  invalidate() { this.frame ||= requestAnimationFrame(() => { this.frame = 0; this.#show(); }); }

  #show() {
    const prepared = this.x && prepareCanvas(this.root, this.canvas);
    if (!prepared) return;
    this.paint(prepared.ctx, prepared.width, prepared.height, { isOnPage: true });
    this.#showTip();
  }

  /** Returns the scale of a column between two pixels, with its ticks. */
  #scale(column, start, end, wanted) {
    // Adds space at either end, so that no point lies on the edge.
    const pad = (end - start) * 0.05, ends = [start + pad, end - pad];
    if (column.kinds) {
      const place = linear([0, 1], ends);
      return { to: (v) => place.to(column.at(v)), from: place.from, ticks: column.kinds.length > 1.5 * wanted ? [column.kinds[0], column.kinds.at(-1)] : column.kinds, label: shorten };
    }
    const { low, high } = column, share = linear([0, 1], ends), place = !(high > low) ? { to: (v) => (Number.isFinite(v) ? (start + end) / 2 : NaN) } : (column.log ? log : linear)([low, high], column.isLowGood ? ends.toReversed() : ends);
    return { to: place.to, from: share.from, ticks: !(high > low) ? [low].filter(Number.isFinite) : column.log ? logTicks(low, high, wanted) : linearTicks(low, high, wanted), label: column.format };
  }

  /** Draws into any context with a canvas's methods. `isOnPage`: also draws the brush, and emphasises the focused job. */
  paint(ctx, width, height, { isOnPage = false } = {}) {
    const colours = palette(), jobs = this.jobs(), selected = this.selection.ids(), { x: across, y: up } = this;
    const rows = Math.max(2, Math.floor(height / 52));
    const left = labelWidth(ctx, this.#scale(up, 0, 1, rows).ticks.map(this.#scale(up, 0, 1, rows).label), colours, 24) + 12;
    const plot = { left, right: width - 12, top: 10, bottom: height - 26, margin: 10 };
    if (plot.right - plot.left < 20) return;
    const x = this.#scale(across, plot.left, plot.right, Math.max(2, Math.floor((plot.right - plot.left) / 90))), y = this.#scale(up, plot.bottom, plot.top, rows);
    drawAxes(ctx, plot, { x, y, xTicks: x.ticks, yTicks: y.ticks, xLabel: x.label, yLabel: y.label, colours });
    const points = jobs.map((job, i) => ({ job, i, x: x.to(across.values[i]), y: y.to(up.values[i]), out: !selected.has(job.id) })).filter((p) => Number.isFinite(p.x) && Number.isFinite(p.y));
    if (isOnPage) {
      Object.assign(this, { plot, xScale: x, yScale: y });
      this.#points = points.toSorted((a, b) => a.x - b.x || a.y - b.y);
      this.#brush(ctx, colours);
    }
    // Selected points are drawn above the others.
    for (const point of [...points.filter((p) => p.out), ...points.filter((p) => !p.out)]) {
      ctx.fillStyle = colours[colour(point.job.id)];
      ctx.globalAlpha = point.out ? 0.2 : 0.9;
      drawPoint(ctx, point.x, point.y, isOnPage && this.#focusedJob === point.job.id ? RADIUS + 2 : RADIUS, SHAPES[dash(point.job.id)], colours.card);
    }
    ctx.globalAlpha = 1;
    if (!points.length) {
      ctx.fillStyle = colours.muted;
      ctx.textBaseline = "middle";
      ctx.fillText("No job has values for both axes.", (plot.left + plot.right) / 2, (plot.top + plot.bottom) / 2);
    }
    const missing = jobs.length - points.length;
    setText(byId("scatter-note"), missing ? `${plural(missing, "job")} without values for both axes` : matchMedia("(pointer: coarse)").matches ? "hold, then drag a rectangle to select jobs" : `drag a rectangle to select jobs${up.isLowGood ? "; low values are up" : ""}`);
    this.canvas.setAttribute("aria-label", `${plural(points.length, "job")}: ${up.name} by ${across.name}`);
    this.root.dataset.points = String(points.length);
  }

  #brush(ctx, colours) {
    const { plot, xScale, yScale } = this, drag = this.#drag?.to;
    let [x0, x1, y0, y1] = [plot.left, plot.right, plot.top, plot.bottom];
    if (drag) [x0, x1, y0, y1] = [Math.min(this.#drag.from.x, drag.x), Math.max(this.#drag.from.x, drag.x), Math.min(this.#drag.from.y, drag.y), Math.max(this.#drag.from.y, drag.y)];
    else {
      const across = this.selection.range(this.x), up = this.selection.range(this.y);
      if (!across && !up) return;
      // The brush surrounds the points at its ends.
      const ends = (scale, range) => { const place = linear([scale.from(0), scale.from(1)], [0, 1]); return range.map((v) => place.to(v)).sort((a, b) => a - b); };
      if (across) { const [a, b] = ends(xScale, across); x0 = Math.max(plot.left, a - RADIUS - 2); x1 = Math.min(plot.right, b + RADIUS + 2); }
      if (up) { const [a, b] = ends(yScale, up); y0 = Math.max(plot.top, a - RADIUS - 2); y1 = Math.min(plot.bottom, b + RADIUS + 2); }
    }
    ctx.fillStyle = colours.accent;
    ctx.globalAlpha = 0.12;
    ctx.fillRect(x0, y0, x1 - x0, y1 - y0);
    ctx.globalAlpha = 1;
  }

  #showTip() {
    const point = this.#points.find(({ job }) => job.id === this.#focusedJob);
    this.tip.hidden = !point;
    if (!point) return;
    const line = ({ name, values, format }) => make("p", {}, make("span", { textContent: name }), make("b", { textContent: format(values[point.i]) }));
    this.tip.replaceChildren(make("p", { textContent: titleOf(point.job, this.jobs()) }), line(this.x), line(this.y));
    const tipWidth = this.tip.offsetWidth, left = point.x + 12 + tipWidth > this.plot.right ? point.x - 12 - tipWidth : point.x + 12;
    this.tip.style.transform = `translate(${Math.max(0, left)}px, ${Math.min(point.y, this.plot.bottom - this.tip.offsetHeight)}px)`;
    setText(this.status, [...this.tip.children].map((p) => p.textContent).join(", "));
  }

  #listen() {
    const { root } = this;
    const place = (event) => { const box = root.getBoundingClientRect(), { plot } = this; return { x: Math.min(plot.right, Math.max(plot.left, event.clientX - box.left)), y: Math.min(plot.bottom, Math.max(plot.top, event.clientY - box.top)) }; };
    const nearestJob = ({ x, y }) => this.#points.map((p) => ({ p, d: Math.hypot(p.x - x, p.y - y) })).filter(({ d }) => d < HIT_DISTANCE).sort((a, b) => a.d - b.d)[0]?.p.job.id ?? null;
    const focusJob = (id) => { if (id !== this.#focusedJob) { this.#focusedJob = id; this.invalidate(); } };
    root.addEventListener("pointerdown", (event) => {
      if (!this.plot || event.button !== 0) return;
      focusJob(nearestJob(place(event)));
      if (event.pointerType !== "mouse") return;
      root.setPointerCapture(event.pointerId);
      this.#drag = { from: place(event) };
    });
    onLongPress(root, (event) => {
      if (!this.plot) return;
      // A rectangle of the size of a fingertip shows that the long press was recognised.
      const from = place(event);
      this.#drag = { from, to: { x: from.x + HIT_DISTANCE, y: from.y + HIT_DISTANCE }, held: true };
      this.invalidate();
    });
    root.addEventListener("pointermove", (event) => {
      if (!this.plot) return;
      const to = place(event), drag = this.#drag;
      if (drag && (drag.to || Math.hypot(to.x - drag.from.x, to.y - drag.from.y) > MIN_BRUSH)) { drag.to = to; drag.held = false; this.invalidate(); } else focusJob(nearestJob(to));
    });
    root.addEventListener("pointerup", () => {
      const drag = this.#drag;
      this.#drag = null;
      if (!drag) return;
      if (drag.held) return this.invalidate();
      if (!drag.to) { if (this.selection.hasBrushes && this.#focusedJob === null) this.selection.set([[this.x, null], [this.y, null]]); return; }
      this.#select(drag.from, drag.to);
    });
    root.addEventListener("pointercancel", () => { this.#drag = null; this.invalidate(); });
    root.addEventListener("pointerleave", () => focusJob(null));
    root.addEventListener("blur", () => focusJob(null));
    root.addEventListener("keydown", (event) => {
      const points = this.#points, i = points.findIndex(({ job }) => job.id === this.#focusedJob);
      if (event.key === "Escape") { focusJob(null); return this.selection.clear(); }
      if (event.key === "Enter" && i >= 0) { event.preventDefault(); return this.#select({ x: points[i].x - 1, y: points[i].y - 1 }, { x: points[i].x + 1, y: points[i].y + 1 }); }
      if (!KEY_STEPS[event.key] || !points.length) return;
      event.preventDefault();
      focusJob(points[i < 0 ? (KEY_STEPS[event.key] > 0 ? 0 : points.length - 1) : Math.min(points.length - 1, Math.max(0, i + KEY_STEPS[event.key]))].job.id);
    });
  }

  /** Selects the jobs in a rectangle. */
  #select(a, b) {
    const range = (scale, p, q) => [scale.from(p), scale.from(q)].map((v) => Math.min(1, Math.max(0, v))).sort((m, n) => m - n);
    this.selection.set([[this.x, range(this.xScale, a.x, b.x)], [this.y, range(this.yScale, a.y, b.y)]]);
  }
}
