// Titles of jobs for comparison: jobs with the same name are distinguished by settings that differ.

import { flat, written } from "../settings.js";

/** Maximum number of settings in a title, and maximum length of a value. */
const MAX_SETTINGS = 2, CHARS = 12;
let last = { key: "", titles: new Map() };

/** Returns settings by key, each with its value for every job. Names are left out. */
export function settings(jobs) {
  const specs = jobs.map((j) => new Map(flat(j.external ? { project: j.project, config: j.external.config } : j.spec))), keys = [...new Set(specs.flatMap((s) => [...s.keys()]))].filter((k) => k !== "name");
  return keys.map((key) => ({ key, values: specs.map((s) => s.get(key)) })).map((row) => ({ ...row, different: new Set(row.values.map(written)).size > 1 }));
}

/** Returns a title for each job's id: the name, with the settings that distinguish the job from jobs with the same name. */
function titles(jobs) {
  const key = jobs.map((job) => `${job.id} ${job.name}`).join("\n");
  if (last.key === key) return last.titles;
  const titles = new Map(), byName = Map.groupBy(jobs, (job) => job.name);
  for (const [name, alike] of byName) {
    const differing = alike.length > 1 ? settings(alike).filter((row) => row.different && !/^(tags|notes|project|priority|private)\b/.test(row.key)).slice(0, MAX_SETTINGS) : [];
    const words = alike.map((_, i) => differing.map(({ key, values }) => `${key.split(".").at(-1)} ${written(values[i]).slice(0, CHARS)}`).join(", "));
    // If the settings are equal, the random end of the id distinguishes the jobs.
    alike.forEach((job, i) => titles.set(job.id, alike.length < 2 ? name : `${name} · ${words.filter((w) => w === words[i]).length > 1 || !words[i] ? [words[i], job.id.slice(-5)].filter(Boolean).join(", ") : words[i]}`));
  }
  last = { key, titles };
  return titles;
}

export const titleOf = (job, jobs) => titles(jobs).get(job.id) ?? job.name;
