// The lines of the last hours: a machine's history, read again each minute, drawn next to the numbers.

import { ask } from "../page.js";

const HOURS = 6, POINTS = 90, EVERY_MS = 60_000;
/** The box of a line in web/templates/machines.html. */
const WIDTH = 120, HEIGHT = 28;

export class Lines {
  #history = new Map();

  constructor(root) { this.root = root; }

  /** Reads what is older than a minute, one machine after the other, and draws. */
  async refresh() {
    for (const section of this.root.querySelectorAll("[data-agent]")) {
      const id = section.dataset.agent, known = this.#history.get(id);
      if (known && performance.now() - known.read < EVERY_MS) continue;
      const since = new Date(Date.now() - HOURS * 3_600_000).toISOString();
      const answer = await ask(`/api/v1/agents/${encodeURIComponent(id)}/metrics?since=${since}&points=${POINTS}`);
      this.#history.set(id, { ...answer, read: performance.now() });
      this.#draw(section);
    }
  }

  /** Draws all again: machines and slots may have come. */
  draw() { for (const section of this.root.querySelectorAll("[data-agent]")) this.#draw(section); }

  #draw(section) {
    const history = this.#history.get(section.dataset.agent);
    if (!history) return;
    for (const svg of section.querySelectorAll(".spark")) {
      const slot = svg.closest("[data-slot]")?.dataset.slot;
      const metrics = slot === undefined ? history.machine : history.gpus.find((gpu) => gpu.slot === Number(slot))?.metrics;
      const paths = [...svg.querySelectorAll("path")], series = paths.map((path) => metrics?.[path.dataset.metric] ?? []);
      const most = Number(svg.dataset.most) || Math.max(1e-9, ...series.flat().filter(Number.isFinite));
      paths.forEach((path, i) => {
        const drawn = line(series[i], most);
        if (path.getAttribute("d") !== drawn) path.setAttribute("d", drawn);
      });
    }
  }
}

/** A path from 0 at the bottom to `most` at the top; nothing is drawn where nothing was measured. */
function line(values, most) {
  const dx = (WIDTH - 2) / Math.max(1, values.length - 1), parts = [];
  values.forEach((value, i) => {
    if (!Number.isFinite(value)) return;
    const x = 1 + i * dx, y = HEIGHT - 2 - Math.min(1, value / most) * (HEIGHT - 4);
    const begins = !Number.isFinite(values[i - 1]), alone = begins && !Number.isFinite(values[i + 1]);
    parts.push(`${begins ? "M" : "L"}${x.toFixed(1)},${y.toFixed(1)}${alone ? "h0.5" : ""}`);
  });
  return parts.join("");
}
