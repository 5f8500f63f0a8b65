// Warns about validation accuracies that cannot be compared.

import { percent } from "../numbers.js";
import { titleOf } from "./names.js";

/** Returns a text that identifies the validation pictures of a job in a dataset. */
function division({ validation, validation_seed: seed, folds, fold }) {
  return folds ? `${folds} ${fold} ${seed}` : typeof validation === "number" ? `${validation} ${seed}` : validation;
}

/**
 * Returns sentences that say why the best validation accuracies of these jobs may not rank the jobs. Empty if there is no reason. The same
 * as `caution` in src/cli/compare.rs.
 */
export function caution(jobs) {
  const isCertain = (j) => j.last.val_pictures > 0, validated = jobs.filter((j) => j.best), uncertain = validated.filter((j) => !isCertain(j)), sentences = [];
  if (uncertain.length) sentences.push(`The number of validation pictures of these jobs is unknown, so their differences to other jobs may be chance: ${uncertain.map((j) => titleOf(j, jobs)).join(", ")}.`);
  const measured = validated.filter(isCertain).map((j) => ({ name: titleOf(j, jobs), share: j.best.value, pictures: j.last.val_pictures, dataset: j.spec.data.dataset, division: division(j.spec.data) })).sort((a, b) => b.share - a.share);
  if (measured.length < 2) return sentences.join(" ");
  const [first, second] = measured;
  const differs = (key) => measured.some((job) => job[key] !== first[key]);
  if (differs("pictures")) return [...sentences, "These accuracies were not measured on the same validation pictures."].join(" ");
  if (differs("dataset") || differs("division")) sentences.push("These accuracies may not have been measured on the same validation pictures.");
  const variance = ({ share, pictures }) => share * (1 - share) / pictures, difference = first.share - second.share, twoErrors = 2 * Math.sqrt(variance(first) + variance(second));
  if (difference === 0) sentences.push(`The best accuracies of ${first.name} and ${second.name} are equal (${percent(first.share)}), so these results do not show which is better.`);
  else if (difference < twoErrors) sentences.push(`${first.name} (${percent(first.share)}) and ${second.name} (${percent(second.share)}) differ by ${(100 * difference).toFixed(1)} points, which is less than two standard errors of the difference (${(100 * twoErrors).toFixed(1)} points), so these results do not show which is better.`);
  return sentences.join(" ");
}
