// The section `sweep` of the form for a new job: a line for each key that differs, and the sweep's own keys.

import { byId } from "../page.js";

const PARAMETER = ["values", "min", "max"], METHOD = "grid", METRIC = "val_accuracy";
/** Keys of a section that was written as text, for which the form has no field. */
let kept = {};

const literal = (words) => { try { return JSON.parse(words); } catch { return words; } };
const words = (value) => (typeof value === "string" ? value : JSON.stringify(value));
const number = (id) => { const given = byId(id).value.trim(); return given ? literal(given) : undefined; };

/** Parses the values of a key: `0.1, 0.05`, or a range: `0.001 to 0.1 log`. */
function parameter(given) {
  const range = /^(\S+)\s+to\s+(\S+)(\s+log)?$/.exec(given);
  if (range) return { min: literal(range[1]), max: literal(range[2]), ...(range[3] ? { distribution: "log" } : {}) };
  // Each value may be a list.
  const values = literal(`[${given}]`);
  return { values: Array.isArray(values) ? values : given.split(",").map((value) => value.trim()).filter(Boolean).map(literal) };
}

/** Returns `[key path, parameter]` for each parameter, also in nested tables. */
function flat(table, above = "") {
  return Object.entries(table).flatMap(([key, value]) => (PARAMETER.some((name) => name in value) ? [[above + key, value]] : flat(value, `${above}${key}.`)));
}

const line = ([key, { values, min, max, distribution }]) => `${key} = ${values ? values.map(words).join(", ") : `${min} to ${max}${distribution === "log" ? " log" : ""}`}`;

/** Returns the section that the form describes; null for a single job. */
export function section() {
  const lines = byId("sweep-parameters").value.split("\n").map((text) => text.trim()).filter(Boolean);
  if (!lines.length) return null;
  const parameters = Object.fromEntries(lines.map((text) => { const [key, ...rest] = text.split("="); return [key.trim(), parameter(rest.join("=").trim())]; }));
  const { metric, ...others } = kept, name = byId("sweep-metric").value;
  const found = { method: byId("sweep-method").value, ...(metric || name !== METRIC ? { metric: { ...metric, name } } : {}), max_trials: number("sweep-trials"), max_concurrent: number("sweep-concurrent"), ...others, parameters };
  return Object.fromEntries(Object.entries(found).filter(([, value]) => value !== undefined));
}

/** Returns the keys of which the sweep tries several values. */
export const sweptKeys = () => Object.keys(section()?.parameters ?? {});

/** Fills the form with a section that was written as text. */
export function showSection(written) {
  const { method, max_trials, max_concurrent, parameters, ...others } = written ?? {};
  kept = others;
  byId("sweep-parameters").value = flat(parameters ?? {}).map(line).join("\n");
  byId("sweep-method").value = method ?? METHOD;
  byId("sweep-metric").value = others.metric?.name ?? METRIC;
  byId("sweep-trials").value = max_trials ?? "";
  byId("sweep-concurrent").value = max_concurrent ?? "";
  byId("sweep-settings").open ||= Boolean(written);
}

/** Returns the section as TOML. `literal(value)`: formats a value. */
export function tomlSection({ parameters, ...keys }, literal) {
  const lines = (table, quote) => Object.entries(table).map(([key, value]) => `${quote}${key}${quote} = ${literal(value)}`).join("\n");
  return `[sweep]\n${lines(keys, "")}\n\n[sweep.parameters]\n${lines(parameters, '"')}`;
}
