// What the list asks the server for: jobs of several states, by name, tag or note.

import { ask } from "../page.js";

/** Jobs that are read one by one because of their tags or notes, at most. */
const ONE_BY_ONE = 200;

/** Whether a job belongs into the list: `text` may be in its name, tags or note. */
export function matches(job, { states, text, owner, tag }, note = {}) {
  const has = (words) => words.toLowerCase().includes(text.toLowerCase()), { tags = [], note: said = "" } = note;
  return (!states.length || states.includes(job.state)) && (!owner || job.owner === owner) && (!tag || tags.includes(tag)) && (!text || has(job.name) || tags.some(has) || has(said));
}

/** Jobs that only their tags or notes bring into the list. */
async function annotated(filter, notes, known) {
  const { text, tag } = filter, has = (words) => words.toLowerCase().includes(text.toLowerCase());
  const found = ([, { tags, note }]) => (!tag || tags.includes(tag)) && (!text || tag || tags.some(has) || has(note));
  const ids = Object.entries(notes).filter(found).map(([id]) => id).filter((id) => !known.has(id)).sort().reverse().slice(0, ONE_BY_ONE);
  const jobs = await Promise.all(ids.map((id) => ask(`/api/v1/jobs/${id}`).catch(() => null)));
  return jobs.filter((job) => job && matches(job, filter, notes[job.id]));
}

/**
 * One part of what matches, after `cursor` (what the part before gave as `next`). The server knows one state a question, so
 * several states are as many questions; each continues where its own part ended.
 */
export async function part(filter, cursor, limit, notes) {
  const { states, text, owner, tag } = filter;
  if (tag) return { jobs: await annotated(filter, await notes(), new Set()), next: null };
  const wanted = cursor ?? Object.fromEntries((states.length ? states : [""]).map((state) => [state, ""]));
  const parts = await Promise.all(Object.entries(wanted).map(async ([state, after]) => {
    const given = Object.entries({ state, name: text, owner, cursor: after, limit }).filter(([, v]) => v);
    return [state, await ask(`/api/v1/jobs?${new URLSearchParams(given)}`)];
  }));
  const jobs = parts.flatMap(([, answer]) => answer.jobs);
  const next = Object.fromEntries(parts.filter(([, answer]) => answer.next).map(([state, answer]) => [state, answer.next]));
  if (text && !cursor) jobs.push(...await annotated(filter, await notes(), new Set(jobs.map((job) => job.id))));
  jobs.sort((a, b) => (a.created_at < b.created_at ? 1 : -1));
  return { jobs, next: Object.keys(next).length ? next : null };
}
