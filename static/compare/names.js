// Titles of jobs for comparison: jobs with the same name are distinguished by settings that differ.

import { flatten, formatSetting } from "../settings.js";

/** Maximum number of settings in a title. */
const MAX_SETTINGS = 2;
/** Maximum length of a value in a title, in characters. */
const MAX_CHARS = 12;
let cache = { key: "", titles: new Map() };

/** Returns the settings of a job: the specification, or for a run from elsewhere `config`, and the project. */
export const specOf = ({ external, project, spec }) => ({ ...(external ? { config: external.config } : spec), project });

/** Like `specOf`, with the results of a run from elsewhere. Alerts, and W&B's own entries, which begin with `_`, are left out. */
export const withSummary = (job) => ({ ...specOf(job), ...(job.external && { summary: Object.fromEntries(Object.entries(job.external.summary).filter(([name]) => name !== "alerts" && !name.startsWith("_"))) }) });

/**
 * Returns settings by key, each with its value for every job. `name` is left out. A run from elsewhere, which has none of the settings of a
 * job file, does not make these settings different. A run's `config.lr` counts as `train.lr` if no other setting of these jobs is called
 * `lr`. `tableOf(job)`: `specOf` or `withSummary`.
 */
export function settings(jobs, tableOf = specOf) {
  const trained = new Set(jobs.filter((j) => !j.external).flatMap((j) => flatten(tableOf(j)).map(([key]) => key)));
  const settingOfRun = (key) => {
    const called = [...trained].filter((k) => k.includes(".") && `config.${k.split(".").at(-1)}` === key);
    return called.length === 1 ? called[0] : key;
  };
  const specs = jobs.map((j) => new Map(flatten(tableOf(j)).map(([key, v]) => [j.external ? settingOfRun(key) : key, v]))), keys = [...new Set(specs.flatMap((s) => [...s.keys()]))].filter((k) => k !== "name");
  return keys.map((key) => {
    const values = specs.map((s) => s.get(key)), isOfRuns = specs.some((s, i) => jobs[i].external && s.has(key)), compared = isOfRuns ? values : values.filter((_, i) => !jobs[i].external);
    return { key, values, different: new Set(compared.map(formatSetting)).size > 1 };
  });
}

/** Returns a title for each job's id: the name, with the settings that distinguish the job from jobs with the same name. */
function titles(jobs) {
  const key = jobs.map((job) => `${job.id} ${job.name}`).join("\n");
  if (cache.key === key) return cache.titles;
  const titles = new Map(), byName = Map.groupBy(jobs, (job) => job.name);
  for (const [name, namesakes] of byName) {
    const differing = namesakes.length > 1 ? settings(namesakes).filter((row) => row.different && !/^(tags|notes|project|priority|private)\b/.test(row.key)).slice(0, MAX_SETTINGS) : [];
    const labels = namesakes.map((_, i) => differing.map(({ key, values }) => `${key.split(".").at(-1)} ${formatSetting(values[i]).slice(0, MAX_CHARS)}`).join(", "));
    const isUnique = (label) => label && labels.filter((other) => other === label).length === 1;
    // If the settings are equal, the random end of the id distinguishes the jobs.
    const distinction = (job, label) => (isUnique(label) ? label : [label, job.id.slice(-5)].filter(Boolean).join(", "));
    namesakes.forEach((job, i) => titles.set(job.id, namesakes.length < 2 ? name : `${name} · ${distinction(job, labels[i])}`));
  }
  cache = { key, titles };
  return titles;
}

export const titleOf = (job, jobs) => titles(jobs).get(job.id) ?? job.name;
