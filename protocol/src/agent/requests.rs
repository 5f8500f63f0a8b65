//! Requests of the server to agents about models and datasets, and the replies.

use crate::{
    allowed::AllowedFolders,
    dataset::{DatasetInfo, PicturesFingerprint, ValidationSet},
    inspect::{EvaluateModel, FitWeights, ModelEvaluation, NamedPicture, Pick, Prediction, Samples},
    spec::DataSpec,
};
use serde::{Deserialize, Serialize};

/// Requests to an agent, because the server opens no dataset itself. Paths are on the agent's machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum AgentRequest {
    /// Whether these files or folders exist. Replied to at once, whatever else the agent is doing.
    HasFiles {
        paths: Vec<String>,
    },
    InspectDataset {
        path: String,
        /// Where the path may lead; anywhere without it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        allowed: Option<AllowedFolders>,
    },
    /// How far an `InspectDataset` of this path is. Replied to at once, whatever else the agent is doing.
    InspectProgress {
        path: String,
    },
    /// Which pictures the dataset at `path` holds. Only an agent sends this, to a process of its own.
    Fingerprint {
        path: String,
        /// The job has started before: only folders are examined, and files only in folders that have changed.
        #[serde(default)]
        known: bool,
    },
    /// Pictures of the dataset at `path`.
    Samples {
        path: String,
        pick: Pick,
        /// Where the path may lead, if it has links by now; anywhere without it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        allowed: Option<AllowedFolders>,
    },
    Evaluate(EvaluateModel),
    /// The pictures that measure a job with `data` on the dataset at `path`, as they are now.
    ValidationSet {
        path: String,
        data: Box<DataSpec>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        allowed: Option<AllowedFolders>,
    },
    /// Whether training can start from these weights. Older agents do not reply.
    FitWeights(FitWeights),
    /// `model`: a checkpoint's folder, or a safetensors file.
    Predict {
        model: String,
        pictures: Vec<NamedPicture>,
    },
}

impl AgentRequest {
    /// The files and folders that the agent needs for it.
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

    /// The queue that it waits in.
    pub fn queue(&self) -> RequestQueue {
        match self {
            AgentRequest::Evaluate(_) => RequestQueue::Long,
            AgentRequest::Predict { .. } => RequestQueue::Predictions,
            _ => RequestQueue::Short,
        }
    }
}

/// Requests wait for those of their own queue alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestQueue {
    /// They take moments.
    Short,
    /// They take as long as what somebody sends: pictures up to a limit.
    Predictions,
    /// They may take minutes.
    Long,
}

/// The reply to each [`AgentRequest`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum AgentReply {
    /// In the order of the request's paths.
    Files {
        there: Vec<bool>,
    },
    /// Why training cannot start from the weights, as a sentence; absent where it can.
    Weights {
        mistake: Option<String>,
    },
    Dataset {
        path: String,
        info: DatasetInfo,
    },
    /// Pictures (or shards) inspected so far and in all; none when no inspection of that path is running.
    Progress {
        inspected: Option<(u64, u64)>,
    },
    /// None of a format whose files are few: those are compared themselves.
    Fingerprint {
        found: Option<PicturesFingerprint>,
    },
    /// Absent where no picture measures the job.
    ValidationSet {
        found: Option<ValidationSet>,
    },
    Samples(Samples),
    Evaluation(Box<ModelEvaluation>),
    Predictions {
        predictions: Vec<Prediction>,
    },
}
