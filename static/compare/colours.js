// The look of a job: a colour and a style of line. The look stays the same while other jobs are added and removed, and on the next visit. There
// are eight colours. The second job with the same colour has a dashed line, the third a dotted line.

import { make, parseList, store, readStored } from "../page.js";

export const COLOURS = 8;
const DASHES = ["", "dashed", "dotted"], LOOKS = COLOURS * DASHES.length, STORAGE_KEY = "colours";
/** Maximum number of jobs whose looks are stored. */
const MAX_STORED = 200;

/** The number of each job's look, by id. */
const looks = new Map(parseList(readStored(STORAGE_KEY)).filter((entry) => typeof entry?.[0] === "string" && Number.isInteger(entry[1])));

/** Assigns a look to each job without a look, and to each job whose look another of these jobs has while a look is free. */
export function assignLooks(ids) {
  const taken = new Map();
  for (const id of ids) {
    const own = looks.get(id), free = [...Array(LOOKS).keys()].filter((n) => !taken.has(n));
    const look = own !== undefined && own < LOOKS && (!taken.has(own) || !free.length) ? own : free[0] ?? ids.indexOf(id) % LOOKS;
    taken.set(look, id);
    // Moves the job to the end of the map, where the newest jobs are.
    looks.delete(id);
    looks.set(id, look);
  }
  // Without storage, looks last as long as the page.
  store(STORAGE_KEY, JSON.stringify([...looks].slice(-MAX_STORED)));
}

/** Returns the name of a job's colour in styles/charts.css. */
export const colour = (id) => `rank-${(looks.get(id) ?? 0) % COLOURS}`;

/** Returns the style of a job's line: `dashed`, `dotted`, or empty for solid. */
export const dash = (id) => DASHES[Math.floor((looks.get(id) ?? 0) / COLOURS)];

/** Returns the mark before a job's name. */
export const swatch = (id) => make("i", { className: `swatch bg-${colour(id)} ${dash(id)}`.trim() });
