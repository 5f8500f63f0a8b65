// Warns about validation accuracies that cannot be compared.

import { percent } from "../numbers.js";
import { titleOf } from "./names.js";

/** Returns a text that identifies the validation pictures of a job in a dataset. */
function splitKey({ validation, validation_seed: seed, folds, fold }) {
  return folds ? `${folds} ${fold} ${seed}` : typeof validation === "number" ? `${validation} ${seed}` : validation;
}

/**
 * Returns sentences with the reasons why the best validation accuracies do not show which of these jobs is better. Empty if there is no
 * reason. The same as `caution` in src/cli/compare.rs.
 */
export function caution(jobs) {
  const hasPictureCount = (j) => j.last.val_pictures > 0, validated = jobs.filter((j) => j.best), uncounted = validated.filter((j) => !hasPictureCount(j)), sentences = [];
  if (uncounted.length) sentences.push(`The number of validation pictures of these jobs is unknown, so their differences to other jobs may be chance: ${uncounted.map((j) => titleOf(j, jobs)).join(", ")}.`);
  const measured = validated.filter(hasPictureCount).map((j) => ({ name: titleOf(j, jobs), accuracy: j.best.value, pictures: j.last.val_pictures, dataset: j.spec.data.dataset, split: splitKey(j.spec.data) })).sort((a, b) => b.accuracy - a.accuracy);
  if (measured.length < 2) return sentences.join(" ");
  const [first, second] = measured;
  const differs = (key) => measured.some((job) => job[key] !== first[key]);
  if (differs("pictures")) return [...sentences, "These accuracies were not measured on the same validation pictures."].join(" ");
  if (differs("dataset") || differs("split")) sentences.push("These accuracies may not have been measured on the same validation pictures.");
  const variance = ({ accuracy, pictures }) => accuracy * (1 - accuracy) / pictures, difference = first.accuracy - second.accuracy, twoErrors = 2 * Math.sqrt(variance(first) + variance(second));
  if (difference === 0) sentences.push(`The best accuracies of ${first.name} and ${second.name} are equal (${percent(first.accuracy)}), so these results do not show which is better.`);
  else if (difference < twoErrors) sentences.push(`${first.name} (${percent(first.accuracy)}) and ${second.name} (${percent(second.accuracy)}) differ by ${(100 * difference).toFixed(1)} points, which is less than two standard errors of the difference (${(100 * twoErrors).toFixed(1)} points), so these results do not show which is better.`);
  return sentences.join(" ");
}
