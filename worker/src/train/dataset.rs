//! The dataset of a run. If it is not the same on every rank, the run ends before its first step.

use super::{TrainError, Training};
use crate::checkpoint;
use lockstep_comm::first_differing_rank;
use lockstep_data::loader::{DataSource, Mixing, Shape};
use lockstep_protocol::{dataset::too_few_classes, numbers::plural};

/// Maximum number of broken files that are named in the log.
const MAX_NAMED_FILES: usize = 20;

/// Opens the dataset. Checks that all ranks have the same pictures, and makes them use the same normalisation.
pub(super) fn open(training: &Training<'_>) -> Result<DataSource, TrainError> {
    let spec = training.spec;
    let mut data = DataSource::open_as(training.dataset, &spec.data, spec.train.seed, training.changes)?;
    if let Some(mistake) = too_few_classes(&data.shape.classes) {
        return Err(TrainError::Impossible(format!("dataset {} {mistake}", spec.data.dataset)));
    }
    let mixing = Mixing::from(&spec.train);
    data.set_mixing(mixing);
    // A GPU mixes resident pictures in float32, and the host mixes bytes. The same bits in every run require that only the host
    // mixes.
    if spec.train.deterministic && mixing.is_on() {
        data.keep_on_host();
    }
    // With 6 views, a GPU would shift resident pictures before scaling. The host shifts after scaling.
    let side = data.shape.image_size;
    let is_scaled = data.resident().is_some_and(|all| (all.height, all.width) != (side, side));
    if spec.evaluate.views == 6 && is_scaled {
        data.keep_on_host();
    }
    if let Some(weights) = &spec.loss.class_weights {
        let counts = data.class_counts();
        let weights = weights
            .of(&data.shape.classes, &counts)
            .map_err(|why| TrainError::Impossible(format!("loss.class_weights: {why}")))?;
        training.log([describe_class_weights(&data.shape.classes, &weights, &counts)]);
        data.set_class_weights(weights);
    }
    training.log(describe(&data.shape));
    check_same_dataset(training, &data)?;
    share_normalisation(training, &mut data)?;
    Ok(data)
}

/// A log line about the weights of classes: the smallest and the largest.
fn describe_class_weights(classes: &[String], weights: &[f32], counts: &[u64]) -> String {
    let by_weight = |a: &usize, b: &usize| weights[*a].total_cmp(&weights[*b]);
    let describe_class = |class: Option<usize>| {
        let class = class.unwrap_or(0);
        let pictures = plural(counts[class], "training picture");
        format!("{:.4} ({}, {pictures})", weights[class], one_line(&classes[class]))
    };
    let [smallest, largest] = [(0..classes.len()).min_by(by_weight), (0..classes.len()).max_by(by_weight)];
    format!("the loss weights classes by {} to {}", describe_class(smallest), describe_class(largest))
}

/// Log lines about an opened dataset.
fn describe(shape: &Shape) -> Vec<String> {
    let skipped = &shape.skipped;
    let mut lines = Vec::new();
    if !skipped.is_empty() {
        let verb = if skipped.len() == 1 { "is" } else { "are" };
        lines.push(format!("{} {verb} left out:", plural(skipped.len() as u64, "broken file")));
        lines.extend(skipped.iter().take(MAX_NAMED_FILES).map(|file| format!("  {}", one_line(file))));
    }
    lines.extend(shape.notes.iter().cloned());
    lines
}

/// Makes all ranks normalise with the mean and standard deviation of rank 0, or of the checkpoint from which the run
/// continues. A rank's own values depend on which pictures it could read, and on how this version reads them.
fn share_normalisation(training: &Training<'_>, data: &mut DataSource) -> Result<(), TrainError> {
    let (spec, channels) = (&training.spec.data, data.shape.channels);
    let of_checkpoint = |key: &str| -> Option<Vec<f32>> {
        let metadata = checkpoint::folder_metadata(training.resume?).ok()?;
        let values: Vec<f32> = serde_json::from_str(metadata.get(key)?).ok()?;
        (values.len() == channels && values.iter().all(|v| v.is_finite())).then_some(values)
    };
    let [mut mean, mut std] = [("mean", &spec.mean, &data.shape.mean), ("std", &spec.std, &data.shape.std)]
        .map(|(key, configured, own)| {
            let continued =
                if training.is_first() && configured.is_none() { of_checkpoint(key) } else { None };
            continued.unwrap_or_else(|| own.clone())
        });
    training.group.broadcast((&mut mean).into())?;
    training.group.broadcast((&mut std).into())?;
    data.set_normalisation(mean, std);
    Ok(())
}

/// Checks that all ranks have the same pictures in the same order. Otherwise they would train on some pictures twice
/// and on others never.
fn check_same_dataset(training: &Training<'_>, data: &DataSource) -> Result<(), TrainError> {
    let count = data.shape.train_samples + data.shape.validation_samples;
    let own = [count, data.digest().into()].map(u64::to_le_bytes);
    let all = training.group.all_gather_bytes(own.as_flattened())?;
    first_differing_rank(&all).map_or(Ok(()), |rank| {
        let count = |rank: usize| all[rank].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        Err(TrainError::Impossible(format!(
            "rank {rank} has another dataset than rank 0 ({} pictures and {}, or other classes, names, contents or order). Copy the \
             dataset to all machines, and do not change it while a job starts",
            count(rank),
            count(0)
        )))
    })
}

/// A name or description in one line of a log, because names of files and classes may contain line feeds.
fn one_line(text: &impl std::fmt::Display) -> String {
    text.to_string().replace('\n', "\\n").replace('\r', "\\r")
}

/// Logs which pictures could not be read since the last call.
pub(super) fn report_broken(training: &Training<'_>, data: &DataSource) {
    let (newly_broken, count) = data.take_newly_broken();
    let before = count - newly_broken.len();
    for file in newly_broken.iter().take(MAX_NAMED_FILES.saturating_sub(before)) {
        let file = one_line(file);
        training.observer.log(&format!(
            "{file}; it is left out. Restore it before the job is paused or restarted: a job can only continue with the pictures \
             with which it began"
        ));
    }
    // Further pictures are only counted, with a line each time the count has doubled.
    if count > MAX_NAMED_FILES && count.ilog2() != before.max(1).ilog2() {
        training.observer.log(&format!("{count} pictures could not be read and are left out by this rank"));
    }
}
