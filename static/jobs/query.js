// What the list asks the server for: jobs by states, project, owner, tags, and a text in their names, tags or notes.

import { ask } from "../page.js";

/** Jobs that are read one by one because of their tags or notes, at most. */
const ONE_BY_ONE = 200;

/** Whether a job belongs into the list: `text` may be in its name, tags or notes, which jobs in lists come without. */
export function matches(job, { states, text, owner, tags, project }, notes = "") {
  const has = (words) => words.toLowerCase().includes(text.toLowerCase());
  return (!states.length || states.includes(job.state)) && (!owner || job.owner === owner) && (!project || job.project === project)
    && tags.every((tag) => job.tags.includes(tag)) && (!text || has(job.name) || job.tags.some(has) || has(notes));
}

/** Jobs that only their tags or notes bring into the list. */
async function annotated(filter, annotations, known) {
  const { text } = filter, has = (words) => words.toLowerCase().includes(text.toLowerCase());
  const found = ([id, { tags, notes }]) => !known.has(id) && (tags.some(has) || has(notes));
  const ids = Object.entries(annotations).filter(found).map(([id]) => id).sort().reverse().slice(0, ONE_BY_ONE);
  const jobs = await Promise.all(ids.map((id) => ask(`/api/v1/jobs/${id}`).catch(() => null)));
  return jobs.filter((job) => job && matches(job, filter, annotations[job.id].notes));
}

/** One part of what matches, after `cursor` (what the part before gave as `next`). The server searches names alone. */
export async function part(filter, cursor, limit, annotations) {
  const { states, text, owner, tags, project } = filter;
  const given = Object.entries({ state: states.join(","), name: text, owner, tag: tags.join(","), project, cursor, limit }).filter(([, v]) => v);
  const { jobs, next_cursor: next } = await ask(`/api/v1/jobs?${new URLSearchParams(given)}`);
  if (text && !cursor) {
    jobs.push(...await annotated(filter, await annotations(), new Set(jobs.map((job) => job.id))));
    jobs.sort((a, b) => (a.created_at < b.created_at ? 1 : -1));
  }
  return { jobs, next };
}
