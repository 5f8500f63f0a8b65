// The form that edits a panel.

import { byId, make, Problem, errorText, setText } from "../page.js";
import { metricInfo, ALL, GROUPS, knownMetrics, unitOf } from "./names.js";

const field = (name) => byId(`panel-${name}`);

export class PanelForm {
  constructor(charts) {
    this.charts = charts;
    let group = null;
    const box = field("metrics");
    const job = charts.job();
    for (const name of job.external ? knownMetrics(job) : Object.keys(ALL)) {
      const { label } = metricInfo(name);
      const [title] = GROUPS.find(([, first]) => first === name) ?? (group ? [] : ["Results"]);
      if (title) box.append(group = make("fieldset", {}, make("legend", { textContent: title })));
      group.append(make("label", { className: "inline" }, make("input", { type: "checkbox", value: name }), label));
    }
    field("smoothing").addEventListener("input", () => this.#showSmoothing());
  }

  #showSmoothing() { setText(field("smoothing-value"), Number(field("smoothing").value) ? field("smoothing").value : "off"); }

  get #boxes() { return [...field("metrics").querySelectorAll("input")]; }

  /** Opens the form. `put(panel)` stores the panel, or removes the panel for null, and returns the element to focus. */
  open(panel, put) {
    const dialog = byId("panel-dialog"), values = panel ?? { title: "", metrics: [], lines: "mean", columns: 1, rows: 1, smoothing: 0, robust: false, log: false };
    setText(byId("panel-form-title"), panel ? `Edit ${panel.title}` : "Add a panel");
    setText(field("error"), "");
    field("remove").hidden = !panel;
    field("name").value = values.title;
    for (const box of this.#boxes) {
      box.checked = values.metrics.includes(box.value);
      box.closest("label").hidden = !box.checked && !this.charts.offers(box.value);
    }
    for (const group of field("metrics").querySelectorAll("fieldset")) group.hidden = ![...group.querySelectorAll("label")].some((line) => !line.hidden);
    field("lines").value = values.lines;
    field("scale").value = values.log ? "log" : "lin";
    // The server stores a 32-bit float.
    field("smoothing").value = String(Number(values.smoothing.toPrecision(6)));
    this.#showSmoothing();
    field("robust").checked = values.robust;
    for (const end of ["min", "max"]) field(end).value = values[`y_${end}`] === undefined ? "" : Number((values[`y_${end}`] / unitOf(values.metrics[0])).toPrecision(12));
    field("columns").value = String(values.columns);
    field("rows").value = String(values.rows);
    const store = (button, content) => async (event) => {
      event.preventDefault();
      button.disabled = true;
      try { const focused = await put(content()); dialog.close("yes"); focused.focus(); } catch (error) { setText(field("error"), fieldError(error)); }
      button.disabled = false;
    };
    field("save").onclick = store(field("save"), () => this.#read(values));
    field("remove").onclick = store(field("remove"), () => null);
    dialog.showModal();
    field("metrics").scrollTop = 0;
    field("name").focus();
  }

  #read(before) {
    const chosen = this.#boxes.filter((box) => box.checked).map((box) => box.value);
    // Metrics that were chosen before keep their order, and so their axis and colour.
    const metrics = [...before.metrics.filter((name) => chosen.includes(name)), ...chosen.filter((name) => !before.metrics.includes(name))];
    if (!metrics.length) throw new Problem(400, { detail: "Choose at least one metric." });
    const end = (name, label) => {
      const typed = field(name).value.trim().replace(",", ".");
      if (typed === "") return null;
      const v = Number(typed);
      if (!Number.isFinite(v)) throw new Problem(400, { detail: `${label}: ${typed} is not a number. Give a number, or leave the field empty to fit the axis to the points.` });
      return v * unitOf(metrics[0]);
    };
    const ends = { y_min: end("min", "From"), y_max: end("max", "To") };
    for (const key of Object.keys(ends)) if (ends[key] === null) delete ends[key];
    const title = field("name").value.trim() || metrics.map((name) => metricInfo(name).label).join(", ").slice(0, 80).trim();
    return {
      title, metrics, lines: field("lines").value, columns: Number(field("columns").value), rows: Number(field("rows").value),
      smoothing: Number(field("smoothing").value), robust: field("robust").checked, log: field("scale").value === "log", ...ends,
    };
  }
}

/** Returns the error's text, with the name of the panel's field. */
export function fieldError(error) {
  if (!(error instanceof Problem) || !error.errors.length) return errorText(error);
  return error.errors.map(({ pointer, detail }) => `${pointer.split("/").at(-1)} ${detail}`).join(". ");
}
