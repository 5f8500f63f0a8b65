// Names of metrics, formats of their values, and the quantities by which metrics share an axis.

import { bytes, millis, percent, rate, value } from "../numbers.js";

const perSecond = (v) => `${bytes(v)}/s`;

/** Formats a number for a tick label, with at most six digits. */
export const formatTick = (v) => {
  const size = Math.abs(v);
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return Number(v.toPrecision(6)).toExponential().replace("e+", "e");
  return String(Number(v.toPrecision(6))).replace(/\B(?=(\d{3})+$)/g, size >= 1000 ? "," : "");
};
export const formatPercentTick = (v) => `${formatTick(Number((v * 100).toFixed(3)))} %`;

/** A metric with a value of each rank. Metrics of the same quantity (as in protocol/src/metric.rs) share an axis. */
const perRank = (label, format, quantity) => ({ label, format, quantity, isPerRank: true });
/** A metric with one value for all ranks. */
const perJob = (label, format, quantity) => ({ label, format, quantity, isPerRank: false });

/** Metrics of a machine, which one of its ranks reports. */
export const MACHINE = {
  cpu_utilization: perRank("CPU utilisation", (v) => percent(v, 0), "utilisation"), memory_used_bytes: perRank("Memory in use", bytes, "bytes"),
  disk_used_bytes: perRank("Disk in use", bytes, "bytes"),
  disk_read_bytes_per_second: perRank("Read from disk", perSecond, "bytes/s"), disk_written_bytes_per_second: perRank("Written to disk", perSecond, "bytes/s"),
  network_received_bytes_per_second: perRank("Network received", perSecond, "bytes/s"), network_sent_bytes_per_second: perRank("Network sent", perSecond, "bytes/s"),
};
/** Metrics that the chart "Another metric" can show. */
export const SELECTABLE = {
  lr: perJob("Learning rate", value, "learning rate"), grad_norm: perJob("Gradient norm", value, "gradient norm"), val_loss: perJob("Validation loss", value, "loss"),
  val_ema_accuracy: perJob("Validation accuracy of averaged weights", percent, "accuracy"), val_ema_loss: perJob("Validation loss of averaged weights", value, "loss"),
  step_ms: perRank("Step time", millis, "time"), data_ms: perRank("Data wait", millis, "time"), all_reduce_ms: perRank("All-reduce wait", millis, "time"),
  loss_scale: perJob("Loss scale (float16)", value, "loss scale"), skipped_steps: perJob("Skipped steps (float16)", value, "steps"),
  gpu_utilization: perRank("GPU utilisation", (v) => percent(v > 1 ? v / 100 : v, 0), "utilisation"), gpu_memory_bytes: perRank("GPU memory", bytes, "bytes"),
  gpu_power_watts: perRank("GPU power", (v) => `${v.toFixed(0)} W`, "power"), gpu_temperature_celsius: perRank("GPU temperature", (v) => `${v.toFixed(0)} °C`, "temperature"),
  ...MACHINE,
};
/** All metrics that panels can show. */
export const ALL = {
  loss: perRank("Loss", value, "loss"), accuracy: perRank("Training accuracy", percent, "accuracy"), val_accuracy: perJob("Validation accuracy", percent, "accuracy"),
  images_per_second: perJob("Images/s", rate, "images/s"), ...SELECTABLE,
};
/** Returns label, format and quantity of a metric, or defaults for a metric that only a run from elsewhere has. */
export const metricInfo = (name) => (Object.hasOwn(ALL, name) ? ALL[name] : perJob(name, value, "value"));
export const quantity = (name) => metricInfo(name).quantity;
/** Returns the names of a job's metrics with a newest value. `val_pictures` is left out, because it is not a metric. */
export const knownMetrics = (job) => Object.keys(job.last).filter((name) => name !== "val_pictures" && job.last[name] !== null);
/** Whether a name is the name of a loss or an accuracy. The same as `is_result` in web/src/job.rs. */
export const isResult = (name) => /loss|acc/i.test(name);
/** Groups in the list of metrics, with the first metric of each group. */
export const GROUPS = [["Training", "lr"], ["Time of a step", "step_ms"], ["float16", "loss_scale"], ["GPU", "gpu_utilization"], ["Machine", "cpu_utilization"]];

const UNITS = {
  loss: "cross-entropy", accuracy: "%", "gradient norm": "L2", time: "ms", utilisation: "%", power: "W", temperature: "°C", "bytes/s": "bytes/s", bytes: "bytes",
};
const withUnit = (text, quantity) => (UNITS[quantity] && UNITS[quantity] !== text ? `${text} (${UNITS[quantity]})` : text);

/** Returns the title of a metric's axis: its name with its unit, such as `step time (ms)`. */
export function axisTitle(name) {
  const { label } = metricInfo(name), text = label === name || /^[A-Z]{2}/.test(label) ? label : label[0].toLowerCase() + label.slice(1);
  return withUnit(text, quantity(name));
}

/**
 * Returns the title of a chart's axes as one text, such as `loss (cross-entropy) · time (ms) (right)`. An axis of one metric has its name, an
 * axis of several metrics has the quantity.
 */
export function axesTitle(names) {
  const sides = [...new Set(names.map(quantity))];
  return sides.map((side, i) => {
    const members = names.filter((name) => quantity(name) === side);
    return `${members.length === 1 ? axisTitle(members[0]) : withUnit(side, side)}${i ? " (right)" : ""}`;
  }).join(" · ");
}

/** Returns the axis value of a typed 1: 0.01 for accuracies and utilisations, which are typed in percent, otherwise 1. */
export const unitOf = (name) => (["accuracy", "utilisation"].includes(quantity(name)) ? 0.01 : 1);

/** Returns the axis of a quantity, for one of its metrics. */
export function axisOf(name) {
  const { format, quantity } = metricInfo(name);
  const tick = quantity === "accuracy" ? formatPercentTick : [value, rate].includes(format) ? formatTick : format;
  return { format, tick, startsAtZero: !["loss", "accuracy", "value"].includes(quantity), limits: quantity === "accuracy" ? [0, 1] : undefined };
}
