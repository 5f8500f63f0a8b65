//! What a launch hands to its agents: the server's address and authority, and each its identity and token. It goes over standard
//! input, in an environment or in a file (0600), never on a command line.

use lockstep_protocol::{JobId, spec::Device};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, path::PathBuf};

/// 256 nodes with an environment of some hundred bytes each, and a CA file.
pub(super) const BUNDLE_BYTES: u64 = 1 << 20;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Bundle {
    pub(super) server: String,
    /// Certificates (PEM).
    #[serde(default)]
    pub(super) ca: Option<String>,
    pub(super) job: JobId,
    /// For the agents' state, from the home directory.
    pub(super) dir: PathBuf,
    /// In the order in which the launcher numbers its processes.
    pub(super) nodes: Vec<Node>,
    /// The agents run in pods of a Job of Kubernetes, which starts another pod for each that ends without success.
    #[serde(default)]
    pub(super) in_pod: bool,
}

/// An agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Node {
    pub(super) name: String,
    /// The machine's name in the list; empty where the launcher chooses.
    #[serde(default)]
    pub(super) host: String,
    pub(super) agent_id: String,
    pub(super) token: String,
    pub(super) slots: u32,
    pub(super) device: Device,
    /// Numbers of its GPUs; none: the first ones.
    #[serde(default)]
    pub(super) gpus: Vec<u32>,
    #[serde(default)]
    pub(super) env: BTreeMap<String, String>,
}
