//! Requests of the server to agents about models and datasets, and the replies.

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

/// Requests to an agent, because the server itself opens no dataset. Paths are on the agent's machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum AgentRequest {
    /// Whether these files or folders exist. Answered at once, even if the agent is busy.
    HasFiles {
        paths: Vec<String>,
    },
    InspectDataset {
        path: String,
        /// Folders to which the path may lead; any folder if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        allowed: Option<AllowedFolders>,
    },
    /// Progress of an `InspectDataset` of this path. Answered at once, even if the agent is busy.
    InspectProgress {
        path: String,
    },
    /// The fingerprint of the pictures in the dataset at `path`. Only an agent sends this, to a child process.
    Fingerprint {
        path: String,
        /// The job has started before: only folders, and files in changed folders, are examined.
        known: bool,
    },
    /// Pictures of the dataset at `path`.
    Samples {
        path: String,
        pick: Pick,
        /// Folders to which the path may lead if it has links; any folder if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        allowed: Option<AllowedFolders>,
    },
    Evaluate(EvaluateModel),
    /// The pictures in the dataset at `path` that would validate a job with `data` now.
    ValidationSet {
        path: String,
        data: Box<DataSpec>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        allowed: Option<AllowedFolders>,
    },
    /// Whether training can start from these weights.
    FitWeights(FitWeights),
    /// `model`: a checkpoint's folder, or a safetensors file.
    Predict {
        model: String,
        pictures: Vec<NamedPicture>,
        /// Reply with embeddings in place of classes.
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

    /// The queue in which the request waits.
    pub fn queue(&self) -> RequestQueue {
        match self {
            AgentRequest::Evaluate(_) => RequestQueue::Long,
            AgentRequest::Predict { .. } => RequestQueue::Predictions,
            _ => RequestQueue::Short,
        }
    }
}

/// Requests wait only for other requests of their own queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestQueue {
    /// Requests that take less than a second.
    Short,
    /// Requests whose time depends on the number of sent pictures, up to a limit.
    Predictions,
    /// Requests that may take minutes.
    Long,
}

/// The reply to each [`AgentRequest`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum AgentReply {
    /// Results in the order of the request's paths.
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
    /// Pictures (or shards) inspected so far and in all; `None` if no inspection of that path is running.
    Progress {
        inspected: Option<(u64, u64)>,
    },
    Fingerprint {
        found: PicturesFingerprint,
    },
    /// Absent if no picture validates the job.
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
