// Settings of jobs by dotted keys, for the list's columns and for Compare.

/** Returns every setting with its value, by keys such as `train.lr`. */
export function flat(spec, at = "") {
  return Object.entries(spec).flatMap(([key, v]) => (v && typeof v === "object" && !Array.isArray(v) ? flat(v, `${at}${key}.`) : [[at + key, v]]));
}

/** Formats a value of a setting. */
export const formatted = (v) => (v === undefined || v === null ? "–" : Array.isArray(v) ? v.join(", ") : String(v));

/** Returns the whole key for a key without its table: `train.lr` for `lr`, if only one table has the key. */
export function dotted(spec, key) {
  if (key.includes(".") || key in spec) return key;
  const tables = Object.keys(spec).filter((table) => spec[table] && typeof spec[table] === "object" && !Array.isArray(spec[table]) && key in spec[table]);
  return tables.length === 1 ? `${tables[0]}.${key}` : key;
}

/** Returns the value of a key. */
export const setting = (spec, key) => dotted(spec, key).split(".").reduce((at, part) => at?.[part], spec);
