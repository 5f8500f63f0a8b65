//! The course of a job's accuracy: whether it improves while the job runs; after the end, whether it is low, why, and what to change.

use crate::{
    http::error::Result,
    metrics::{Metrics, chunk::Bucket, query},
    store::{MetricFilter, Store},
};
use lockstep_protocol::{
    Job, JobId, JobSpec, JobState,
    dataset::{DatasetInfo, held_out_share},
    numbers::{accuracy_of, confidence_interval, exact, percent, plural, value},
    reason::ReasonKind,
    spec::{Augment, ImageSize, KNOWN_WEIGHTS, LossSpec, Validation},
    suggestion::{USUAL_SIDE, usual_lr},
};
use std::collections::BTreeMap;

/// Maximum number of buckets that are read of each series of a metric.
const MAX_BUCKETS: usize = 1000;
/// Minimum validation accuracy of a job that needs no advice.
const GOOD_ACCURACY: f64 = 0.97;
/// Training accuracy from which more training does not improve a network.
const LEARNED_ACCURACY: f64 = 0.99;
/// Training and validation accuracies below this value are low.
const LOW_ACCURACY: f64 = 0.9;
/// Margin of error above which a validation accuracy is uncertain.
const MAX_MARGIN: f64 = 0.1;
/// Usual difference between training and validation accuracy.
const USUAL_GAP: f64 = 0.08;
/// With fewer validation pictures than this, a low validation accuracy is no sign of overfitting.
const MIN_PICTURES: u64 = 7;
/// Minimum rise of the accuracy that is not noise.
const MIN_RISE: f64 = 0.01;
/// A training loss has exploded if it is more than this many times as high as at the start.
const EXPLODED: f64 = 3.0;
/// Minimum loss at the start that counts: the loss of a guess among 10 classes. Trained weights may start near 0.
const MIN_START_LOSS: f64 = 2.3;
/// With fewer epochs, a network with a low training accuracy has hardly trained.
const MIN_EPOCHS: u64 = 3;
/// With fewer training pictures than this, trained weights are worthwhile.
const FEW_TRAINING_PICTURES: u64 = 5000;

/// Returns the diagnosis of a job that runs, has succeeded or has diverged. `None` for other jobs, for jobs with too few validations, and
/// for a succeeded job that needs no advice and has no training accuracy that can be compared. The diagnosis of a validated job begins with
/// [`Job::trained_validation`]. The page links to clones with the values that the text names, such as `train.lr = 0.01`.
pub(super) async fn find(metrics: &Metrics, store: &dyn Store, job: &Job) -> Result<Option<String>> {
    let has_diverged =
        job.cause.as_ref().is_some_and(|cause| matches!(cause.kind(), ReasonKind::Diverged { .. }));
    if job.state == JobState::Failed && has_diverged {
        return Ok(Some(format!("Start the job again with train.lr = {}.", lowered_lr(&job.spec))));
    }
    let is_running = job.state == JobState::Running;
    let has_course = is_running || job.state == JobState::Succeeded;
    if job.last.val_accuracy.is_none() || job.external.is_some() {
        return Ok(None);
    }
    let trained_validation = job.trained_validation.clone();
    if !has_course {
        return Ok(trained_validation);
    }
    // The loss at the start of this job; of a fork, not the loss at the start of its parent.
    let start_loss = job.sparkline.first().map_or(f64::INFINITY, |loss| f64::from(*loss));
    let has_exploded = |loss: &f64| *loss > EXPLODED * start_loss.max(MIN_START_LOSS);
    if is_running && let Some(loss) = job.last.loss.filter(has_exploded) {
        return Ok(Some(format!(
            "The training loss has exploded ({} at the start, {} now): the learning rate is too high. Cancel the job, and start it again \
             with train.lr = {}.",
            value(start_loss),
            value(loss),
            lowered_lr(&job.spec)
        )));
    }
    let series = read_series(metrics, job, "val_accuracy", 0).await?;
    let mut by_step = BTreeMap::new();
    for attempt in series {
        // An attempt repeats the steps after its checkpoint. Its validations replace those of earlier attempts at these steps.
        if let Some(first) = attempt.first() {
            by_step.split_off(&first.step);
        }
        by_step.extend(attempt.iter().filter_map(|bucket| Some((bucket.step, mean([bucket])?))));
    }
    let validations: Vec<f64> = by_step.into_values().collect();
    if is_running {
        let sentences: Vec<String> =
            trained_validation.into_iter().chain(progress(&validations, job.last.val_pictures)).collect();
        return Ok(Some(sentences.join(" ")).filter(|text| !text.is_empty()));
    }
    let (train, data) = (&job.spec.train, &job.spec.data);
    // With mixed pictures, or a loss other than the default, training and validation accuracy are not comparable.
    let is_comparable = train.mixup == 0.0 && train.cutmix == 0.0 && job.spec.loss == LossSpec::default();
    let is_augmented = data.random_resized_crop || data.augment != Augment::None || data.random_erasing > 0.0;
    let training = if is_comparable {
        let first_step = job.step.saturating_sub(job.steps_per_epoch) + 1;
        let series = read_series(metrics, job, "accuracy", first_step).await?;
        mean(series.iter().flatten().filter(|bucket| bucket.step >= first_step))
    } else {
        None
    };
    let highest_loss = job.sparkline.iter().copied().reduce(f32::max).map(f64::from);
    let exploded_loss = highest_loss.filter(has_exploded);
    let pictures = job.last.val_pictures;
    let spec = &job.spec;
    let training_pictures = job.steps_per_epoch * spec.global_batch_size();
    let is_from_scratch = spec.model.pretrained.is_none() && job.parent.is_none();
    let dataset = store.dataset(&spec.data.dataset).await?;
    let pictures_side = dataset.as_ref().map_or(0, |dataset| dataset.info.short_side());
    let counted = dataset.as_ref().map(|dataset| &dataset.info);
    let counted = counted.and_then(|info| Some((info, validation_counts(spec, info, pictures?)?)));
    let course = Course {
        spec,
        training,
        is_augmented,
        causes: causes(spec, is_from_scratch && training_pictures < FEW_TRAINING_PICTURES, pictures_side),
        epochs: job.step / job.steps_per_epoch.max(1),
        chance: dataset.as_ref().map_or(0.0, |dataset| 1.0 / dataset.info.classes.len().max(1) as f64),
        majority: counted.and_then(|(info, per_class)| majority(info, per_class)),
        validations,
        pictures,
        has_trained_validation: trained_validation.is_some(),
        exploded_loss,
    };
    let lacking = counted.and_then(|(info, _)| Some(info.classes_lacking_pictures(&spec.data)? + "."));
    let sentences: Vec<String> =
        trained_validation.into_iter().chain(lacking).chain(course.diagnosis()).collect();
    Ok(Some(sentences.join(" ")).filter(|text| !text.is_empty()))
}

/// Sets [`Job::trained_validation`].
pub(super) async fn mark_trained_validation(store: &dyn Store, jobs: &mut [Job]) -> Result<()> {
    let has_weights = |job: &&Job| job.spec.model.pretrained.is_some() || job.parent.is_some();
    let with_weights = jobs.iter().filter(|job| job.best.is_some()).filter(has_weights);
    let ids: Vec<JobId> = with_weights.map(|job| job.id.clone()).collect();
    let mut found = store.trained_validation(&ids).await?;
    jobs.iter_mut().for_each(|job| job.trained_validation = found.remove(&job.id));
    Ok(())
}

/// The numbers of validation pictures of the classes. `None` if they are not counted, or the dataset has changed since the job, which was
/// validated with this number of pictures.
fn validation_counts<'a>(spec: &JobSpec, info: &'a DatasetInfo, pictures: u64) -> Option<&'a [u64]> {
    let per_class: &[u64] = match &spec.data.validation {
        _ if spec.data.folds.is_some() => return None,
        Validation::Split(name) => &info.split(name)?.per_class,
        fraction => {
            info.count_held_out(fraction, spec.data.validation_seed)?;
            &info.held_out.as_ref()?.per_class
        }
    };
    (per_class.iter().sum::<u64>() == pictures).then_some(per_class)
}

/// The most frequent class of the validation pictures and its share of them.
fn majority<'a>(info: &'a DatasetInfo, per_class: &[u64]) -> Option<(&'a str, f64)> {
    let (class, count) = info.classes.iter().zip(per_class).max_by_key(|(_, count)| **count)?;
    Some((class.as_str(), *count as f64 / per_class.iter().sum::<u64>() as f64))
}

/// A tenth of a learning rate that was too high, or the usual rate if that is lower.
fn lowered_lr(spec: &JobSpec) -> f64 {
    let tenth = exact(spec.train.lr) / 10.0;
    round_lr(usual_lr(spec).map_or(tenth, |usual| usual.min(tenth)))
}

/// Twice a learning rate that may be too low; `None` if that exceeds twice the usual rate.
fn raised_lr(spec: &JobSpec) -> Option<f64> {
    let lr = exact(spec.train.lr);
    usual_lr(spec).filter(|usual| spec.train.lr <= *usual as f32).map(|_| round_lr(2.0 * lr))
}

/// Rounds to three significant digits.
fn round_lr(lr: f64) -> f64 {
    format!("{lr:.2e}").parse().unwrap_or(lr)
}

/// Reads the series of a metric from a step, in the order of attempts and ranks.
async fn read_series(metrics: &Metrics, job: &Job, name: &str, from: u64) -> Result<Vec<Vec<Bucket>>> {
    let filter = MetricFilter { name: Some(name.to_owned()), from: Some(from), ..MetricFilter::default() };
    Ok(query::find(metrics, job, &filter, MAX_BUCKETS).await?.series.into_values().collect())
}

fn mean<'a>(buckets: impl IntoIterator<Item = &'a Bucket>) -> Option<f64> {
    let (sum, count) =
        buckets.into_iter().fold((0.0, 0), |(sum, count), b| (sum + b.sum, count + b.finite_points));
    (count > 0).then(|| sum / count as f64)
}

/// Returns a text that says whether the validation accuracy of a running job improves; `None` before the second validation.
fn progress(validations: &[f64], pictures: Option<u64>) -> Option<String> {
    let (newest, before) = validations.split_last()?;
    let best_before = before.iter().copied().reduce(f64::max)?;
    let (measured, best) = (accuracy_of(*newest, pictures), percent(best_before));
    if *newest > best_before {
        return Some(format!(
            "Validation accuracy improves: the newest, {measured}, is the best so far; the best before was {best}."
        ));
    }
    let count_since_best = before.iter().skip_while(|accuracy| **accuracy < best_before).count();
    let error = pictures.map_or(0.0, |pictures| standard_error(*newest, pictures));
    if best_before - newest <= error {
        let ago = plural(count_since_best as u64, "validation");
        return Some(format!(
            "Validation accuracy is about the same as the best ({best}, {ago} ago): the newest is {measured}."
        ));
    }
    let since = match count_since_best {
        1 => "the last validation".to_owned(),
        count => format!("the last {count} validations"),
    };
    Some(format!(
        "Validation accuracy has not improved in {since}: the newest is {measured}, the best {best}."
    ))
}

/// The standard error of an accuracy.
fn standard_error(accuracy: f64, pictures: u64) -> f64 {
    (accuracy * (1.0 - accuracy) / pictures.max(1) as f64).sqrt()
}

/// A job's accuracies over time.
struct Course<'a> {
    spec: &'a JobSpec,
    /// Mean training accuracy of the last epoch; `None` if it cannot be compared with validation accuracy.
    training: Option<f64>,
    /// Whether the training pictures are strongly augmented, which lowers the training accuracy.
    is_augmented: bool,
    /// See [`causes`].
    causes: Vec<String>,
    /// Number of epochs that the job has trained.
    epochs: u64,
    /// Accuracy of a guess; 0 if the dataset is no longer registered.
    chance: f64,
    /// See [`majority`].
    majority: Option<(&'a str, f64)>,
    /// Accuracies of all validations, in the order of steps.
    validations: Vec<f64>,
    /// Number of validation pictures, if known.
    pictures: Option<u64>,
    /// The highest training loss, if it was far above the loss at the start.
    exploded_loss: Option<f64>,
    /// Whether the run that made the initial weights trained on some of the validation pictures.
    has_trained_validation: bool,
}

impl Course<'_> {
    fn diagnosis(&self) -> Option<String> {
        let last = *self.validations.last()?;
        let margin = self.pictures.map_or(0.0, |pictures| {
            let [low, high] = confidence_interval(last, pictures);
            (high - low) / 2.0
        });
        let has_hardly_trained = self.training.is_some_and(|training| {
            training < LOW_ACCURACY && (self.epochs < MIN_EPOCHS || training < self.chance + USUAL_GAP)
        });
        let is_measured = self.pictures.is_none_or(|pictures| pictures >= MIN_PICTURES);
        let overfitted = self
            .training
            .filter(|training| !has_hardly_trained && is_measured && training - last > USUAL_GAP.max(margin));
        let is_learned =
            last >= GOOD_ACCURACY || self.training.is_some_and(|training| training >= LEARNED_ACCURACY);
        let one_picture = self.pictures.map_or(0.0, |pictures| 1.5 / pictures.max(1) as f64);
        if let Some((class, share)) = self.majority
            && share > self.chance + USUAL_GAP
            && (last - share).abs() <= MIN_RISE.max(one_picture)
            && overfitted.is_none()
            && self.exploded_loss.is_none()
            && self.training.is_none_or(|training| training < LEARNED_ACCURACY)
        {
            let advice = match self.spec.loss.class_weights {
                None => "Set loss.class_weights = \"balanced\", or add",
                Some(_) => "Add",
            };
            return Some(format!(
                "{} of the validation pictures are of the class {class:?}, and validation accuracy is {}: the network may predict only \
                 this class. {advice} pictures of the other classes.",
                percent(share),
                accuracy_of(last, self.pictures)
            ));
        }
        let mut findings = Vec::new();
        // Chance alone changes the accuracy by its standard error, and by one picture.
        let error = self.pictures.map_or(0.0, |pictures| standard_error(last, pictures));
        let min_rise = MIN_RISE.max(error).max(one_picture);
        let is_best = self.validations.iter().all(|accuracy| *accuracy <= last + MIN_RISE);
        let exploded_loss = self.exploded_loss.filter(|_| !is_learned);
        let may_rise = !is_learned && exploded_loss.is_none();
        if exploded_loss.is_none() && (overfitted.is_some() || last < LOW_ACCURACY) {
            findings.extend(self.causes.iter().cloned());
        }
        let rise = late_rise(&self.validations).filter(|rise| may_rise && is_best && *rise > min_rise);
        if let Some(rise) = rise {
            findings.push(format!(
                "Validation accuracy was still rising at the end (by {:.1} points in the last fifth): train more epochs (train.epochs).",
                100.0 * rise
            ));
        } else if let Some(loss) = exploded_loss {
            findings.push(format!(
                "The training loss rose far above its start, to {}: the learning rate is too high. Start the job again with train.lr = {}.",
                value(loss),
                lowered_lr(self.spec)
            ));
        } else if let Some(training) = self.training {
            let [trained, validated] = [training, last].map(percent);
            if self.is_augmented && training < last && last < GOOD_ACCURACY {
                findings.push(format!(
                    "Training accuracy on augmented pictures ({trained}) is below validation accuracy ({validated}): the network has not \
                     overfitted. Train more epochs (train.epochs)."
                ));
            } else if has_hardly_trained && training - last > USUAL_GAP {
                findings.push(format!(
                    "Training accuracy is {trained}, validation accuracy {validated}: the network has hardly trained yet. Train more \
                     epochs (train.epochs)."
                ));
            } else if overfitted.is_none() && training < LOW_ACCURACY && last < LOW_ACCURACY {
                let raise = raised_lr(self.spec)
                    .map(|lr| format!("raise the learning rate (train.lr = {lr}) or "))
                    .unwrap_or_default();
                findings.push(format!(
                    "Training accuracy is low ({trained}), and so is validation accuracy ({validated}): {raise}train more epochs \
                     (train.epochs); a larger network may help."
                ));
            }
        }
        let measured = accuracy_of(last, self.pictures);
        if let Some(training) = overfitted {
            let augment = if self.is_augmented { "Raise" } else { "Set data.augment = \"trivial\", raise" };
            findings.push(format!(
                "Training accuracy is {}, validation accuracy {measured}: the network overfits its training pictures. {augment} \
                 train.weight_decay, or add pictures.",
                percent(training)
            ));
        } else if margin > MAX_MARGIN {
            let data = &self.spec.data;
            let advice = match &data.validation {
                _ if data.folds.is_some() => String::new(),
                Validation::Fraction(share) => {
                    let pictures = self.pictures.unwrap_or_default() as f64 / share;
                    match held_out_share(pictures.round() as u64) {
                        usual if *share < usual => format!(
                            ", or hold out more of them (data.validation = {usual}), which leaves fewer to train on"
                        ),
                        _ => ", or repeat the job with other seeds (data.validation_seed)".into(),
                    }
                }
                Validation::Split(_) => " to the validation split".into(),
            };
            findings
                .push(format!("The validation accuracy, {measured}, is uncertain: add pictures{advice}."));
        }
        if findings.is_empty() && !self.has_trained_validation {
            let training = percent(self.training?);
            findings.push(format!(
                "Training accuracy is {training}, validation accuracy {measured}: no sign of overfitting."
            ));
        }
        Some(findings.join(" ")).filter(|text| !text.is_empty())
    }
}

/// Properties of a job that usually lower the accuracy. `needs_weights`: the job has few pictures and began with random weights.
/// `pictures_side`: the median of the pictures' shorter sides, in pixels.
fn causes(spec: &JobSpec, needs_weights: bool, pictures_side: u32) -> Vec<String> {
    let weights = needs_weights.then(|| {
        let arch = spec.model.arch.as_str();
        let (choose, arch) = match KNOWN_WEIGHTS.into_iter().find(|known| *known == arch) {
            Some(arch) => (String::new(), arch),
            None => (format!("choose the network {0} (model.arch) and ", KNOWN_WEIGHTS[0]), KNOWN_WEIGHTS[0]),
        };
        format!(
            "The network began with random weights and has fewer than {FEW_TRAINING_PICTURES} training pictures: {choose}start from \
             trained weights (model.pretrained = \"{arch}\", after `lockstep weights get {arch}`)."
        )
    });
    let usual = pictures_side.min(USUAL_SIDE);
    let side = spec.data.image_size.as_ref().map(ImageSize::last).filter(|side| 2 * side <= usual);
    let size = side.map(|side| {
        format!(
            "The network sees {side} x {side} pixels of pictures whose shorter side has a median of {pictures_side} pixels: set \
             data.image_size = {usual}."
        )
    });
    weights.into_iter().chain(size).collect()
}

/// The mean of the last fifth of the values minus the mean of the fifth before it; `None` for fewer than three values.
fn late_rise(values: &[f64]) -> Option<f64> {
    let fifth = values.len().div_ceil(5);
    let (rest, last) = values.split_at(values.len() - fifth);
    let before = &rest[rest.len().checked_sub(fifth).filter(|_| values.len() >= 3)?..];
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    Some(mean(last) - mean(before))
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_protocol::spec::Arch;

    fn course<'a>(
        spec: &'a JobSpec,
        training: Option<f64>,
        is_augmented: bool,
        validations: &[f64],
        pictures: Option<u64>,
    ) -> Course<'a> {
        Course {
            spec,
            training,
            is_augmented,
            causes: Vec::new(),
            epochs: 10,
            chance: 0.1,
            majority: None,
            validations: validations.to_vec(),
            pictures,
            exploded_loss: None,
            has_trained_validation: false,
        }
    }

    /// Checks that the diagnosis contains `expected`. If `expected` is empty, there must be no diagnosis.
    fn check(
        training: Option<f64>,
        is_augmented: bool,
        validations: &[f64],
        pictures: Option<u64>,
        expected: &str,
    ) {
        let spec = JobSpec::default();
        let found = course(&spec, training, is_augmented, validations, pictures).diagnosis();
        let found = found.unwrap_or_default();
        let is_expected = found.contains(expected) && found.is_empty() == expected.is_empty();
        assert!(is_expected, "{training:?} {validations:?} {pictures:?}: {found:?}, not {expected:?}");
    }

    #[test]
    fn a_finished_run_is_diagnosed_by_its_accuracies() {
        const FLAT: &[f64] = &[0.3, 0.5, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7];
        const RISING: &[f64] = &[0.1, 0.2, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65];
        for (training, validations, pictures, expected) in [
            // No validation, or no problem.
            (Some(0.9), &[][..], Some(1000), ""),
            (Some(0.99), &[0.9, 0.98], Some(1000), "is 99.0 %, validation accuracy 98.0 %"),
            (
                Some(0.93),
                &[0.91, 0.91, 0.91],
                None,
                "Training accuracy is 93.0 %, validation accuracy 91.0 %: no sign of overfitting.",
            ),
            // Few pictures do not hide other findings, and do not make chance a finding; 100 pictures are enough.
            (
                Some(0.8),
                &[0.5, 0.5, 0.75],
                Some(4),
                "The validation accuracy, 75.0 % ± 21.7 of 4 pictures, is uncertain: add pictures",
            ),
            (
                Some(0.5),
                &[1.0],
                Some(4),
                "The validation accuracy, 100.0 % (at least 51.0 %) of 4 pictures, is uncertain: add pictures",
            ),
            (
                Some(0.5),
                RISING,
                Some(20),
                "Training accuracy is low (50.0 %), and so is validation accuracy (65.0 %): raise the learning rate (train.lr = \
                 0.02) or train more epochs (train.epochs); a larger network may help. The validation accuracy, 65.0 % ± 10.7 of 20 \
                 pictures, is uncertain",
            ),
            (
                Some(0.75),
                &[0.6],
                Some(30),
                "may help. The validation accuracy, 60.0 % ± 8.9 of 30 pictures, is uncertain",
            ),
            (
                Some(0.99),
                &[0.6],
                Some(30),
                "is 99.0 %, validation accuracy 60.0 % ± 8.9 of 30 pictures: the network overfits",
            ),
            (
                Some(0.95),
                RISING,
                Some(30),
                "Training accuracy is 95.0 %, validation accuracy 65.0 % ± 8.7 of 30 pictures: the network overfits",
            ),
            (
                Some(0.95),
                &[0.2],
                Some(5),
                "The validation accuracy, 20.0 % ± 17.9 of 5 pictures, is uncertain",
            ),
            (Some(0.5), &[0.5], Some(100), "low (50.0 %), and so is validation accuracy (50.0 %)"),
            (Some(0.5), &[0.5], None, "low (50.0 %), and so is validation accuracy (50.0 %)"),
            // A clear rise after few epochs comes first. A rise of one standard error, or of one picture, is chance.
            (
                Some(0.5),
                &[0.528, 0.583, 0.667],
                Some(36),
                "still rising at the end (by 8.4 points in the last fifth): train more epochs (train.epochs). The validation accuracy, \
                 66.7 %",
            ),
            (Some(0.5), &[0.4, 0.452, 0.5], Some(108), "Training accuracy is low (50.0 %)"),
            (Some(0.6), RISING, Some(5000), "still rising at the end (by 10.0 points in the last fifth)"),
            (None, RISING, Some(5000), "train.epochs"),
            // The training accuracy cannot rise any more.
            (Some(0.999), RISING, Some(5000), "overfits"),
            (Some(0.99), FLAT, Some(5000), "Training accuracy is 99.0 %, validation accuracy 70.0 %"),
            (Some(0.72), FLAT, Some(5000), "raise the learning rate (train.lr = 0.02) or train more epochs"),
            // With mixed pictures there is no training accuracy.
            (None, FLAT, Some(5000), ""),
            // A difference within the margin of the validation is no gap.
            (Some(0.79), &[0.7, 0.7, 0.7], Some(95), "is low"),
            (Some(0.79), &[0.7, 0.7, 0.7], Some(5000), "overfits"),
        ] {
            check(training, false, validations, pictures, expected);
        }
        // With augmentation, which lowers the training accuracy.
        for (training, validations, expected) in [
            (
                0.375,
                &[0.5][..],
                "Training accuracy on augmented pictures (37.5 %) is below validation accuracy (50.0 %): the network has not \
                 overfitted. Train more epochs",
            ),
            (0.6, RISING, "Validation accuracy was still rising"),
            (0.3, &[0.3], "Training accuracy is low"),
            (0.99, FLAT, "overfits its training pictures. Raise train.weight_decay"),
            (0.9, &[0.97], "no sign of overfitting"),
        ] {
            check(Some(training), true, validations, Some(5000), expected);
        }
        // Few epochs, or an accuracy near chance, are no overfitting. Few pictures and small inputs come first.
        for (epochs, chance, expected) in [
            (1, 0.1, "31.0 %, validation accuracy 0.0 %: the network has hardly trained yet"),
            (10, 0.3, "the network has hardly trained yet"),
            (
                10,
                0.1,
                "The network began with random weights and has fewer than 5000 training pictures: start from trained weights \
                 (model.pretrained = \"resnet50\", after `lockstep weights get resnet50`). The network sees 32 x 32 pixels of pictures whose shorter side has a median of \
                 300 pixels: set data.image_size = 224. Training accuracy is 31.0 %, validation accuracy 0.0 % (at most 22.8 %) of 13 \
                 pictures: the network overfits",
            ),
        ] {
            let mut spec = JobSpec::default();
            spec.data.image_size = Some(ImageSize::Fixed(32));
            let course = course(&spec, Some(0.31), false, &[0.0], Some(13));
            let found = Course { causes: causes(&spec, true, 300), epochs, chance, ..course }.diagnosis();
            assert!(found.as_ref().is_some_and(|found| found.contains(expected)), "{epochs}: {found:?}");
        }
        // There are no public weights of this network.
        let mut spec = JobSpec::default();
        spec.model.arch = Arch::ResNet20;
        let words = "choose the network resnet18 (model.arch) and start from trained weights (model.pretrained = \"resnet18\", after `lockstep weights get resnet18`)";
        assert!(causes(&spec, true, 0)[0].contains(words));
        // An accuracy that equals the share of the largest class.
        for (training, last, expected) in [
            (
                Some(0.951),
                0.952,
                "95.2 % of the validation pictures are of the class \"dog\", and validation accuracy is 95.2 % ± 2.3 of 84 pictures: the \
                 network may predict only this class. Set loss.class_weights = \"balanced\", or add",
            ),
            (None, 0.952, "may predict only this class"),
            (Some(0.995), 0.952, "no sign of overfitting"),
            (Some(0.951), 0.9, "no sign of overfitting"),
        ] {
            let spec = JobSpec::default();
            let course = course(&spec, training, false, &[last], Some(84));
            let found = Course { majority: Some(("dog", 80.0 / 84.0)), ..course }.diagnosis();
            assert!(found.as_ref().is_some_and(|found| found.contains(expected)), "{last}: {found:?}");
        }
        // After an explosion of the loss, a higher learning rate or more epochs do not help.
        for (training, expected) in [
            (
                0.4,
                "The training loss rose far above its start, to 350.0: the learning rate is too high. Start the job again with train.lr = \
                 0.001.",
            ),
            (0.99, "no sign of overfitting"),
        ] {
            let spec = JobSpec::default();
            let course = course(&spec, Some(training), false, &[0.3, 0.6, 0.98 * training], Some(5000));
            let found = Course { exploded_loss: Some(350.0), ..course }.diagnosis();
            assert!(found.as_ref().is_some_and(|found| found.contains(expected)), "{training}: {found:?}");
        }
    }

    #[test]
    fn advice_stays_within_usual_values() {
        // The usual rate for 32 pictures is 0.025.
        for (lr, lowered, raised) in [(0.01, 0.001, Some(0.02)), (0.05, 0.005, None), (1.0, 0.025, None)] {
            let mut spec = JobSpec::default();
            spec.train.lr = lr;
            assert_eq!((lowered_lr(&spec), raised_lr(&spec)), (lowered, raised), "{lr}");
        }
        for (share, pictures, advice) in [
            (0.1, 42, "(data.validation = 0.2)"),
            (0.1, 4, "(data.validation = 0.3)"),
            (0.2, 84, "with other seeds"),
        ] {
            let mut spec = JobSpec::default();
            spec.data.validation = Validation::Fraction(share);
            let found = course(&spec, Some(0.5), false, &[0.5], Some(pictures)).diagnosis();
            assert!(found.as_ref().is_some_and(|found| found.contains(advice)), "{share}: {found:?}");
        }
    }

    #[test]
    fn a_running_job_shows_whether_its_accuracy_improves() {
        for (validations, expected) in [
            (&[0.5][..], ""),
            (
                &[0.5, 0.25, 0.75],
                "improves: the newest, 75.0 % ± 4.3 of 100 pictures, is the best so far; the best before was 50.0 %.",
            ),
            (
                &[0.5, 0.25],
                "has not improved in the last validation: the newest is 25.0 % ± 4.3 of 100 pictures, the best 50.0 %.",
            ),
            (&[0.25, 0.5, 0.5, 0.4], "has not improved in the last 2 validations: the newest is 40.0 %"),
            // Chance alone changes the accuracy by its standard error.
            (
                &[0.25, 0.5, 0.5, 0.46],
                "is about the same as the best (50.0 %, 2 validations ago): the newest is 46.0 % ± 5.0 of 100 pictures.",
            ),
        ] {
            let found = progress(validations, Some(100));
            assert_eq!(found.is_none(), expected.is_empty(), "{validations:?}: {found:?}");
            assert!(found.unwrap_or_default().contains(expected), "{validations:?}");
        }
    }

    #[test]
    fn a_rise_compares_the_last_fifth_with_the_fifth_before() {
        let near = |values: &[f64], expected: Option<f64>| match (late_rise(values), expected) {
            (Some(found), Some(expected)) => assert!((found - expected).abs() < 1e-9, "{values:?}: {found}"),
            (found, expected) => assert_eq!(found, expected, "{values:?}"),
        };
        near(&[], None);
        near(&[0.5, 0.9], None);
        near(&[0.1, 0.5, 0.6], Some(0.1));
        near(&[0.1, 0.2, 0.5, 0.5, 0.6, 0.8], Some(0.2));
    }
}
