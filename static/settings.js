// Settings of jobs by their full keys, for the list's columns and for Compare.

/** Returns every setting with its value, by keys such as `train.lr`. */
export function flatten(spec, prefix = "") {
  return Object.entries(spec).flatMap(([key, v]) => (v && typeof v === "object" && !Array.isArray(v) ? flatten(v, `${prefix}${key}.`) : [[prefix + key, v]]));
}

/** Formats a value of a setting. */
export const formatSetting = (v) => (v === undefined || v === null ? "–" : Array.isArray(v) ? v.join(", ") : String(v));

/** Returns the key with its table for a key without: `train.lr` for `lr`, if only one table has the key. */
export function fullKey(spec, key) {
  if (key.includes(".") || key in spec) return key;
  const tables = Object.keys(spec).filter((table) => spec[table] && typeof spec[table] === "object" && !Array.isArray(spec[table]) && key in spec[table]);
  return tables.length === 1 ? `${tables[0]}.${key}` : key;
}

/** Returns the value of a key, with or without its table; undefined if the specification lacks the key. */
export const setting = (spec, key) => fullKey(spec, key).split(".").reduce((table, name) => table?.[name], spec);
