// A row of the list. The script fills a row like the server (web/src/jobs.rs), and fills the row again when the job changes.

import { byId, make, serverNow, setText } from "../page.js";
import { writeShortened, writeSentence } from "../cut.js";
import { isFinal, stateWords, isWaiting } from "../job/states.js";
import { age, clock, percent, plural, rate, uncertainty, value } from "../numbers.js";

/** Maximum number of tags in a row. Further tags are only counted. */
const MAX_TAGS = 4;
/** Number of characters up to which a tag is never shortened. */
const SHORT_TAG_CHARS = 8;
/** Maximum length of a path in a reason, in characters. */
const MAX_PATH_CHARS = 24;

/** Returns an empty row for a job. */
export function createRow(job) {
  const row = byId("row").content.firstElementChild.cloneNode(true);
  row.dataset.id = job.id;
  row.dataset.created = job.created_at;
  return row;
}

export function fillRow(row, job) {
  const element = (name) => row.querySelector(`[data-f="${name}"]`);
  row.dataset.state = job.state;
  element("state").dataset.state = job.state;
  element("bar").dataset.state = job.state;
  setText(element("state"), stateWords(job));
  writeShortened(element("name"), job.name);
  element("name").href = `/jobs/${job.id}`;
  element("choose").setAttribute("aria-label", `Select ${job.name}`);
  writeAbout(element("about"), job.external ? "run from elsewhere" : `${job.spec.model.arch} · ${job.spec.data.dataset} · ${plural(job.ranks, "rank")}${job.spec.priority ? ` · priority ${job.spec.priority}` : ""}`, job.project === "default" ? "" : ` · ${job.project}`);
  // The layout cuts the end of the sentence. Long paths are shortened in the middle, so that the text after them stays visible.
  const reason = [isWaiting(job) && job.queue ? `place ${job.queue.place} in the queue` : "", job.reason].filter(Boolean).join(" · ");
  writeSentence(element("reason"), reason, MAX_PATH_CHARS);
  element("reason").title = reason;
  element("bar").max = job.total_steps || 1;
  element("bar").value = Math.min(job.step, job.total_steps);
  setText(element("progress"), progress(job));
  const points = sparkline(job.sparkline);
  if (element("spark").getAttribute("points") !== points) element("spark").setAttribute("points", points);
  setText(element("loss"), job.last.loss == null ? "" : value(job.last.loss));
  element("loss").parentNode.title = job.external && job.last.loss == null ? "This column shows the metric “loss”, which the run has not logged." : "";
  setText(element("best"), job.best ? percent(job.best.value) : "");
  const trained = job.trained_validation ?? "";
  setText(element("uncertainty"), job.best ? uncertainty(job.best.value, job.last.val_pictures) + (trained && " *") : "");
  element("uncertainty").title = trained;
  setText(element("speed"), job.images_per_second ? rate(job.images_per_second) : "");
  setText(element("age"), age(Date.parse(job.created_at), serverNow()));
  element("age").title = job.created_at;
  // These classes, as in web/templates/job-row.html, replace selectors with `:has()`, which would make every page slower to draw.
  row.classList.toggle("has-reason", element("reason").textContent !== "");
  row.classList.toggle("no-numbers", ["progress", "loss", "best", "speed"].every((name) => element(name).textContent === ""));
  row.classList.toggle("no-curve", points === "");
  const { tags } = job, box = element("tags"), key = tags.join("\n");
  if (box.dataset.key === key) return;
  box.dataset.key = key;
  // The job's page shows the other tags.
  const others = tags.slice(MAX_TAGS);
  box.replaceChildren(
    ...tags.slice(0, MAX_TAGS).map((tag) => make("a", { className: tag.length > SHORT_TAG_CHARS ? "tag" : "tag short", textContent: tag, title: tag, href: `/jobs?tag=${encodeURIComponent(tag)}` })),
    ...(others.length ? [make("span", { className: "tag", textContent: `+${others.length}`, title: others.join(", ") })] : []),
  );
}

/** Writes the description of a job, and its project. If space is short, the project is shortened first. */
function writeAbout(node, description, project) {
  if (node.dataset.whole === description + project) return;
  node.dataset.whole = node.title = description + project;
  node.classList.add("parts");
  const projectNode = make("span", { className: "of" });
  node.replaceChildren(make("span", { textContent: description }), projectNode);
  writeShortened(projectNode, project);
}

function progress(job) {
  if (isFinal(job.state)) {
    if (!job.started_at) return "never started";
    return job.ran_secs == null ? "" : `ran for ${clock(job.ran_secs)}`;
  }
  if (!job.total_steps) return "";
  const epoch = `epoch ${job.epoch} of ${Math.ceil(job.total_steps / (job.steps_per_epoch || 1))}`;
  return job.eta_secs != null && job.state === "running" ? `${epoch} · ${clock(job.eta_secs)} left` : epoch;
}

/** The same as `sparkline` in web/src/jobs.rs; 1.2e-7 is the epsilon of 32-bit numbers. */
export function sparkline(values) {
  const finite = values.filter(Number.isFinite);
  if (finite.length < 2) return "";
  const low = Math.min(...finite), high = Math.max(...finite), span = Math.max(high - low, 1.2e-7), dx = 118 / (values.length - 1);
  return values.map((v, i) => (Number.isFinite(v) ? `${(1 + i * dx).toFixed(1)},${(2 + (high - v) / span * 24).toFixed(1)}` : "")).filter(Boolean).join(" ");
}
