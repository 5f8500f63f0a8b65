//! A trained model as its safetensors file describes it: weights, class names, and how its pictures were prepared.

use crate::checkpoint;
use lockstep_comm::SingleRank;
use lockstep_data::loader::Batch;
use lockstep_engine::{
    Engine, EngineConfig, Optimizer,
    net::{self, Network},
};
use lockstep_host::tensors::NamedTensors;
use lockstep_protocol::numbers::plural;
use lockstep_protocol::spec::ModelSpec;
use serde::de::DeserializeOwned;
use std::{
    collections::{BTreeMap, HashMap},
    ops::RangeInclusive,
    path::Path,
    sync::Arc,
};

/// Pictures computed together.
pub(super) const BATCH: usize = 32;
/// Pixels of an input's side, as in a specification.
const SIDES: RangeInclusive<usize> = 8..=4096;
/// The longest short side that pictures are resized to, as in a specification.
const MAX_RESIZE: usize = 8192;
/// Far more than any data set of pictures has.
const CLASSES: RangeInclusive<usize> = 1..=100_000;

pub(super) struct Model {
    engine: Box<dyn Engine>,
    pub(super) classes: Vec<String>,
    pub(super) image_size: usize,
    pub(super) channels: usize,
    pub(super) mean: Vec<f32>,
    pub(super) std: Vec<f32>,
    /// Pictures were scaled as a whole, not their largest centred square.
    pub(super) whole_pictures: bool,
    /// The short side that pictures were resized to before the centre crop; absent: their largest centred square was
    /// scaled, as by older versions.
    pub(super) resize: Option<u32>,
}

/// What a model's file has, after all of it is checked.
struct ModelFile {
    network: Network,
    weights: NamedTensors,
    /// As the file has it.
    metadata: HashMap<String, String>,
    classes: Vec<String>,
    mean: Vec<f32>,
    std: Vec<f32>,
    whole_pictures: bool,
    resize: Option<u32>,
}

impl ModelFile {
    /// Reads a checkpoint's folder, or its `model.safetensors`.
    ///
    /// # Errors
    /// What is wrong with the file, in a sentence.
    fn open(path: &Path) -> Result<Self, String> {
        let files = checkpoint::model_files(path).map_err(|e| e.to_string())?;
        let Some(path) = files.first() else { return Err(format!("{} has no weights", path.display())) };
        let about = checkpoint::metadata(path)?;
        let text = |key: &str| {
            about.get(key).ok_or_else(|| {
                format!(
                    "{}: its metadata has no {key}; only files that Lockstep has written can be used",
                    path.display()
                )
            })
        };
        let number = |key: &str| {
            text(key)?.parse::<usize>().map_err(|_| format!("{}: its {key} is no number", path.display()))
        };
        let naming = |e: String| format!("{}: {e}", path.display());
        let (image_size, channels) = (number("image_size")?, number("channels")?);
        let classes: Vec<String> = value(text("classes")?).map_err(naming)?;
        let (mean, std): (Vec<f32>, Vec<f32>) =
            (value(text("mean")?).map_err(naming)?, value(text("std")?).map_err(naming)?);
        check_sizes(image_size, channels, classes.len(), &mean, &std).map_err(naming)?;
        let spec: serde_json::Value = value(text("spec")?).map_err(naming)?;
        let model: ModelSpec = serde_json::from_value(spec.get("model").cloned().unwrap_or_default())
            .map_err(|e| naming(e.to_string()))?;
        let network = net::build(&model, image_size, channels, classes.len()).map_err(naming)?;
        let weights = checkpoint::read_files(&files)?;
        if let Some(found) = lockstep_engine::first_not_finite(&weights) {
            return Err(naming(format!(
                "{found}; its training has diverged, so it has no answers: choose another checkpoint"
            )));
        }
        let whole_pictures = about.get("whole_pictures").is_some_and(|text| text == "true");
        let resize = about.get("resize").map(|_| number("resize")).transpose()?;
        let resize = resize.map(|side| check_resize(side, image_size)).transpose().map_err(naming)?;
        Ok(Self { network, weights, classes, mean, std, whole_pictures, resize, metadata: about })
    }
}

/// The model at `path` (a checkpoint's folder, or a safetensors file) as an ONNX file, whose metadata is the file's: `classes`,
/// `mean`, `std`, `image_size` and so on. `fold_batch_norm`: as for [`lockstep_engine::onnx::encode`].
///
/// # Errors
/// What is wrong with the file, in a sentence.
pub fn onnx(path: &Path, fold_batch_norm: bool) -> Result<Vec<u8>, String> {
    let ModelFile { network, weights, metadata, .. } = ModelFile::open(path)?;
    let mut metadata = BTreeMap::from_iter(metadata);
    // What safetensors files of PyTorch say.
    metadata.remove("format");
    lockstep_engine::onnx::encode(&network, &weights, fold_batch_norm, &metadata)
        .map_err(|e| format!("{}: {e}", path.display()))
}

impl Model {
    /// As [`ModelFile::open`].
    ///
    /// # Errors
    /// What is wrong with the file, in a sentence.
    pub(super) fn open(path: &Path) -> Result<Self, String> {
        let ModelFile { network, weights, classes, mean, std, whole_pictures, resize, .. } =
            ModelFile::open(path)?;
        let (image_size, channels) = (network.image_size, network.channels);
        let config = EngineConfig {
            batch_size: BATCH,
            // It does not matter, as the model is never trained.
            optimizer: Optimizer::default(),
            label_smoothing: 0.0,
            accumulate: 1,
            sync_batch_norm: false,
            gradients_mean: true,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
        };
        let engine = lockstep_engine::build_cpu(Arc::new(network), &weights, config, Arc::new(SingleRank))
            .map_err(|e| format!("{}: {e}", path.display()))?;
        Ok(Self { engine, classes, image_size, channels, mean, std, whole_pictures, resize })
    }

    /// What the model says of each picture: a value of each class, before they become probabilities. Where weights are
    /// so large that the sums are not finite, there is no answer, and why is said in its place.
    pub(super) fn logits(&mut self, batch: &Batch) -> Result<Vec<Result<Vec<f32>, String>>, String> {
        let logits = self.engine.predict(batch).map_err(|e| e.to_string())?;
        let one = |values: &[f32]| match values.iter().zip(&self.classes).find(|(v, _)| !v.is_finite()) {
            None => Ok(values.to_vec()),
            Some((value, class)) => Err(format!(
                "has no answer: the model computes {value} for class {class:?}; its training has diverged, choose another \
                 checkpoint"
            )),
        };
        Ok(logits.chunks_exact(self.classes.len()).map(one).collect())
    }
}

/// What a job may have: memory is taken by these, and pixels are counted by them.
fn check_sizes(
    image_size: usize,
    channels: usize,
    classes: usize,
    mean: &[f32],
    std: &[f32],
) -> Result<(), String> {
    if !SIDES.contains(&image_size) || ![1, 3].contains(&channels) || !CLASSES.contains(&classes) {
        return Err(format!(
            "is no model of ours: {image_size} pixels, {}, {}",
            plural(channels as u64, "channel"),
            plural(classes as u64, "class")
        ));
    }
    let sound = |values: &[f32]| values.len() == channels && lockstep_engine::all_finite(values);
    if !sound(mean) || !sound(std) || std.iter().any(|s| *s <= 0.0) {
        return Err(format!("its mean and std are not those of {}", plural(channels as u64, "channel")));
    }
    Ok(())
}

/// The short side before the centre crop, within the limits of a specification.
fn check_resize(resize: usize, image_size: usize) -> Result<u32, String> {
    match u32::try_from(resize) {
        Ok(side) if (image_size..=MAX_RESIZE).contains(&resize) => Ok(side),
        _ => Err(format!(
            "is no model of ours: pictures resized to {resize} pixels before a crop of {image_size} pixels"
        )),
    }
}

fn value<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    serde_json::from_str(text).map_err(|e| format!("its metadata: {e}"))
}

/// In float64, so that they sum to 1. `logits` are finite.
pub(super) fn softmax(logits: &[f32]) -> Vec<f32> {
    let log_sum = log_sum_exp(logits);
    logits.iter().map(|v| (f64::from(*v) - log_sum).exp() as f32).collect()
}

/// Cross-entropy of logits, which are finite, with the class that is right.
pub(super) fn cross_entropy(logits: &[f32], label: usize) -> f64 {
    log_sum_exp(logits) - f64::from(logits[label])
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let highest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    highest + logits.iter().map(|v| (f64::from(*v) - highest).exp()).sum::<f64>().ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_file_says_of_itself_has_limits() {
        let grey = [0.5];
        let colour = [0.5; 3];
        for (side, classes) in [(8, 1), (4096, 100_000)] {
            assert_eq!(check_sizes(side, 1, classes, &grey, &grey), Ok(()));
            assert_eq!(check_sizes(side, 3, classes, &colour, &colour), Ok(()));
        }
        for (side, channels, classes) in
            [(7, 1, 1), (4097, 1, 1), (28, 2, 1), (28, 0, 1), (28, 1, 0), (28, 1, 100_001)]
        {
            let error = check_sizes(side, channels, classes, &grey, &grey).unwrap_err();
            assert!(error.contains("no model of ours"), "{error}");
        }
        let unfit: [(&[f32], &[f32]); 5] =
            [(&[], &grey), (&grey, &[]), (&colour, &grey), (&grey, &[0.0]), (&grey, &[f32::NAN])];
        for (mean, std) in unfit {
            assert!(check_sizes(28, 1, 10, mean, std).unwrap_err().contains("mean and std"));
        }
    }
}
