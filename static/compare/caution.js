// What to know before validation accuracies are compared.

/** Returns a text that identifies the validation pictures of a job within the job's dataset. */
function division({ validation, validation_seed: seed, folds, fold }) {
  return folds ? `${folds} ${fold} ${seed}` : typeof validation === "number" ? `${validation} ${seed}` : validation;
}

/**
 * Returns sentences that say why the best validation accuracies of these jobs may not rank the jobs. Empty if there is no reason. The same
 * as `caution` in src/cli/compare.rs.
 */
export function caution(jobs) {
  const measured = jobs.filter((j) => j.best && j.last.val_pictures > 0).map((j) => ({ share: j.best.value, pictures: j.last.val_pictures, dataset: j.spec.data.dataset, division: division(j.spec.data) })).sort((a, b) => b.share - a.share);
  if (measured.length < 2) return "";
  const [first, second] = measured, sentences = [], hasSameDataset = (job) => job.dataset === first.dataset;
  if (measured.some((job) => job.pictures !== first.pictures || (hasSameDataset(job) && job.division !== first.division))) sentences.push("These accuracies were not all measured on the same validation pictures.");
  else if (!measured.every(hasSameDataset)) sentences.push("These accuracies were measured on validation pictures of different datasets.");
  const variance = ({ share, pictures }) => share * (1 - share) / pictures, difference = first.share - second.share, twoErrors = 2 * Math.sqrt(variance(first) + variance(second));
  if (difference < twoErrors) sentences.push(`The best two differ by ${(100 * difference).toFixed(1)} points, which is less than two standard errors of the difference (${(100 * twoErrors).toFixed(1)} points).`);
  return sentences.join(" ");
}
