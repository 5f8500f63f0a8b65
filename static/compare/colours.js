// The colour of a job, which the job keeps while other jobs come and go, and on the next visit. There are eight
// colours; the second job with the same colour has a dashed line, the third a dotted line.

export const COLOURS = 8;
const DASHES = ["", "dashed", "dotted"], LOOKS = COLOURS * DASHES.length, KEPT = "colours";
/** The number of jobs whose colour is remembered. */
const MOST = 200;

function stored() {
  try { const all = JSON.parse(localStorage.getItem(KEPT)); return Array.isArray(all) ? all.filter(([id, n]) => typeof id === "string" && Number.isInteger(n)) : []; } catch { return []; }
}

const known = new Map(stored());

/** Assigns looks to those of `ids` that have none, or that share one while another is free. */
export function assign(ids) {
  const taken = new Map();
  for (const id of ids) {
    const own = known.get(id), free = [...Array(LOOKS).keys()].filter((n) => !taken.has(n));
    const mine = own !== undefined && own < LOOKS && (!taken.has(own) || !free.length) ? own : free[0] ?? ids.indexOf(id) % LOOKS;
    taken.set(mine, id);
    // The newest are at the end of the map.
    known.delete(id);
    known.set(id, mine);
  }
  try { localStorage.setItem(KEPT, JSON.stringify([...known].slice(-MOST))); } catch { /* not kept */ }
}

/** The name of a job's colour in styles/charts.css. */
export const colour = (id) => `rank-${(known.get(id) ?? 0) % COLOURS}`;

/** The style of a job's line: `dashed`, `dotted`, or empty for solid. */
export const dash = (id) => DASHES[Math.floor((known.get(id) ?? 0) / COLOURS)];

/** The mark before a job's name. */
export const swatch = (id) => Object.assign(document.createElement("i"), { className: `swatch bg-${colour(id)} ${dash(id)}`.trim() });
