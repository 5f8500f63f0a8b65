// Parallel coordinates: an axis for every setting that differs and for what came of it, a line a job.

import { percent, value } from "../numbers.js";
import { settings, written } from "./tables.js";

const HEIGHT = 260, TOP = 34, BOTTOM = 26, SVG = "http://www.w3.org/2000/svg";
const make = (tag, attributes, words) => {
  const node = document.createElementNS(SVG, tag);
  for (const [key, v] of Object.entries(attributes)) node.setAttribute(key, v);
  if (words !== undefined) node.textContent = words;
  return node;
};

export class Parallel {
  constructor(root, jobs, colour) {
    Object.assign(this, { root, jobs, colour });
    new ResizeObserver(() => { if (this.jobs().length) this.draw(); }).observe(root);
  }

  /** Each axis: its name, where a job is on it (0 bottom to 1 top, or NaN) and its ends in words. */
  #axes(jobs) {
    const numeric = (name, values, words) => {
      const finite = values.filter(Number.isFinite), low = Math.min(...finite), high = Math.max(...finite);
      // Learning rates and the like differ by powers of ten.
      const log = low > 0 && high / low > 20, of = (v) => (log ? Math.log(v) : v);
      const span = of(high) - of(low) || 1;
      return { name, at: values.map((v) => (high === low ? (Number.isFinite(v) ? 0.5 : NaN) : (of(v) - of(low)) / span)), ends: finite.length ? [words(low), words(high)] : ["", ""], words: values.map((v) => (Number.isFinite(v) ? words(v) : "–")) };
    };
    const plain = (v) => String(Number(v.toPrecision(6)));
    const axes = settings(jobs).filter((r) => r.different).slice(0, 10).map(({ key, values }) => {
      if (values.every((v) => typeof v === "number" || v == null)) return numeric(key, values.map((v) => v ?? NaN), plain);
      const kinds = [...new Set(values.map(written))].sort();
      return { name: key, at: values.map((v) => (kinds.length < 2 ? 0.5 : kinds.indexOf(written(v)) / (kinds.length - 1))), ends: [kinds[0], kinds.at(-1)], words: values.map(written) };
    });
    axes.push(numeric("loss", jobs.map((j) => j.last.loss ?? NaN), value), numeric("best accuracy", jobs.map((j) => j.best?.value ?? NaN), percent));
    return axes;
  }

  draw() {
    const jobs = this.jobs(), axes = this.#axes(jobs), width = Math.max(this.root.clientWidth, axes.length * 108);
    const x = (i) => 60 + i * (width - 120) / Math.max(1, axes.length - 1), y = (v) => HEIGHT - BOTTOM - v * (HEIGHT - TOP - BOTTOM);
    const svg = make("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": `One line a job across ${axes.map((a) => a.name).join(", ")}` });
    axes.forEach((axis, i) => {
      svg.append(make("line", { x1: x(i), x2: x(i), y1: TOP, y2: HEIGHT - BOTTOM, class: "axis" }), make("text", { x: x(i), y: 12, class: "name" }, axis.name),
        make("text", { x: x(i), y: TOP - 8, class: "end" }, axis.ends[1]), make("text", { x: x(i), y: HEIGHT - 8, class: "end" }, axis.ends[0]));
    });
    jobs.forEach((job, j) => {
      const points = axes.map((a, i) => [x(i), y(a.at[j])]).filter(([, v]) => Number.isFinite(v)), line = make("g", { class: `job stroke-${this.colour(job.id)}`, tabindex: 0, role: "img", "aria-label": `${job.name}: ${axes.map((a) => `${a.name} ${a.words[j]}`).join(", ")}` });
      line.append(make("title", {}, `${job.name}\n${axes.map((a) => `${a.name} ${a.words[j]}`).join("\n")}`), make("polyline", { points: points.map((p) => p.map((v) => v.toFixed(1)).join(",")).join(" ") }), ...points.map(([cx, cy]) => make("circle", { cx, cy, r: 3.5 })));
      svg.append(line);
    });
    this.root.replaceChildren(svg);
  }
}
