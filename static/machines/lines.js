// The lines of the last hours: a machine's history, read again every minute and drawn beside the values.

import { ask, serverNow } from "../page.js";

/** For each range, its length in minutes and its number of intervals. No interval is shorter than the interval of the server's samples. */
const RANGES = { "10m": [10, 60], "1h": [60, 60], "6h": [360, 90], "24h": [1440, 96] };
const MAX_AGE_MS = 60_000;
/** The size of a line in web/templates/machines.html. */
const WIDTH = 120, HEIGHT = 28;

export class Lines {
  #history = new Map();
  #range = RANGES["1h"];

  constructor(root) { this.root = root; }

  /** Changes the range of time, and reads all histories again. */
  async setRange(range) {
    this.#range = RANGES[range];
    this.#history.clear();
    await this.refresh();
  }

  /** Reads histories that are older than a minute (10 s for the range of 10 min), one machine after the other, and draws them. */
  async refresh() {
    for (const section of this.root.querySelectorAll("[data-agent]")) {
      const id = section.dataset.agent, known = this.#history.get(id);
      if (known && performance.now() - known.readAt < Math.min(MAX_AGE_MS, this.#range[0] * 1000)) continue;
      const range = this.#range, [minutes, points] = range, since = new Date(serverNow() - minutes * 60_000).toISOString();
      const response = await ask(`/api/v1/agents/${encodeURIComponent(id)}/metrics?since=${since}&points=${points}`);
      if (range !== this.#range) return;
      this.#history.set(id, { ...response, readAt: performance.now() });
      this.#draw(section);
    }
  }

  /** Draws all lines again, because machines and slots may have been added. */
  draw() { for (const section of this.root.querySelectorAll("[data-agent]")) this.#draw(section); }

  #draw(section) {
    const history = this.#history.get(section.dataset.agent);
    if (!history) return;
    for (const svg of section.querySelectorAll(".spark")) {
      const slot = svg.closest("[data-slot]")?.dataset.slot;
      const metrics = slot === undefined ? history.machine : history.gpus.find((gpu) => gpu.slot === Number(slot))?.metrics;
      const paths = [...svg.querySelectorAll("path")], series = paths.map((path) => metrics?.[path.dataset.metric] ?? []);
      const top = Number(svg.dataset.top) || Math.max(1e-9, ...series.flat().filter(Number.isFinite));
      paths.forEach((path, i) => {
        const drawn = line(series[i], top);
        if (path.getAttribute("d") !== drawn) path.setAttribute("d", drawn);
      });
    }
  }
}

/** Returns a path from 0 at the bottom to `top` at the top, with gaps where values are missing. */
function line(values, top) {
  const dx = (WIDTH - 2) / Math.max(1, values.length - 1), parts = [];
  values.forEach((value, i) => {
    if (!Number.isFinite(value)) return;
    const x = 1 + i * dx, y = HEIGHT - 2 - Math.min(1, value / top) * (HEIGHT - 4);
    const isStart = !Number.isFinite(values[i - 1]), isAlone = isStart && !Number.isFinite(values[i + 1]);
    parts.push(`${isStart ? "M" : "L"}${x.toFixed(1)},${y.toFixed(1)}${isAlone ? "h0.5" : ""}`);
  });
  return parts.join("");
}
