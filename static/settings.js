// Settings of jobs by their dotted keys, as the list's columns and Compare show them.

/** `train.lr` and its value, of every setting. */
export function flat(spec, at = "") {
  return Object.entries(spec).flatMap(([key, v]) => (v && typeof v === "object" && !Array.isArray(v) ? flat(v, `${at}${key}.`) : [[at + key, v]]));
}

export const written = (v) => (v === undefined || v === null ? "–" : Array.isArray(v) ? v.join(", ") : String(v));

/** The value of one dotted key. */
export const setting = (spec, key) => key.split(".").reduce((at, part) => at?.[part], spec);
