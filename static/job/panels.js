// Panels: configurable charts on a job's page. The server stores them with the job. A job without panels of its own shows the panels of its
// project.

import { ask, byId, confirmThen, make, setNote, setText } from "../page.js";
import { saveMenu } from "../chart/export.js";
import { fieldError, PanelForm } from "./panel-form.js";
import { showSize, addGrip, describeSize } from "./panel-size.js";
import { metricInfo, axesTitle, axisOf, knownMetrics, quantity } from "./names.js";

/** Maximum number of panels. */
const MAX_PANELS = Number(byId("custom").dataset.max);

/** Returns a metric's sort key among default panels: accuracies, losses, other metrics. In each group, validation metrics come first. */
const sortKey = (name) => (/acc/i.test(name) ? 0 : /loss/i.test(name) ? 2 : 4) + (/val|test/i.test(name) ? 0 : 1);

/** Returns the default panel of a metric, for runs without configured panels. Its chart is about as high as a job's chart of the loss. */
const defaultPanel = (name) => ({ title: name.slice(0, 80), metrics: [name], lines: "mean", columns: 1, rows: 2, smoothing: 0, log: false, robust: false });

export class Panels {
  /** The panels on the page: `{ panel, card, chart, key }`, in order. */
  #shown = [];
  #created = 0;
  #saving = Promise.resolve();
  /** Number of save requests. Only the panels of the newest request are shown. */
  #saves = 0;
  #drag = null;

  /** `initial`: the panels in the rendered page (`Panels` in web/src/job.rs). `mayChange`: whether the reader may change panels. */
  constructor(job, charts, metrics, initial, mayChange) {
    Object.assign(this, { job, charts, metrics, from: initial.from, mayChange });
    charts.panelMetrics = () => [...new Set(this.panels.flatMap((panel) => panel.metrics.map((name) => this.#sourceMetric(name))))];
    charts.panelPixels = (name) => Math.max(0, ...this.#shown.filter(({ panel }) => panel.metrics.some((metric) => this.#sourceMetric(metric) === name)).map(({ chart }) => chart.pixels));
    this.grid = byId("custom-grid");
    this.form = new PanelForm(charts);
    this.#show(this.#showsDefaults ? knownMetrics(job()).sort((a, b) => sortKey(a) - sortKey(b)).slice(0, MAX_PANELS).map(defaultPanel) : initial.panels);
    byId("panel-add").addEventListener("click", () => this.#edit(null));
    byId("panels-to-project").addEventListener("click", () => this.#saveForProject());
    byId("panels-from-project").addEventListener("click", () => this.#useProjectPanels());
  }

  /** Whether the page shows a panel for each metric of a run from elsewhere, because no panel is configured. */
  get #showsDefaults() { return this.from === "none" && Boolean(this.job().external); }

  /** Returns the metric from which a line is computed: speeds of jobs of this server are computed from step times. */
  #sourceMetric(name) { return name === "images_per_second" && !this.job().external ? "step_ms" : name; }

  /** Called when a metric has new points. The first points of a run's metric add its panel. */
  async handlePoints(name) {
    if (!this.#showsDefaults || this.panels.length >= MAX_PANELS || this.panels.some((panel) => panel.metrics.includes(name))) return;
    this.#show([...this.panels, defaultPanel(name)]);
    await this.metrics.ensureRead(name);
    this.charts.redraw();
  }

  get panels() { return this.#shown.map((entry) => entry.panel); }

  /** Shows panels. Unchanged panels keep their chart. */
  #show(panels) {
    const before = this.#shown;
    this.#shown = panels.map((panel) => {
      const same = before.findIndex((entry) => entry?.panel === panel);
      if (same < 0) return this.#createPanel(panel);
      const [entry] = before.splice(same, 1, null);
      return entry;
    });
    for (const entry of before) if (entry) this.#removePanel(entry);
    const children = [...this.grid.children];
    if (this.#shown.some(({ card }, i) => children[i] !== card)) this.grid.append(...this.#shown.map((entry) => entry.card));
    this.#shown.forEach(({ panel, card }, i) => {
      card.querySelector(".handle").setAttribute("aria-label", `Move ${panel.title}, panel ${i + 1} of ${this.#shown.length}. Arrow keys move it.`);
    });
    const isOwn = this.from === "job", hasPanels = this.#shown.length > 0;
    byId("panel-add").disabled = this.#shown.length >= MAX_PANELS;
    byId("panels-to-project").hidden = !isOwn || !hasPanels;
    byId("panels-from-project").hidden = !isOwn;
    if (!byId("custom-note").dataset.said) this.#showMessage("");
  }

  /** Shows a message next to the title. Without a message, says which panels the page shows. */
  #showMessage(message) {
    const standardNote = this.#shown.length ? (this.from === "project" ? `of the project ${this.job().project}` : "")
      : this.#showsDefaults ? "No metric yet: the run's program logs metrics by run.log in Python, or by POST /api/v1/runs/ID/records."
      : this.mayChange ? "None yet. A panel shows a chart of metrics that you choose." : "none";
    byId("custom-note").dataset.said = message;
    setText(byId("custom-note"), message || standardNote);
  }

  #createPanel(panel) {
    const card = byId("panel-card").content.firstElementChild.cloneNode(true), key = `panel-${++this.#created}`;
    const root = card.querySelector(".chart"), noteNode = card.querySelector(".note"), sides = [...new Set(panel.metrics.map(quantity))];
    card.setAttribute("aria-label", panel.title);
    setNote(card.querySelector("h3"), panel.title);
    root.dataset.chart = key;
    const axes = sides.map((side) => axisOf(panel.metrics.find((name) => quantity(name) === side)));
    const chart = this.charts.createChart(root, {
      label: panel.title, ...axes[0], rightAxis: axes[1] ?? null, yName: () => axesTitle(panel.metrics), layers: () => this.charts.panelLayers(panel),
      onNote: (note) => setNote(noteNode, note),
    });
    chart.smoothing = panel.smoothing;
    chart.scale = panel.log ? "log" : "linear";
    chart.robust = panel.robust;
    if (chart.rightAxis) chart.rightAxis.robust = panel.robust;
    chart.ends = [panel.y_min ?? null, panel.y_max ?? null];
    chart.marks = this.charts.all.loss.marks;
    this.charts.all[key] = chart;
    this.#drawLegend(card.querySelector(".chart-legend"), panel, sides);
    const tools = card.querySelector(".tools"), handle = card.querySelector(".handle"), edit = card.querySelector(".edit");
    tools.append(saveMenu(chart, () => `${this.job().name}-${panel.title}`, () => `${this.job().name} · ${panel.title}`));
    edit.setAttribute("aria-label", `Edit ${panel.title}`);
    const entry = { panel, card, chart, key }, grip = addGrip(card, panel, (before) => this.#storeSize(entry, before));
    handle.hidden = edit.hidden = grip.hidden = !this.mayChange;
    handle.title = "Drag it, or press an arrow key";
    edit.addEventListener("click", () => this.#edit(entry));
    handle.addEventListener("keydown", (event) => this.#moveByKey(event, entry));
    this.#makeDraggable(handle, entry);
    return entry;
  }

  #removePanel({ card, chart, key }) {
    chart.remove();
    delete this.charts.all[key];
    card.remove();
  }

  #drawLegend(list, panel, sides) {
    list.hidden = panel.metrics.length < 2;
    list.replaceChildren(...panel.metrics.map((name, i) => make("li", {}, make("i", { className: `swatch bg-rank-${i}` }), metricInfo(name).label + (quantity(name) === sides[1] ? " (right)" : ""))));
  }

  // --- changes -----------------------------------------------------------------------------------

  /** Opens the form for a panel, or for a new panel. */
  #edit(entry) {
    /** Stores `panel` in place of the edited panel, or removes the edited panel for null. Returns the element to focus. */
    const store = async (panel) => {
      const list = this.panels;
      if (!entry) list.push(panel);
      else if (panel) list.splice(list.indexOf(entry.panel), 1, panel);
      else list.splice(list.indexOf(entry.panel), 1);
      await this.#save(list);
      if (panel) await Promise.all(panel.metrics.map((name) => this.metrics.ensureRead(this.#sourceMetric(name)))).catch(() => {});
      this.charts.readZoomedPart();
      this.charts.redraw();
      return this.#shown.find((e) => e.panel === panel)?.card.querySelector(".edit") ?? byId("panel-add");
    };
    this.form.open(entry?.panel ?? null, store);
  }

  /** Stores panels as the job's own, after earlier requests, and shows them as stored. */
  #save(list) {
    const save = ++this.#saves;
    return (this.#saving = this.#saving.catch(() => {}).then(async () => {
      await ask(`/api/v1/jobs/${this.job().id}/panels`, { method: "PUT", body: { panels: list } });
      this.from = "job";
      this.#showMessage("");
      // The reader may have moved panels again in the meantime.
      if (save === this.#saves) this.#show(list);
    }));
  }

  /** Shows panels in another order at once, and stores the order. Restores the earlier order if the server refuses the new one. */
  async #reorder(list, entry) {
    const before = this.panels;
    this.#show(list);
    entry.card.querySelector(".handle").focus();
    const position = list.indexOf(entry.panel) + 1;
    try {
      await this.#save(list);
      this.#showMessage(`${entry.panel.title} is panel ${position} of ${list.length}.`);
    } catch (error) {
      this.#show(before);
      this.#showMessage(fieldError(error));
    }
  }

  /** Stores a panel's new size. Restores the old size if the server refuses it. */
  async #storeSize({ panel, card }, before) {
    try {
      await this.#save(this.panels);
      this.#showMessage(`Panel ${panel.title}: ${describeSize(panel)}.`);
      // Wider charts show more points.
      await this.charts.readZoomedPart();
    } catch (error) {
      Object.assign(panel, before);
      showSize(card, panel);
      this.#showMessage(fieldError(error));
    }
  }

  #moveByKey(event, entry) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const list = this.panels, at = list.indexOf(entry.panel), last = list.length - 1;
    const to = { ArrowLeft: at - 1, ArrowUp: at - 1, ArrowRight: at + 1, ArrowDown: at + 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    if (to === at || to < 0 || to > last) return;
    list.splice(at, 1);
    list.splice(to, 0, entry.panel);
    this.#reorder(list, entry);
  }

  /** Makes a panel draggable. It is dropped before the panel under the pointer, or after that panel if the pointer is in the right half. */
  #makeDraggable(handle, entry) {
    const findTarget = (event) => {
      const card = document.elementFromPoint(event.clientX, event.clientY)?.closest(".panel"), over = this.#shown.find((e) => e.card === card);
      if (!over || over === entry) return null;
      const box = card.getBoundingClientRect();
      return { over, after: event.clientX > box.left + box.width / 2 };
    };
    const markTarget = (target) => {
      for (const { card } of this.#shown) delete card.dataset.drop;
      if (target) target.over.card.dataset.drop = target.after ? "after" : "before";
    };
    handle.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      handle.setPointerCapture(event.pointerId);
      this.#drag = { entry, target: null };
      entry.card.classList.add("dragged");
    });
    handle.addEventListener("pointermove", (event) => { if (this.#drag?.entry === entry) markTarget(this.#drag.target = findTarget(event)); });
    const end = (event) => {
      const drag = this.#drag;
      this.#drag = null;
      entry.card.classList.remove("dragged");
      markTarget(null);
      if (!drag?.target || event.type === "pointercancel") return;
      const list = this.panels.filter((panel) => panel !== entry.panel);
      list.splice(list.indexOf(drag.target.over.panel) + (drag.target.after ? 1 : 0), 0, entry.panel);
      if (list.some((panel, i) => panel !== this.panels[i])) this.#reorder(list, entry);
    };
    handle.addEventListener("pointerup", end);
    handle.addEventListener("pointercancel", end);
  }

  async #saveForProject() {
    const { project } = this.job();
    try {
      await ask(`/api/v1/projects/${encodeURIComponent(project)}/panels`, { method: "PUT", body: { panels: this.panels } });
      this.#showMessage(`Jobs of ${project} without panels of their own now show these panels.`);
    } catch (error) { this.#showMessage(fieldError(error)); }
  }

  #useProjectPanels() {
    const { id, project } = this.job(), path = `/api/v1/jobs/${id}/panels`;
    const act = async () => {
      await ask(path, { method: "DELETE" });
      const { from, panels } = await ask(path);
      this.from = from;
      this.#showMessage("");
      this.#show(panels);
      await Promise.all(this.charts.panelMetrics().map((name) => this.metrics.ensureRead(name))).catch(() => {});
      this.charts.redraw();
    };
    confirmThen({ title: "Remove this job's own panels?", detail: `The job then shows the panels of the project ${project}.`, yes: "Remove them", act });
  }
}
