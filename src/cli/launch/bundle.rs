//! The bundle that a launch passes to its agents: the server's address and CA, and each agent's identity and token. The bundle is sent over
//! standard input, in an environment variable or in a file (0600), never on a command line.

use super::super::usage_error;
use lockstep_protocol::{JobId, numbers::plural, spec::Device};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, path::PathBuf};

/// Maximum size of a bundle: 256 nodes with a few hundred bytes of environment variables each, and a CA file. Also the limit of a Secret
/// in Kubernetes.
pub(super) const BUNDLE_BYTES: u64 = 1 << 20;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Bundle {
    pub(super) server: String,
    /// CA certificates that the agents trust in addition to the system's (PEM), from `--ca-file`.
    pub(super) ca: Option<String>,
    pub(super) job: JobId,
    /// Folder for the agents' state, relative to the home directory.
    pub(super) dir: PathBuf,
    /// The agents, one for each machine, in the order in which the launcher numbers its processes.
    pub(super) nodes: Vec<Node>,
    /// Whether the agents run in pods of a Kubernetes Job, which replaces each pod that ends without success.
    #[serde(default)]
    pub(super) in_pod: bool,
}

impl Bundle {
    /// Returns the bundle as JSON.
    ///
    /// # Errors
    /// Exit status 2 if the text has more than `max_bytes` bytes, the limit of the way in which the launcher passes the bundle.
    pub(super) fn to_json(&self, max_bytes: u64) -> anyhow::Result<String> {
        let text = serde_json::to_string(self)?;
        if text.len() as u64 <= max_bytes {
            return Ok(text);
        }
        let agents = plural(self.nodes.len() as u64, "agent");
        let (size, ca) = (text.len(), self.ca.as_ref().map_or(0, String::len));
        Err(usage_error(format!(
            "the bundle (addresses and tokens) for {agents} has {size} bytes, {ca} of them from --ca-file, and this launcher can pass at \
             most {} KiB to agents: start fewer machines, or give a smaller --ca-file (--with ssh passes to each agent only its own part)",
            max_bytes >> 10
        )))
    }
}

/// The part of the bundle for one agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Node {
    pub(super) name: String,
    /// The machine's name in the list of machines. Empty if the launcher chooses the machine.
    #[serde(default)]
    pub(super) host: String,
    pub(super) agent_id: String,
    pub(super) token: String,
    pub(super) slots: u32,
    pub(super) device: Device,
    /// Indexes of the agent's GPUs. If empty, the first GPUs are used.
    #[serde(default)]
    pub(super) gpus: Vec<u32>,
    #[serde(default)]
    pub(super) env: BTreeMap<String, String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bundle_beyond_its_limit_is_refused() {
        let bundle = |bytes: usize| {
            let mut bundle = Bundle {
                server: "http://head:7070".into(),
                ca: Some(String::new()),
                job: JobId::generate(),
                dir: "launch".into(),
                nodes: Vec::new(),
                in_pod: false,
            };
            let bytes_without_ca = serde_json::to_string(&bundle).unwrap().len();
            bundle.ca = Some("c".repeat(bytes - bytes_without_ca));
            bundle
        };
        let max_bytes = 120 << 10;
        assert_eq!(bundle(max_bytes).to_json(max_bytes as u64).unwrap().len(), max_bytes);
        let message = bundle(max_bytes + 1).to_json(max_bytes as u64).unwrap_err().to_string();
        for words in ["for 0 agents has 122881 bytes, ", "of them from --ca-file", "at most 120 KiB"] {
            assert!(message.contains(words), "{words:?} is not in {message:?}");
        }
    }
}
