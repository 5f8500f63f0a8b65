//! A trained model as described by its safetensors file: weights, class names, and how its pictures were prepared.

use crate::checkpoint;
use lockstep_comm::SingleRank;
use lockstep_data::loader::Batch;
use lockstep_engine::{
    Engine, EngineConfig, LossConfig, Margin, Optimizer,
    net::{self, Network},
    onnx,
};
use lockstep_host::tensors::NamedTensors;
use lockstep_protocol::numbers::plural;
use lockstep_protocol::spec::{LossSpec, ModelSpec};
use serde::de::DeserializeOwned;
use std::{collections::HashMap, ops::RangeInclusive, path::Path, sync::Arc};

/// Number of pictures that are predicted together.
pub(super) const BATCH: usize = 32;
/// Allowed sides of the network's input in pixels, as in a job specification.
const IMAGE_SIZES: RangeInclusive<usize> = 8..=4096;
/// Maximum length of the short side of resized pictures, as in a job specification.
const MAX_RESIZE: usize = 8192;
/// Allowed number of classes when probabilities are computed.
const CLASS_COUNTS: RangeInclusive<usize> = 1..=100_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Output {
    /// A value per class, before softmax.
    Logits,
    /// The input of the last layer. The last layer is not read, so its size has no limit.
    Embedding,
}

pub(super) struct Model {
    engine: Box<dyn Engine>,
    /// Number of values per picture in the output.
    pub(super) width: usize,
    /// Empty for embeddings.
    pub(super) classes: Vec<String>,
    pub(super) image_size: usize,
    pub(super) channels: usize,
    pub(super) mean: Vec<f32>,
    pub(super) std: Vec<f32>,
    /// Whether whole pictures were scaled, instead of their largest centred square.
    pub(super) whole_pictures: bool,
    /// The length to which the short side was resized before the centre crop. `None` if pictures were not cropped in this way.
    pub(super) resize: Option<u32>,
}

struct ModelFile {
    network: Network,
    weights: NamedTensors,
    margin: Option<Margin>,
    metadata: HashMap<String, String>,
    /// Empty for embeddings.
    classes: Vec<String>,
    mean: Vec<f32>,
    std: Vec<f32>,
    whole_pictures: bool,
    resize: Option<u32>,
}

impl ModelFile {
    /// Reads a checkpoint's folder, or a `model.safetensors` file.
    ///
    /// # Errors
    /// A sentence that says why the file cannot be used.
    fn read(path: &Path, output: Output) -> Result<Self, String> {
        let files =
            checkpoint::model_files(path).map_err(|e| format!("{e}{}", checkpoint::name_others(path)))?;
        let Some(path) = files.first() else { return Err(format!("{} has no weights", path.display())) };
        let with_path = |e: String| format!("{}: {e}", path.display());
        let mut file = Self::from_metadata(checkpoint::metadata(path)?, output).map_err(with_path)?;
        file.weights = match output {
            Output::Logits => checkpoint::read_files(&files)?,
            Output::Embedding => {
                let head = format!("{}.", file.network.head());
                file.network = file.network.without_head();
                let is_before_head = |name: &str| !name.starts_with(&head);
                checkpoint::read_selected(&files, &is_before_head)?
            }
        };
        if let Some(found) = lockstep_engine::first_invalid(&file.weights) {
            return Err(with_path(format!(
                "{found}; its training has diverged, so it cannot predict: choose another checkpoint"
            )));
        }
        Ok(file)
    }

    /// The content of a file with this metadata, without the weights.
    fn from_metadata(metadata: HashMap<String, String>, output: Output) -> Result<Self, String> {
        let text = |key: &str| {
            metadata.get(key).ok_or_else(|| {
                // The metadata of embeddings, as `write_embeddings` writes them.
                if metadata.contains_key("names") {
                    "it has the embeddings of pictures, not a network; give a checkpoint's model.safetensors or its folder".into()
                } else {
                    format!(
                        "its metadata has no {key}, which Lockstep writes into a network's file; weights from elsewhere can only begin a \
                         job (model.pretrained)"
                    )
                }
            })
        };
        let number =
            |key: &str| text(key)?.parse::<usize>().map_err(|_| format!("its {key} is not a number"));
        let (image_size, channels) = (number("image_size")?, number("channels")?);
        let classes: Vec<String> = match output {
            Output::Logits => parse(text("classes")?)?,
            Output::Embedding => Vec::new(),
        };
        let (mean, std): (Vec<f32>, Vec<f32>) = (parse(text("mean")?)?, parse(text("std")?)?);
        let class_count = if output == Output::Logits { classes.len() } else { 1 };
        check_sizes(image_size, channels, class_count, &mean, &std)?;
        let spec: serde_json::Value = parse(text("spec")?)?;
        let model = spec.get("model").cloned().unwrap_or_default();
        let model: ModelSpec = serde_json::from_value(model).map_err(|e| e.to_string())?;
        let loss = spec.get("loss").cloned().map(serde_json::from_value::<LossSpec>).transpose();
        let loss = loss.map_err(|e| e.to_string())?;
        // An embedding does not depend on the last layer, so it has no margin.
        let margin = loss.filter(|_| output == Output::Logits).and_then(|loss| Margin::of(&loss));
        let network = net::build(&model, image_size, channels, class_count)?;
        let whole_pictures = metadata.get("whole_pictures").is_some_and(|text| text == "true");
        let resize = metadata.get("resize").map(|_| number("resize")).transpose()?;
        let resize = resize.map(|side| check_resize(side, image_size)).transpose()?;
        let weights = NamedTensors::new();
        Ok(Self { network, weights, margin, classes, mean, std, whole_pictures, resize, metadata })
    }
}

/// Converts the model at `path` (a checkpoint's folder, or a safetensors file) to an ONNX file with the metadata of the
/// model's file: `classes`, `mean`, `std`, `image_size` and so on. If `embed`, the output is the embedding, and the
/// last layer is not read. For `fold_batch_norm`, see [`onnx::encode`].
///
/// # Errors
/// Why the model cannot be used.
pub fn to_onnx(path: &Path, embed: bool, fold_batch_norm: bool) -> Result<Vec<u8>, String> {
    let output = if embed { Output::Embedding } else { Output::Logits };
    let ModelFile { network, weights, margin, mut metadata, .. } = ModelFile::read(path, output)?;
    // This key describes the safetensors file, not the model.
    metadata.remove("format");
    let metadata = metadata.into_iter().collect();
    onnx::encode(&network, &weights, margin.as_ref(), fold_batch_norm, &metadata)
        .map_err(|e| format!("{}: {e}", path.display()))
}

impl Model {
    /// Opens a checkpoint's folder, or a `model.safetensors` file.
    ///
    /// # Errors
    /// A sentence that says why the file cannot be used.
    pub(super) fn open(path: &Path, output: Output) -> Result<Self, String> {
        let ModelFile { network, weights, margin, classes, mean, std, whole_pictures, resize, .. } =
            ModelFile::read(path, output)?;
        // The model is not trained, so the optimizer does not matter.
        let config = EngineConfig {
            loss: LossConfig { margin, ..LossConfig::default() },
            sync_batch_norm: false,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            ..EngineConfig::new(BATCH, Optimizer::default())
        };
        let width = network.tensors[network.logits()].len();
        let (image_size, channels) = (network.image_size, network.channels);
        let engine = lockstep_engine::build_cpu(Arc::new(network), &weights, config, Arc::new(SingleRank))
            .map_err(|e| format!("{}: {e}", path.display()))?;
        Ok(Self { engine, width, classes, image_size, channels, mean, std, whole_pictures, resize })
    }

    /// Computes the output of each picture. Labels must be 0 for embeddings. If the weights are so large that sums are
    /// not finite, the result of the picture is an error with the reason.
    pub(super) fn outputs(&mut self, batch: &Batch) -> Result<Vec<Result<Vec<f32>, String>>, String> {
        let outputs = self.engine.predict(batch).map_err(|e| e.to_string())?;
        let check = |values: &[f32]| match values.iter().position(|v| !v.is_finite()) {
            None => Ok(values.to_vec()),
            Some(index) => {
                let output = self.classes.get(index).map_or_else(
                    || format!("value {index} of the embedding"),
                    |class| format!("class {class:?}"),
                );
                Err(format!(
                    "has no result: the model computes {} for {output}; its training has diverged, choose another checkpoint",
                    values[index]
                ))
            }
        };
        Ok(outputs.chunks_exact(self.width).map(check).collect())
    }
}

/// Checks the sizes against the limits of a job, because they determine the memory that is allocated.
fn check_sizes(
    image_size: usize,
    channels: usize,
    classes: usize,
    mean: &[f32],
    std: &[f32],
) -> Result<(), String> {
    if classes > *CLASS_COUNTS.end() {
        return Err(format!(
            "has {classes} classes, but probabilities are computed for at most {} classes; use embeddings (`lockstep predict --embed`, \
             `lockstep evaluate --knn 20`, `lockstep export onnx --embed`)",
            CLASS_COUNTS.end()
        ));
    }
    if !IMAGE_SIZES.contains(&image_size) || ![1, 3].contains(&channels) || !CLASS_COUNTS.contains(&classes) {
        return Err(format!(
            "is not a valid model: {image_size} pixels, {}, {}",
            plural(channels as u64, "channel"),
            plural(classes as u64, "class")
        ));
    }
    let is_valid = |values: &[f32]| values.len() == channels && lockstep_engine::all_finite(values);
    if !is_valid(mean) || !is_valid(std) || std.iter().any(|s| *s <= 0.0) {
        return Err(format!("its mean and std are not valid for {}", plural(channels as u64, "channel")));
    }
    Ok(())
}

/// The length of the short side before the centre crop, if it is within the limits of a job.
fn check_resize(resize: usize, image_size: usize) -> Result<u32, String> {
    match u32::try_from(resize) {
        Ok(side) if (image_size..=MAX_RESIZE).contains(&resize) => Ok(side),
        _ => Err(format!(
            "is not a valid model: pictures resized to {resize} pixels before a crop of {image_size} pixels"
        )),
    }
}

fn parse<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    serde_json::from_str(text).map_err(|e| format!("its metadata: {e}"))
}

/// Softmax, computed in float64 so that the values sum to 1. `logits` must be finite.
pub(super) fn softmax(logits: &[f32]) -> Vec<f32> {
    let log_sum = log_sum_exp(logits);
    logits.iter().map(|v| (f64::from(*v) - log_sum).exp() as f32).collect()
}

/// The cross-entropy of finite logits, where `label` is the correct class.
pub(super) fn cross_entropy(logits: &[f32], label: usize) -> f64 {
    log_sum_exp(logits) - f64::from(logits[label])
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let highest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    highest + logits.iter().map(|v| (f64::from(*v) - highest).exp()).sum::<f64>().ln()
}
