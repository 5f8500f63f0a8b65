// What to know before validation accuracies are compared.

import { percent } from "../numbers.js";

/** Returns a text that identifies the validation pictures of a job within the job's dataset. */
function division({ validation, validation_seed: seed, folds, fold }) {
  return folds ? `${folds} ${fold} ${seed}` : typeof validation === "number" ? `${validation} ${seed}` : validation;
}

/**
 * Returns sentences that say why the best validation accuracies of these jobs may not rank the jobs. Empty if there is no reason. The same
 * as `caution` in src/cli/compare.rs.
 */
export function caution(jobs) {
  const [certain, uncertain] = [true, false].map((isKnown) => jobs.filter((j) => j.best && j.last.val_pictures > 0 === isKnown)), sentences = [];
  if (uncertain.length) sentences.push(`The number of validation pictures is unknown, so the accuracy may be chance: ${uncertain.map((j) => j.name).join(", ")}.`);
  const measured = certain.map((j) => ({ name: j.name, share: j.best.value, pictures: j.last.val_pictures, dataset: j.spec.data.dataset, division: division(j.spec.data) })).sort((a, b) => b.share - a.share);
  if (measured.length < 2) return sentences.join(" ");
  const [first, second] = measured, hasSameDataset = (job) => job.dataset === first.dataset;
  if (measured.some((job) => job.pictures !== first.pictures || (hasSameDataset(job) && job.division !== first.division))) sentences.push("These accuracies were not all measured on the same validation pictures.");
  else if (!measured.every(hasSameDataset)) sentences.push("These accuracies were measured on validation pictures of different datasets.");
  const variance = ({ share, pictures }) => share * (1 - share) / pictures, difference = first.share - second.share, twoErrors = 2 * Math.sqrt(variance(first) + variance(second));
  if (difference < twoErrors) sentences.push(`${first.name} (${percent(first.share)}) and ${second.name} (${percent(second.share)}) differ by ${(100 * difference).toFixed(1)} points, which is less than two standard errors of the difference (${(100 * twoErrors).toFixed(1)} points).`);
  return sentences.join(" ");
}
