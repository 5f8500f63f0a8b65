//! A trained model as its safetensors file tells it: weights, class names, and how its pictures were prepared.

use crate::{
    checkpoint,
    comm::Alone,
    data::loader::Batch,
    engine::{self, Engine, EngineConfig},
    net,
};
use lockstep_protocol::spec::{ModelSpec, OptimizerKind};
use serde::{Deserialize, de::DeserializeOwned};
use std::{
    collections::HashMap,
    fs::File,
    io::Read,
    ops::RangeInclusive,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Pictures computed together.
pub(super) const BATCH: usize = 32;
/// Headers are a few kilobytes; a file that asks for more is none of ours.
const HEADER_BYTES: u64 = 16 << 20;
/// Pixels of an input's side, as in a specification.
const SIDES: RangeInclusive<usize> = 8..=4096;
/// Far more than any data set of pictures has.
const CLASSES: RangeInclusive<usize> = 1..=100_000;

pub(super) struct Model {
    engine: Box<dyn Engine>,
    pub(super) classes: Vec<String>,
    pub(super) image_size: usize,
    pub(super) channels: usize,
    pub(super) mean: Vec<f32>,
    pub(super) std: Vec<f32>,
}

impl Model {
    /// Reads a checkpoint's folder, or its `model.safetensors`.
    ///
    /// # Errors
    /// What is wrong with the file, in a sentence.
    pub(super) fn open(path: &Path) -> Result<Self, String> {
        let path: PathBuf = if path.is_dir() { path.join(checkpoint::MODEL) } else { path.to_path_buf() };
        let about = metadata(&path)?;
        let text = |key: &str| {
            about.get(key).ok_or_else(|| {
                format!(
                    "{}: its metadata has no {key}; only what Lockstep has trained tells it",
                    path.display()
                )
            })
        };
        let number = |key: &str| {
            text(key)?.parse::<usize>().map_err(|_| format!("{}: its {key} is no number", path.display()))
        };
        let (image_size, channels) = (number("image_size")?, number("channels")?);
        let classes: Vec<String> = value(text("classes")?)?;
        let (mean, std): (Vec<f32>, Vec<f32>) = (value(text("mean")?)?, value(text("std")?)?);
        let sizes = check_sizes(image_size, channels, classes.len(), &mean, &std);
        sizes.map_err(|e| format!("{}: {e}", path.display()))?;
        let spec: serde_json::Value = value(text("spec")?)?;
        let model: ModelSpec = serde_json::from_value(spec.get("model").cloned().unwrap_or_default())
            .map_err(|e| e.to_string())?;
        let network = net::resnet::build(&model, image_size, channels, classes.len())?;
        let weights = checkpoint::read_tensors(&path)?;
        let config = EngineConfig {
            batch_size: BATCH,
            // Of no matter: it is never trained.
            optimizer: OptimizerKind::Momentum,
            momentum: 0.0,
            weight_decay: 0.0,
            label_smoothing: 0.0,
            accumulate: 1,
            sync_batch_norm: false,
            gradients_mean: true,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
        };
        let engine = engine::build_cpu(Arc::new(network), &weights, config, Arc::new(Alone))
            .map_err(|e| format!("{}: {e}", path.display()))?;
        Ok(Self { engine, classes, image_size, channels, mean, std })
    }

    /// Probabilities of each picture's classes.
    pub(super) fn probabilities(&mut self, batch: &Batch) -> Result<Vec<Vec<f32>>, String> {
        let logits = self.engine.predict(batch).map_err(|e| e.to_string())?;
        Ok(logits.chunks_exact(self.classes.len()).map(softmax).collect())
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
            "is no model of ours: {image_size} pixels, {channels} channels, {classes} classes"
        ));
    }
    if mean.len() != channels || std.len() != channels || std.iter().any(|s| !s.is_finite() || *s <= 0.0) {
        return Err(format!("its mean and std are not those of {channels} channels"));
    }
    Ok(())
}

fn value<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    serde_json::from_str(text).map_err(|e| format!("the model's metadata: {e}"))
}

/// In float64, so that they sum to 1; what is not finite becomes even.
fn softmax(logits: &[f32]) -> Vec<f32> {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let powers: Vec<f64> = logits.iter().map(|v| f64::from(v - highest).exp()).collect();
    let sum: f64 = powers.iter().sum();
    if !sum.is_finite() {
        return vec![1.0 / logits.len() as f32; logits.len()];
    }
    powers.iter().map(|p| (p / sum) as f32).collect()
}

/// Of a safetensors file's header (JSON), what the file says of itself; its tensors are read elsewhere.
#[derive(Deserialize)]
struct Header {
    #[serde(rename = "__metadata__", default)]
    metadata: HashMap<String, String>,
}

/// The file's own words about itself, read from its header alone.
fn metadata(path: &Path) -> Result<HashMap<String, String>, String> {
    let naming = |e: String| format!("{}: {e}", path.display());
    let mut file = File::open(path).map_err(|e| naming(e.to_string()))?;
    let mut size = [0; 8];
    file.read_exact(&mut size).map_err(|e| naming(e.to_string()))?;
    let header = u64::from_le_bytes(size);
    if header > HEADER_BYTES {
        return Err(naming("is no safetensors file".into()));
    }
    let mut bytes = Vec::new();
    file.take(header).read_to_end(&mut bytes).map_err(|e| naming(e.to_string()))?;
    let header: Header =
        serde_json::from_slice(&bytes).map_err(|e| naming(format!("is no safetensors file: {e}")))?;
    Ok(header.metadata)
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
