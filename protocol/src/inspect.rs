//! Inspecting models and datasets: what the requests to an agent and its replies hold. The server runs no engine and opens
//! no dataset, so an agent does both for it (`agent::AgentRequest`).

use crate::{
    allowed::AllowedFolders,
    dataset::ValidationSet,
    spec::{DataSpec, JobSpec, ModelSpec},
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Requests of a queue that an agent works on at the same time; others wait.
pub const CONCURRENT_REQUESTS: usize = 2;

/// How an agent's error begins when the process that was to reply has ended without a reply.
pub const PROCESS_ENDED: &str = "the process that looks at files ended with ";

/// Whether an agent's error says that its process was killed (with the agent, or as memory ran out), which is no fault of the
/// request.
pub fn was_killed(refusal: &str) -> bool {
    refusal.strip_prefix(PROCESS_ENDED).is_some_and(|how| how.starts_with("signal"))
}

/// Which pictures of a dataset.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "which", rename_all = "snake_case")]
pub enum Pick {
    /// As they lie there, in order.
    Stored {
        split: String,
        /// Pictures of this class only.
        class: Option<String>,
        /// Mixed by this seed instead: the same order for the same seed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        shuffle: Option<u64>,
        offset: u64,
        limit: u32,
    },
    /// As a job sees them: places of its training or its validation pictures.
    Seen {
        data: Box<DataSpec>,
        seed: u64,
        validation: bool,
        places: Vec<u64>,
        /// Augmented as in each of these epochs, from 0; not augmented when there are none.
        epochs: Vec<u32>,
    },
}

/// A picture to show.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Sample {
    /// Its place in its split.
    pub index: u64,
    /// Class, counted from 0.
    pub label: u32,
    /// Epoch whose augmentation it shows; absent when it shows none.
    pub epoch: Option<u32>,
    /// The file that it is, where it is one.
    pub file: Option<String>,
    /// PNG, base64.
    pub png: String,
}

/// Pictures of a dataset.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Samples {
    /// So many match; of augmented pictures, so many can be augmented.
    pub total: u64,
    pub classes: Vec<String>,
    pub samples: Vec<Sample>,
}

/// Scores of one class.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ClassScore {
    pub name: String,
    /// Validation pictures of this class.
    pub samples: u64,
    /// Share of the pictures taken for it that are of it, 0 to 1; 0 when none was.
    pub precision: f64,
    /// Share of its pictures that were taken for it.
    pub recall: f64,
    /// Harmonic mean of the two.
    pub f1: f64,
}

/// A model on a job's validation pictures, each counted once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ModelEvaluation {
    pub samples: u64,
    /// Which pictures these are. Those of the checkpoint's run are the `validation` of the checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation: Option<ValidationSet>,
    /// The validation pictures that the dataset's index lists, including pictures that cannot be decoded. A stored evaluation is current
    /// while the index lists the same pictures.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listed: Option<ValidationSet>,
    /// How many of them the checkpoint was trained on; absent where that is not known, as of another dataset's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trained_on: Option<u64>,
    /// For people: how they differ from the pictures that measured the checkpoint in its run. Absent where they are the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// 0 to 1.
    pub accuracy: f64,
    /// Mean cross-entropy.
    pub loss: f64,
    pub secs: f64,
    pub classes: Vec<ClassScore>,
    /// `confusion[a][b]`: pictures of class `a` taken for class `b`.
    pub confusion: Vec<Vec<u64>>,
    /// Places of wrongly predicted pictures in their split, most confident first; at most 5000.
    pub mistakes: Vec<Mistake>,
    /// Some rightly predicted ones of each class, for the cells of the diagonal.
    pub right: Vec<Mistake>,
}

/// A picture and what it was taken for.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Mistake {
    pub index: u64,
    pub label: u32,
    pub predicted: u32,
    /// Probability that the model gave to what it said, 0 to 1.
    pub confidence: f32,
}

/// A picture to classify.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NamedPicture {
    pub name: String,
    /// A picture's file, base64.
    pub content: String,
}

/// What a model says of a picture.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Prediction {
    /// As it was sent.
    pub name: String,
    /// Every class, most probable first; empty when there is an `error`.
    pub classes: Vec<Probability>,
    /// Why it cannot be read, or the model has no answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// How probable a class is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Probability {
    pub class: String,
    /// 0 to 1; they sum to 1.
    pub probability: f32,
}

/// Weights and the network that is to start from them; the path is on the machine of the agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FitWeights {
    /// A safetensors file, or a checkpoint's folder.
    pub weights: String,
    pub model: ModelSpec,
    /// Pixels of the input's side where the network is measured, which decides its stem.
    pub image_size: u32,
    pub channels: u32,
    pub classes: u32,
    /// Where the file of weights may be; anywhere without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allowed: Option<AllowedFolders>,
}

/// A checkpoint and the dataset to evaluate it on; paths are on the machine of the agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EvaluateModel {
    /// A checkpoint's folder, or a safetensors file.
    pub model: String,
    pub dataset: String,
    pub spec: Box<JobSpec>,
    /// Where the dataset's path may lead, if it has links by now; anywhere without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allowed: Option<AllowedFolders>,
}
