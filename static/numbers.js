// Formats numbers for people, as web/src/numbers.rs does.

export const twoDigits = (n) => String(n).padStart(2, "0");

export const count = (n) => String(Math.round(n)).replace(/\B(?=(\d{3})+$)/g, ",");

/** With fewer pictures than this, an accuracy is shown with its standard error. The same as in protocol/src/numbers.rs. */
const FEW_PICTURES = 10_000;

export const percent = (share, digits = 1) => `${(share * 100).toFixed(digits)} %`;

/**
 * Formats the standard error of an accuracy in percent: ` ± 2.6`. Empty for `FEW_PICTURES` or more. If all or no pictures are classified
 * correctly, an end of the confidence interval. The same as `standard_error` in protocol/src/numbers.rs.
 */
function standardError(share, pictures) {
  if (!(pictures > 0 && pictures < FEW_PICTURES)) return "";
  const end = pictures / (pictures + 1.96 ** 2);
  if (share <= 0) return ` (at most ${percent(1 - end)})`;
  return share >= 1 ? ` (at least ${percent(end)})` : ` ± ${(100 * Math.sqrt(share * (1 - share) / pictures)).toFixed(1)}`;
}

/** Formats an accuracy, its standard error, and its number of pictures: `84.00 % ± 2.6 of 200`. */
export const accuracyOf = (share, pictures, digits = 1) => `${percent(share, digits)}${standardError(share, pictures)} of ${count(pictures)}`;

/**
 * Formats the standard error of an accuracy and its number of pictures: ` ± 2.6 of 200`. Empty for `FEW_PICTURES` or more. The same as
 * `uncertainty` in protocol/src/numbers.rs.
 */
export const uncertainty = (share, pictures) => (pictures > 0 && pictures < FEW_PICTURES ? `${standardError(share, pictures)} of ${pictures}` : "");

/** Formats the number with which a job's `trained_validation` begins, to follow an accuracy: `, 101 trained on`. */
export const trainedMark = (sentence) => (sentence ? `, ${sentence.split(" ", 1)[0]} trained on` : "");

/** Formats a loss or a learning rate. */
export function value(v) {
  if (!Number.isFinite(v)) return "not finite";
  const size = Math.abs(v);
  if (size >= 1e5 || (size > 0 && size < 1e-3)) return v.toExponential(2).replace("e+", "e");
  return v.toFixed(size >= 100 ? 1 : 4);
}

export const rate = (v) => (v >= 99.95 ? count(v) : Math.max(0, v).toFixed(1));

export function bytes(n) {
  if (n < 1000) return `${Math.round(n)} B`;
  const units = ["kB", "MB", "GB", "TB", "PB"];
  let size = n / 1000, unit = 0;
  while (size >= 999.5 && unit + 1 < units.length) { size /= 1000; unit++; }
  return `${size.toFixed(size < 9.95 ? 1 : 0)} ${units[unit]}`;
}

export function clock(secs) {
  const s = Math.max(0, Math.round(secs));
  if (s >= 48 * 3600) return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
  if (s >= 3600) return `${Math.floor(s / 3600)}:${twoDigits(Math.floor((s % 3600) / 60))}:${twoDigits(s % 60)}`;
  return `${Math.floor(s / 60)}:${twoDigits(s % 60)}`;
}

export function age(then, now) {
  const s = Math.floor((now - then) / 1000);
  if (s < 5) return "just now";
  if (s < 60) return `${s} s ago`;
  if (s < 3600) return `${Math.floor(s / 60)} min ago`;
  if (s < 172800) return `${Math.floor(s / 3600)} h ago`;
  return `${Math.floor(s / 86400)} d ago`;
}

/** The same as `nouns` in protocol/src/numbers.rs. */
export const nouns = (n, noun) => (n === 1 ? noun : /(s|x|ch|sh)$/.test(noun) ? `${noun}es` : `${noun}s`);

export const plural = (n, noun) => `${count(n)} ${nouns(n, noun)}`;

/** Formats a duration like `lockstep init`: `30 s`, `12 min`, `1.5 h`. */
export const duration = (secs) => (secs < 100 ? `${Math.max(1, Math.round(secs))} s` : secs < 7200 ? `${Math.round(secs / 60)} min` : `${(secs / 3600).toFixed(1)} h`);

/** Formats a duration: `24.9 ms`, `1.52 s`. */
export const millis = (ms) => (ms >= 1000 ? `${(ms / 1000).toFixed(2)} s` : `${ms.toFixed(ms < 100 ? 1 : 0)} ms`);

/** Formats a time: `14:03`, or with `length` 8 `14:03:41`. Begins with the date if the time is on another day than `now`. */
export function timeAndDay(at, length = 5, now = Date.now()) {
  const day = new Date(at);
  return `${day.toDateString() === new Date(now).toDateString() ? "" : `${day.toLocaleDateString()} `}${timeOfDay(day).slice(0, length)}`;
}

/** Formats a time of day in the reader's time zone: `14:03:41.208`. */
export function timeOfDay(at) {
  const d = new Date(at);
  return `${twoDigits(d.getHours())}:${twoDigits(d.getMinutes())}:${twoDigits(d.getSeconds())}.${String(d.getMilliseconds()).padStart(3, "0")}`;
}
