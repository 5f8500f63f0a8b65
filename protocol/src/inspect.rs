//! Requests to an agent to inspect models and datasets, and the replies. The server runs no engine and opens no
//! dataset, so an agent does both for it (`agent::AgentRequest`).

use crate::{
    allowed::AllowedFolders,
    dataset::ValidationSet,
    spec::{DataSpec, JobSpec, ModelSpec},
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Maximum number of requests of one [`RequestQueue`](crate::agent::RequestQueue) that an agent handles at the same time; further
/// requests of this queue wait.
pub const MAX_CONCURRENT_REQUESTS: usize = 2;

/// The beginning of an agent's error if the process that handles requests ended without a reply.
pub const PROCESS_ENDED: &str = "the process that looks at files ended with ";

/// Whether `error`, from an agent, says that the process that handles requests was killed: the agent was killed too, or memory ran out. The
/// same request may then succeed later.
pub fn was_killed(error: &str) -> bool {
    error.strip_prefix(PROCESS_ENDED).is_some_and(|how| how.starts_with("signal"))
}

/// Which pictures of a dataset to return.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "which", rename_all = "snake_case")]
pub enum Pick {
    /// Pictures as stored.
    Stored {
        split: String,
        /// Only pictures of this class.
        class: Option<String>,
        /// Shuffle with this seed; the same seed gives the same order.
        shuffle: Option<u64>,
        offset: u64,
        limit: u32,
    },
    /// Pictures as a job's network sees them.
    Seen {
        data: Box<DataSpec>,
        seed: u64,
        /// Whether `places` are indices in the job's validation pictures; otherwise in its training pictures.
        validation: bool,
        places: Vec<u64>,
        /// Epochs, counted from 0. Each picture is returned once per epoch, with that epoch's augmentation; if empty, once without
        /// augmentation.
        epochs: Vec<u32>,
    },
}

/// A picture to show.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Sample {
    /// The picture's index in its split.
    pub index: u64,
    /// Class, counted from 0.
    pub label: u32,
    /// The epoch whose augmentation the picture shows; absent if it is not augmented.
    pub epoch: Option<u32>,
    /// The picture's file; absent if a file has several pictures.
    pub file: Option<String>,
    /// The picture as PNG, base64.
    pub png: String,
}

/// Pictures of a dataset.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Samples {
    /// Number of pictures that match the request, of which `samples` has some. For pictures with augmentation, the number of pictures of
    /// the split.
    pub total: u64,
    pub classes: Vec<String>,
    pub samples: Vec<Sample>,
}

/// Scores of one class.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ClassScore {
    pub name: String,
    /// Number of validation pictures of this class.
    pub samples: u64,
    /// Fraction of the pictures predicted as this class that belong to it, 0 to 1; 0 if none was predicted.
    pub precision: f64,
    /// Fraction of this class's pictures that were predicted as this class; 0 if the class has no pictures.
    pub recall: f64,
    /// Harmonic mean of precision and recall.
    pub f1: f64,
}

/// The end of a log line that begins with a number of validation pictures: the initial weights were trained on these pictures. A job's
/// diagnosis repeats the line.
pub const TRAINED_VALIDATION: &str = "were training pictures of the run that the weights are from";

/// The mark of an accuracy that was measured on such pictures: `101 trained on`. `sentence` begins with their number.
pub fn trained_mark(sentence: &str) -> String {
    sentence.split_once(' ').map(|(count, _)| format!("{count} trained on")).unwrap_or_default()
}

/// Evaluation of a model on a job's validation pictures, each counted once.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ModelEvaluation {
    pub samples: u64,
    /// Identifies the validation pictures. It equals the checkpoint's `validation` if the run validated the checkpoint on the same
    /// pictures.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation: Option<ValidationSet>,
    /// The validation pictures that the dataset's index lists, including pictures that cannot be decoded. A stored evaluation is current
    /// while the index lists the same pictures.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listed: Option<ValidationSet>,
    /// Number of the validation pictures that the checkpoint was trained on; absent if unknown, for example with another dataset.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trained_on: Option<u64>,
    /// For people: how these pictures differ from the pictures that measured the checkpoint in its run. Absent if they are the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// Fraction of the pictures that were classified correctly, 0 to 1.
    pub accuracy: f64,
    /// The 95 % confidence interval of `accuracy` (Wilson 1927): both ends, 0 to 1.
    pub interval: [f64; 2],
    /// Mean cross-entropy.
    pub loss: f64,
    pub secs: f64,
    pub classes: Vec<ClassScore>,
    /// The confusion matrix: `confusion[a][b]` is the number of pictures of class `a` that were predicted as class `b`.
    pub confusion: Vec<Vec<u64>>,
    /// Wrong predictions with the pictures' indices in their split, the most confident first; at most 5000.
    pub mistakes: Vec<PredictedPicture>,
    /// Some right predictions for each class, for the diagonal cells of the confusion matrix.
    pub right: Vec<PredictedPicture>,
}

/// Default number of neighbours that vote on a picture.
pub const DEFAULT_NEIGHBOURS: u32 = 20;
/// Maximum number of neighbours that vote on a picture.
pub const MAX_NEIGHBOURS: u32 = 1000;

/// Accuracy of a nearest-neighbour classifier on validation pictures: training pictures vote, by the cosine similarity of embeddings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct NearestNeighbours {
    /// Number of neighbours that vote on each picture.
    pub k: u32,
    /// Number of training pictures among which the neighbours are.
    pub gallery: u64,
    /// Number of validation pictures.
    pub samples: u64,
    /// Identifies the validation pictures, as in an evaluation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation: Option<ValidationSet>,
    /// The validation pictures that the dataset's index lists, as in an evaluation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listed: Option<ValidationSet>,
    /// For people: how these pictures differ from the pictures that measured the checkpoint in its run. Absent if they are the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// Accuracy, 0 to 1, if a neighbour's vote has the weight `exp(similarity / 0.07)`.
    pub weighted: f64,
    /// Accuracy, 0 to 1, if all votes have the same weight.
    pub majority: f64,
    pub secs: f64,
}

/// A picture, by its index in its split, with its class `label` and the predicted class, both counted from 0.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PredictedPicture {
    pub index: u64,
    pub label: u32,
    pub predicted: u32,
    /// Probability of the predicted class, 0 to 1.
    pub confidence: f32,
}

/// A picture to classify.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NamedPicture {
    pub name: String,
    /// The picture's file, base64.
    pub content: String,
}

/// A model's prediction for a picture.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Prediction {
    /// The name that was sent with the picture.
    pub name: String,
    /// Every class, the most probable first; empty with an `error` or an `embedding`.
    pub classes: Vec<Probability>,
    /// The input of the network's last layer, if the request asked for it in place of classes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embedding: Option<Vec<f32>>,
    /// Why the picture cannot be read, or why the model makes no prediction.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The probability of a class.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Probability {
    pub class: String,
    /// Probability, 0 to 1; the probabilities of all classes sum to 1.
    pub probability: f32,
}

/// Asks whether a file of weights fits a network. The path is on the agent's machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FitWeights {
    /// A safetensors file, a checkpoint's folder, or a name of downloaded weights.
    pub weights: String,
    pub model: ModelSpec,
    /// Side of the input in validation, in pixels, which decides the network's stem.
    pub image_size: u32,
    pub channels: u32,
    pub classes: u32,
    /// Folders in which the file of weights may be; any folder if absent.
    pub allowed: Option<AllowedFolders>,
}

/// A checkpoint, and the dataset on which it is evaluated. Paths are on the agent's machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EvaluateModel {
    /// A checkpoint's folder, or a safetensors file.
    pub model: String,
    pub dataset: String,
    pub spec: Box<JobSpec>,
    /// Folders to which the dataset's path may lead if it has links; any folder if absent.
    pub allowed: Option<AllowedFolders>,
    /// Evaluate by this number of nearest neighbours instead of the network's scores.
    pub neighbours: Option<u32>,
}
