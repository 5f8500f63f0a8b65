//! Requests about models and datasets, and the replies.

use crate::{
    allowed::AllowedFolders,
    dataset::{DatasetInfo, PicturesFingerprint, ValidationSet},
    inspect::{
        EvaluateModel, FitWeights, ModelEvaluation, NamedPicture, NearestNeighbours, Pick, Prediction,
        Samples,
    },
    spec::DataSpec,
};
use serde::{Deserialize, Serialize};

/// Requests about datasets and models. The server sends them to an agent, because it opens no dataset itself, and the
/// agent to its process `lockstep inspect`. Paths are on the agent's machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum AgentRequest {
    /// Whether these files or folders exist. The agent replies at once, even if it is busy.
    HasFiles {
        paths: Vec<String>,
    },
    InspectDataset {
        path: String,
        /// Folders to which the path may lead; any folder if absent.
        allowed: Option<AllowedFolders>,
    },
    /// Progress of an `InspectDataset` of this path. The agent replies at once, even if it is busy.
    InspectProgress {
        path: String,
    },
    /// The fingerprint of the pictures in the dataset at `path`. Only agents send this request, to their process `lockstep inspect`.
    Fingerprint {
        path: String,
        /// Whether the job has started before. Then only folders, and the files of changed folders, are examined.
        has_begun: bool,
    },
    /// Pictures of the dataset at `path`.
    Samples {
        path: String,
        pick: Pick,
        /// Folders to which the path may lead if it has links; any folder if absent.
        allowed: Option<AllowedFolders>,
    },
    Evaluate(EvaluateModel),
    /// The pictures in the dataset at `path` that would validate a job with `data` now.
    ValidationSet {
        path: String,
        data: Box<DataSpec>,
        allowed: Option<AllowedFolders>,
    },
    /// Whether training can start from these weights.
    FitWeights(FitWeights),
    /// Classifies pictures, or computes their embeddings. `model`: a checkpoint's folder or a safetensors file.
    Predict {
        model: String,
        pictures: Vec<NamedPicture>,
        /// Whether the reply has embeddings instead of classes.
        embed: bool,
    },
}

impl AgentRequest {
    /// The files and folders that the agent needs for the request.
    pub fn paths(&self) -> Vec<String> {
        match self {
            AgentRequest::HasFiles { paths } => paths.clone(),
            AgentRequest::InspectDataset { path, .. }
            | AgentRequest::InspectProgress { path }
            | AgentRequest::Fingerprint { path, .. }
            | AgentRequest::ValidationSet { path, .. }
            | AgentRequest::Samples { path, .. } => vec![path.clone()],
            AgentRequest::Evaluate(EvaluateModel { model, dataset, .. }) => {
                vec![model.clone(), dataset.clone()]
            }
            AgentRequest::Predict { model, .. } => vec![model.clone()],
            AgentRequest::FitWeights(FitWeights { weights, .. }) => vec![weights.clone()],
        }
    }

    /// Groups requests of similar duration. The agent has further queues for `HasFiles` and `InspectProgress`
    /// (`worker/src/inspect/mod.rs`).
    pub fn queue(&self) -> RequestQueue {
        match self {
            AgentRequest::InspectDataset { .. } => RequestQueue::Inspections,
            AgentRequest::Evaluate(_) => RequestQueue::Long,
            AgentRequest::Predict { .. } => RequestQueue::Predictions,
            _ => RequestQueue::Short,
        }
    }
}

/// Requests wait only for other requests of their own queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestQueue {
    /// Inspections of datasets. Inspecting a million pictures uses all cores for minutes.
    Inspections,
    /// All other requests. Most read at most the index and a few pictures of a dataset; `Fingerprint` examines every file.
    Short,
    /// Predictions, whose time depends on the number of pictures in the request, which is limited.
    Predictions,
    /// Evaluations, which may take minutes.
    Long,
}

/// The replies to [`AgentRequest`]s.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum AgentReply {
    /// Whether each of the request's paths exists, in their order.
    Files {
        there: Vec<bool>,
    },
    /// Why training cannot start from the weights, as a sentence; absent if it can.
    Weights {
        mistake: Option<String>,
    },
    Dataset {
        path: String,
        info: DatasetInfo,
    },
    /// The numbers of pictures (or shards) inspected so far and in all; `None` if no inspection of the path is running.
    Progress {
        inspected: Option<(u64, u64)>,
    },
    Fingerprint {
        found: PicturesFingerprint,
    },
    /// The validation pictures; `found` is absent if no picture validates the job.
    ValidationSet {
        found: Option<ValidationSet>,
    },
    Samples(Samples),
    Evaluation(Box<ModelEvaluation>),
    Neighbours(NearestNeighbours),
    Predictions {
        predictions: Vec<Prediction>,
    },
}
