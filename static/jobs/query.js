// Requests of the list: jobs by states, project, owner, tags, settings and time, and by a text in their names, tags or notes, in the order
// that the URL gives.

import { ask } from "../page.js";
import { fullKey, setting } from "../settings.js";
import { order } from "./sort.js";

const COMPARE = {
  "=": (a, b) => a === b, "!=": (a, b) => a !== b, "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b,
};

/** Parses `train.lr > 0.1` into key, sign and value; undefined if the text is not a condition. */
export function parseCondition(condition) {
  const found = /^\s*([^=!<>]+?)\s*(!=|<=|>=|==|=|<|>)\s*(.*?)\s*$/.exec(condition);
  return found && { key: found[1].replace(/^spec\./, ""), sign: found[2].replace("==", "="), value: found[3] };
}

/** Results by the names that conditions have for them. */
const RESULTS = { best: (job) => job.best?.value, speed: (job) => job.images_per_second, images_per_second: (job) => job.images_per_second };

/** Jobs that the server has filtered. Unlike jobs from the stream, they have only the requested metrics. */
const filteredByServer = new WeakSet();

/** Whether a job fulfils a condition on a setting, or if no setting has the name, on a result or on the newest value of a metric. */
function fulfils(job, condition) {
  const { key, sign, value } = parseCondition(condition) ?? {};
  // An invalid condition is left to the server, which refuses it.
  if (!sign) return true;
  const found = key === "project" ? job.project : setting(job.spec, key);
  let jobValue = typeof found === "object" && !Array.isArray(found) ? undefined : found;
  if (jobValue === undefined && key in RESULTS) jobValue = RESULTS[key](job);
  else if (jobValue === undefined && !fullKey(job.spec, key).includes(".")) {
    jobValue = job.last?.[key];
    // The key may name an absent setting or a metric that the response lacks. The server has decided.
    if (jobValue === undefined && filteredByServer.has(job)) return true;
  }
  // A boolean setting that the specification lacks is false.
  jobValue ??= /^(true|false)$/.test(value) ? false : null;
  if (jobValue === null) return sign === "!=";
  const number = value.endsWith("%") ? Number(value.slice(0, -1)) / 100 : Number(value);
  return typeof jobValue === "number" ? COMPARE[sign](jobValue, number) : COMPARE[sign](String(jobValue), value);
}

/** Returns the filter in the URL. */
export function filter() {
  const url = new URL(location.href).searchParams;
  const list = (key) => (url.get(key) ?? "").split(",").map((word) => word.trim()).filter(Boolean);
  return {
    states: list("state"), text: url.get("q") ?? url.get("name") ?? "", owner: url.get("owner") ?? "", tags: list("tag"), project: url.get("project") ?? "",
    conditions: list("where"), after: url.get("created_after") ?? "", before: url.get("created_before") ?? "",
  };
}

/** Whether a job matches the filter, apart from the search text. */
export function fits(job, { states, owner, tags, project, conditions, after, before }) {
  const at = Date.parse(job.created_at);
  return (!states.length || states.includes(job.state)) && (!owner || job.owner === owner) && (!project || job.project === project)
    && tags.every((tag) => job.tags.includes(tag)) && conditions.every((condition) => fulfils(job, condition))
    && !(at < Date.parse(after)) && !(at >= Date.parse(before));
}

/** Whether the text is in the job's name or in a tag. Only the server searches notes, because jobs from a stream have none. */
export function mentions(job, text) {
  const has = (value) => value.toLowerCase().includes(text.toLowerCase());
  return !text || has(job.name) || job.tags.some(has);
}

/** Returns the parameters of a filter, for the URL and for requests. */
export const parameters = ({ states, text, owner, tags, project, conditions, after, before }) => Object.entries({
  state: states.join(","), q: text, owner, project, tag: tags.join(","), where: conditions.join(","), created_after: after, created_before: before,
}).filter(([, v]) => v);

let requestedMetrics = "";
/** Sets the metrics to request for the visible columns, in addition to the metrics that every response contains. */
export const setMetrics = (names) => { requestedMetrics = names.join(","); };
export const metricsParameter = () => (requestedMetrics ? [["metrics", requestedMetrics]] : []);

/** Minimum pause between requests of the list while jobs change. */
export const MIN_PAUSE_MS = 3000;
/** Returns the pause after a request that began at this time: the pause grows with the response time of the server. */
export const pauseAfter = (began) => Math.min(30_000, Math.max(MIN_PAUSE_MS, 4 * (performance.now() - began)));

/** Reads one page of matching jobs, after `cursor` (`next_cursor` of the previous page). */
export async function readPage(filter, cursor, limit) {
  const query = new URLSearchParams([...parameters(filter), ["sort", order()], ["limit", limit], ...metricsParameter()]);
  if (cursor) query.set("cursor", cursor);
  const response = await ask(`/api/v1/jobs?${query}`);
  for (const job of response.jobs) filteredByServer.add(job);
  return response;
}
