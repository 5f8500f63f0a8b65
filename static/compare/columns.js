// Columns that distinguish jobs: settings that are a number or a text, and results. Each value is a number or a text, with a position between the
// column's minimum and maximum.

import { shortenMiddle } from "../cut.js";
import { clock, count, percent, rate, value } from "../numbers.js";
import { serverNow } from "../page.js";
import { formatSetting } from "../settings.js";
import { settings } from "./names.js";

/** Shortens a name or a text to the width of an axis. */
export const shorten = (text) => shortenMiddle(text, 15);
const plain = (v) => String(Number(v.toPrecision(6)));
/** Returns the training time in seconds, without pauses and waiting. NaN if unknown, as in a running attempt after the first. */
const trainingSecs = (j) => j.ran_secs ?? (j.attempt === 1 && j.started_at ? (serverNow() - Date.parse(j.started_at)) / 1000 : NaN);
/** `key`: the result's key in the URL. `get(job)`: the result's value. `about`: the tooltip of the name. */
const result = (key, name, get, format, about) => ({ key, name, get, format, about });
/** Results of a job. */
export const RESULTS = [
  result("loss", "loss", (j) => j.last.loss, value), result("val_loss", "val. loss", (j) => j.last.val_loss, value), result("accuracy", "accuracy of the last batch", (j) => j.last.accuracy, percent, "Of the training pictures of the last step, while the network trained"),
  result("val_accuracy", "val. accuracy", (j) => j.last.val_accuracy, percent), result("best", "best accuracy", (j) => j.best?.value, percent),
  result("images_per_second", "images/s", (j) => j.images_per_second, rate), result("step", "steps", (j) => j.step, count), result("time", "ran for", trainingSecs, clock),
];

/** Results for which low values are good. Low values are at the top of an axis. */
const LOW_IS_GOOD = ["loss", "val_loss", "time"];

/** Returns a column of numbers. `format(v)`: a value as text. `at(v)`: position from 0 (minimum, or maximum if `isLowGood`) to 1. `from`: the inverse of `at`. */
function numberColumn(key, name, values, format, isLowGood = false) {
  const finite = values.filter(Number.isFinite), low = Math.min(...finite), high = Math.max(...finite);
  // Uses a logarithmic scale for settings such as learning rates, which differ by powers of ten.
  const log = low > 0 && high / low > 20, scaled = (v) => (log ? Math.log(v) : v), span = scaled(high) - scaled(low);
  const flip = (share) => (isLowGood ? 1 - share : share);
  const at = (v) => (!Number.isFinite(v) ? NaN : span > 0 ? flip((scaled(v) - scaled(low)) / span) : 0.5);
  const from = (share) => { const v = scaled(low) + flip(share) * span; return log ? Math.exp(v) : v; };
  const [bottom, top] = isLowGood ? [high, low] : [low, high];
  return { key, name, values, log, low, high, isLowGood, at, from, ends: finite.length ? [format(bottom), format(top)] : ["", ""], format: (v) => (Number.isFinite(v) ? format(v) : "–") };
}

/** Returns a column of texts. `kinds`: the distinct texts, in sorted order. */
function textColumn(key, name, values) {
  const kinds = [...new Set(values)].sort(), at = (v) => (kinds.length < 2 ? 0.5 : kinds.indexOf(v) / (kinds.length - 1));
  return { key, name, values, kinds, at, ends: [kinds[0] ?? "", kinds.at(-1) ?? ""], format: (v) => v };
}

/** Whether a column distinguishes jobs: at least two have different values. */
export const varies = (column) => (column.kinds ? column.kinds.length > 1 : column.high > column.low);

/** Returns every column of these jobs: settings that differ, results, and other settings. A job that diverged has no results. */
export function columns(jobs) {
  const all = settings(jobs).map(({ key, values, different }) => {
    const column = values.every((v) => typeof v === "number" || v == null) ? numberColumn(key, key, values.map((v) => v ?? NaN), plain) : textColumn(key, key, values.map(formatSetting));
    return { ...column, different };
  });
  const results = RESULTS.map(({ key, name, get, format }) => ({ ...numberColumn(`result:${key}`, name, jobs.map((j) => (j.cause?.code === "diverged" ? NaN : get(j) ?? NaN)), format, LOW_IS_GOOD.includes(key)), result: true }));
  return { settings: all, results, all: [...all.filter((c) => c.different), ...results, ...all.filter((c) => !c.different)] };
}
