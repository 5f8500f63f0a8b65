// Jobs selected by brushes on the axes of the parallel coordinates and of the scatter plot. Both drawings share the brush of a column. A
// job is selected if its values are in all brushes.

import { columns } from "./columns.js";

export class Selection extends EventTarget {
  /** The brush of each column, by key: `{ from, to }` for numbers, `{ texts }` for texts. */
  brushes = new Map();

  constructor(jobs) { super(); this.jobs = jobs; }

  /** Applies `changes`, a list of `[column, range]`: sets a column's brush to a range of positions from 0 to 1, or removes the brush for null. */
  set(changes) {
    for (const [column, range] of changes) {
      if (!range) { this.brushes.delete(column.key); continue; }
      const [from, to] = range, [low, high] = column.kinds ? [] : [column.from(from), column.from(to)].sort((a, b) => a - b);
      this.brushes.set(column.key, column.kinds ? { texts: column.kinds.filter((text) => column.at(text) >= from - 1e-9 && column.at(text) <= to + 1e-9) } : { from: low, to: high });
    }
    this.dispatchEvent(new Event("change"));
  }

  clear() { this.brushes.clear(); this.dispatchEvent(new Event("change")); }

  /** Returns the brushed range of a column, from 0 to 1; null without a brush. */
  range(column) {
    const brush = this.brushes.get(column.key);
    if (!brush) return null;
    if (!brush.texts) return [column.at(brush.from), column.at(brush.to)].map((v) => Math.min(1, Math.max(0, v))).sort((a, b) => a - b);
    const places = brush.texts.map(column.at).filter((v) => v >= 0);
    return places.length ? [Math.min(...places), Math.max(...places)] : [0, 0];
  }

  get hasBrushes() { return this.brushes.size > 0; }

  /** Returns the ids of the selected jobs: all jobs if there is no brush. */
  ids() {
    const jobs = this.jobs(), selected = new Set(jobs.map((j) => j.id));
    if (!this.hasBrushes) return selected;
    for (const { key, values } of columns(jobs).all) {
      const brush = this.brushes.get(key);
      if (!brush) continue;
      // A brush ends where the pointer was released. A value that rounds to this end belongs to the brush.
      const slack = brush.texts ? 0 : Math.abs(brush.to - brush.from) * 1e-9 + Number.EPSILON * Math.abs(brush.to);
      jobs.forEach((job, i) => {
        const v = values[i], isInside = brush.texts ? brush.texts.includes(v) : v >= brush.from - slack && v <= brush.to + slack;
        if (!isInside) selected.delete(job.id);
      });
    }
    return selected;
  }
}
