//! Evaluates a checkpoint on the validation pictures of its job: scores per class and the confusion matrix.

use super::model::{BATCH, Model, Output, cross_entropy, softmax};
use crate::checkpoint;
use lockstep_data::{held_out::foreign_divisions, loader::DataSource};
use lockstep_protocol::{
    dataset::{ValidationSet, classes_differ},
    inspect::{ClassScore, EvaluateModel, ModelEvaluation, PredictedPicture},
    numbers::{confidence_interval, plural},
    spec::{DataSpec, ImageSize},
};
use std::{path::Path, time::Instant};

/// Maximum number of listed mistakes. All mistakes are counted.
const MAX_MISTAKES: usize = 5000;
/// Maximum number of listed correct predictions per class.
const MAX_CORRECT_PER_CLASS: usize = 24;
/// Maximum number of classes of a confusion matrix. A matrix of this size takes 800 MB.
const MAX_CLASSES: usize = 10_000;

pub(super) fn evaluate(request: &EvaluateModel) -> Result<ModelEvaluation, String> {
    let start = Instant::now();
    let spec = &request.spec;
    let mut model = Model::open(Path::new(&request.model), Output::Logits)?;
    if model.classes.len() > MAX_CLASSES {
        return Err(format!(
            "the model has {} classes, but a confusion matrix can have at most {MAX_CLASSES}; evaluate it by nearest neighbours (`lockstep \
             evaluate --knn 20`)",
            model.classes.len()
        ));
    }
    let (data, listed) = open_dataset(request, &model)?;
    if let Some(difference) = classes_differ(&model.classes, &data.shape.classes) {
        return Err(format!(
            "the model was trained on other classes than {} has: {difference}",
            spec.data.dataset
        ));
    }
    let classes = model.classes.len();
    let mut confusion = vec![vec![0u64; classes]; classes];
    let (mut mistakes, mut right) = (Vec::new(), vec![Vec::new(); classes]);
    let mut loss = 0.0f64;
    let (rank, world_size, threads) = (0, 1, 1);
    for batch in data.validation(rank, world_size, BATCH, threads) {
        let batch = batch.map_err(|e| e.to_string())?;
        let all = model.outputs(&batch)?;
        for ((logits, label), index) in all.into_iter().zip(&batch.labels).zip(&batch.indices) {
            let logits = logits.map_err(|e| format!("validation picture {index} {e}"))?;
            let probabilities = softmax(&logits);
            // `rev` and `max_by` (the last maximum) return the first of equal values, as PyTorch's argmax does.
            let predicted = (0..classes).rev().max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap_or(0);
            let truth = *label as usize;
            confusion[truth][predicted] += 1;
            loss += cross_entropy(&logits, truth);
            let prediction = PredictedPicture {
                index: *index,
                label: *label,
                predicted: predicted as u32,
                confidence: probabilities[predicted],
            };
            if predicted != truth {
                mistakes.push(prediction);
            } else if right[truth].len() < MAX_CORRECT_PER_CLASS {
                right[truth].push(prediction);
            }
        }
    }
    mistakes.sort_by(|a, b| b.confidence.total_cmp(&a.confidence).then(a.index.cmp(&b.index)));
    mistakes.truncate(MAX_MISTAKES);
    let samples: u64 = confusion.iter().flatten().sum();
    let correct: u64 = (0..classes).map(|c| confusion[c][c]).sum();
    let accuracy = correct as f64 / samples.max(1) as f64;
    let (validation, trained_on, note) = describe_validation(Path::new(&request.model), &data, &spec.data);
    Ok(ModelEvaluation {
        validation,
        listed,
        trained_on,
        note,
        samples,
        accuracy,
        interval: confidence_interval(accuracy, samples),
        loss: loss / samples.max(1) as f64,
        secs: start.elapsed().as_secs_f64(),
        classes: scores(&model.classes, &confusion),
        confusion,
        mistakes,
        right: right.into_iter().flatten().collect(),
    })
}

/// Opens the dataset of a request. Also returns the validation pictures that the dataset's index lists.
pub(super) fn open_dataset(
    request: &EvaluateModel,
    model: &Model,
) -> Result<(DataSource, Option<ValidationSet>), String> {
    let spec = &request.spec;
    // Pictures are prepared as in the model's training, even if the job or its dataset has changed since.
    let data_spec = DataSpec {
        image_size: Some(ImageSize::Fixed(model.image_size as u32)),
        validation_size: None,
        mean: Some(model.mean.clone()),
        std: Some(model.std.clone()),
        resize_size: model.resize,
        // A training option that would also resize validation pictures.
        random_resized_crop: false,
        ..spec.data.clone()
    };
    let dataset = lockstep_data::resolve(Path::new(&request.dataset), request.allowed.as_ref())?;
    let listed = lockstep_data::held_out::validation_set(&dataset, &spec.data).map_err(|e| e.to_string())?;
    let data = DataSource::open(&dataset, &data_spec, spec.train.seed).map_err(|e| e.to_string())?;
    if data.shape.channels != model.channels {
        return Err(format!(
            "the model was trained on pictures of {}, but the pictures of {} have {}",
            plural(model.channels as u64, "channel"),
            spec.data.dataset,
            data.shape.channels
        ));
    }
    if data.shape.validation_samples == 0 {
        return Err(format!(
            "the job was trained without validation pictures of {} (data.validation = \"none\"): evaluate another dataset, as in \
             `lockstep evaluate JOB --dataset PATH`",
            spec.data.dataset
        ));
    }
    Ok((data, listed))
}

/// Returns the validation pictures of `data`, how many of them the checkpoint's run was trained on, if that is known, and a
/// note about what a reader of the evaluation must know: for example, that the run was validated with other pictures.
pub(super) fn describe_validation(
    model: &Path,
    data: &DataSource,
    spec: &DataSpec,
) -> (Option<ValidationSet>, Option<u64>, Option<String>) {
    let current = data.shape.validation.clone();
    let folder = if model.is_dir() { Some(model) } else { model.parent() };
    let Some(state) = folder.and_then(checkpoint::unverified_state) else { return (current, None, None) };
    let mut notes = Vec::new();
    if state.validation != current {
        notes.push(state.validation.map_or_else(
            || "the checkpoint's run was not validated".to_owned(),
            |before| {
                let pictures = plural(before.pictures, "picture");
                format!("the checkpoint's run was validated with another set of {pictures}")
            },
        ));
    }
    // Folds depend on all pictures of the dataset.
    let have_folds_changed = spec.folds.is_some() && !notes.is_empty();
    let is_known =
        !have_folds_changed && state.divisions.iter().any(|division| division.dataset == spec.dataset);
    let trained_on = is_known.then(|| data.count_trained_on(&foreign_divisions(&state.divisions, spec)));
    match trained_on {
        None if have_folds_changed => notes.push(
            "it is not known whether some of these pictures were trained on: the dataset's pictures, and therefore its folds, have changed"
                .into(),
        ),
        None => notes.push(
            "it is not known whether some of these pictures were trained on: the checkpoint does not record how this dataset was divided"
                .into(),
        ),
        Some(0) => {}
        Some(count) => notes
            .push(format!("{count} of these were trained on: their accuracy does not show how well the model handles new pictures")),
    }
    (current, trained_on, (!notes.is_empty()).then(|| notes.join("; ")))
}

fn scores(names: &[String], confusion: &[Vec<u64>]) -> Vec<ClassScore> {
    let share = |part: u64, whole: u64| if whole == 0 { 0.0 } else { part as f64 / whole as f64 };
    names
        .iter()
        .enumerate()
        .map(|(c, name)| {
            let samples = confusion[c].iter().sum();
            let precision = share(confusion[c][c], confusion.iter().map(|row| row[c]).sum());
            let recall = share(confusion[c][c], samples);
            let sum = precision + recall;
            let f1 = if sum == 0.0 { 0.0 } else { 2.0 * precision * recall / sum };
            ClassScore { name: name.clone(), samples, precision, recall, f1 }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_follow_from_the_confusion_matrix() {
        // 8 of 10 cats are recognised, 1 dog is predicted as a cat, and nothing is predicted as a bird.
        let names = ["cat", "dog", "bird"].map(String::from);
        let found = scores(&names, &[vec![8, 2, 0], vec![1, 9, 0], vec![0, 4, 0]]);
        assert_eq!((found[0].samples, found[0].recall), (10, 0.8));
        assert!((found[0].precision - 8.0 / 9.0).abs() < 1e-12);
        assert!((found[0].f1 - 16.0 / 19.0).abs() < 1e-12);
        assert_eq!((found[2].precision, found[2].recall, found[2].f1), (0.0, 0.0, 0.0));
    }
}
