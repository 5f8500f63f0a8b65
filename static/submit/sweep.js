// The section `sweep` of the form for a new job: a line for each key that differs, and the sweep's own keys.

import { byId } from "../page.js";

/** Keys by which a parameter is recognised, and defaults of the fields. */
const PARAMETER_KEYS = ["values", "min", "max"], DEFAULT_METHOD = "grid", DEFAULT_METRIC = "val_accuracy";
/** Keys of a section that was written as text, for which the form has no field. */
let keysWithoutField = {};

const literal = (text) => { try { return JSON.parse(text); } catch { return text; } };
const textOf = (value) => (typeof value === "string" ? value : JSON.stringify(value));
const number = (id) => { const given = byId(id).value.trim(); return given ? literal(given) : undefined; };

/** Returns the key of a setting, which may be written as the label of its field: `Learning rate`. */
function keyOf(name) {
  const fields = [...document.querySelectorAll("#job-form [data-default]")];
  return fields.find((field) => field.labels[0].textContent.trim().toLowerCase() === name.toLowerCase())?.name ?? name;
}

/** Parses the values of a key: `0.1, 0.05`, or a range: `0.001 to 0.1 log`. */
function parameter(given) {
  const range = /^(\S+)\s+to\s+(\S+)(\s+log)?$/.exec(given);
  if (range) return { min: literal(range[1]), max: literal(range[2]), ...(range[3] ? { distribution: "log" } : {}) };
  // Each value may be a list.
  const values = literal(`[${given}]`);
  return { values: Array.isArray(values) ? values : given.split(",").map((value) => value.trim()).filter(Boolean).map(literal) };
}

/** Returns what is wrong with the first line that has no equals sign, or the key of an earlier line; undefined if there is no such line. */
export function lineMistake() {
  const lineOf = new Map();
  for (const [at, text] of byId("sweep-parameters").value.split("\n").entries()) {
    if (!text.trim()) continue;
    if (!text.includes("=")) return `line ${at + 1} has no "=": write Learning rate = 0.1, 0.05`;
    const key = keyOf(text.split("=", 1)[0].trim());
    if (lineOf.has(key)) return `line ${at + 1} has ${key} again: write all its values in line ${lineOf.get(key)}`;
    lineOf.set(key, at + 1);
  }
}

/** Returns `[key path, parameter]` for each parameter, also in nested tables. */
function listParameters(table, prefix = "") {
  return Object.entries(table).flatMap(([key, value]) => (PARAMETER_KEYS.some((name) => name in value) ? [[prefix + key, value]] : listParameters(value, `${prefix}${key}.`)));
}

const line = ([key, { values, min, max, distribution }]) => `${key} = ${values ? values.map(textOf).join(", ") : `${min} to ${max}${distribution === "log" ? " log" : ""}`}`;

/** Returns the section that the form describes; null for a single job. */
export function sweepSection() {
  const lines = byId("sweep-parameters").value.split("\n").map((text) => text.trim()).filter(Boolean);
  if (!lines.length) return null;
  const parameters = Object.fromEntries(lines.map((text) => { const [key, ...rest] = text.split("="); return [keyOf(key.trim()), parameter(rest.join("=").trim())]; }));
  const { metric, ...others } = keysWithoutField, name = byId("sweep-metric").value;
  // The metric's other keys, such as its goal, belong to the metric for which they were written.
  const metricKeys = name === (metric?.name ?? DEFAULT_METRIC) ? metric : {};
  const given = { method: byId("sweep-method").value, ...(metric || name !== DEFAULT_METRIC ? { metric: { ...metricKeys, name } } : {}), max_trials: number("sweep-trials"), max_concurrent: number("sweep-concurrent"), ...others, parameters };
  return Object.fromEntries(Object.entries(given).filter(([, value]) => value !== undefined));
}

/** Returns the keys of which the sweep tries several values. */
export const sweptKeys = () => Object.keys(sweepSection()?.parameters ?? {});

/** Fills the form with a section that was written as text. */
export function showSweep(written) {
  const { method, max_trials, max_concurrent, parameters, ...others } = written ?? {};
  keysWithoutField = others;
  byId("sweep-parameters").value = listParameters(parameters ?? {}).map(line).join("\n");
  byId("sweep-method").value = method ?? DEFAULT_METHOD;
  byId("sweep-metric").value = others.metric?.name ?? DEFAULT_METRIC;
  byId("sweep-trials").value = max_trials ?? "";
  byId("sweep-concurrent").value = max_concurrent ?? "";
  byId("sweep-settings").open ||= Boolean(written);
}
