//! The bundle that a launch passes to its agents: the server's address and CA, and each agent's identity and token. The bundle is sent over
//! standard input, in an environment variable or in a file (0600), never on a command line.

use super::super::usage_error;
use lockstep_protocol::{JobId, numbers::plural, spec::Device};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, path::PathBuf};

/// Maximum size of a bundle: 256 nodes with a few hundred bytes of environment variables each, and a CA file.
pub(super) const BUNDLE_BYTES: u64 = 1 << 20;

/// The maximum size of a bundle for one way to pass it, and the advice with which the error for a larger bundle ends.
pub(super) struct Limit {
    pub(super) bytes: u64,
    pub(super) advice: &'static str,
}

/// The limit of a bundle on standard input or in a file.
pub(super) const AGENT_LIMIT: Limit = Limit {
    bytes: BUNDLE_BYTES,
    advice: "an agent accepts at most 1 MiB: start fewer machines, or give a smaller --ca-file",
};

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
    /// Exit status 2 if the text exceeds the limit.
    pub(super) fn to_json(&self, limit: &Limit) -> anyhow::Result<String> {
        let text = serde_json::to_string(self)?;
        if text.len() as u64 <= limit.bytes {
            return Ok(text);
        }
        let agents = plural(self.nodes.len() as u64, "agent");
        let ca = self.ca.as_ref().map_or(0, String::len);
        let ca_note = if ca > 0 { format!(", {ca} of them from --ca-file") } else { String::new() };
        let (size, advice) = (text.len(), limit.advice);
        Err(usage_error(format!(
            "the bundle (addresses and tokens) for {agents} has {size} bytes{ca_note}, and {advice}"
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
pub(super) mod tests {
    use super::*;

    /// Checks that a bundle of `max_bytes` bytes is accepted, and that one byte more gives an error whose text contains `phrases`.
    pub(in crate::cli::launch) fn assert_max(max_bytes: usize, limit: &Limit, phrases: &[&str]) {
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
        assert_eq!(bundle(max_bytes).to_json(limit).expect("it fits").len(), max_bytes);
        let size = max_bytes + 1;
        let message = bundle(size).to_json(limit).expect_err("it is one byte too long").to_string();
        assert!(
            message
                .starts_with(&format!("the bundle (addresses and tokens) for 0 agents has {size} bytes, ")),
            "{message}"
        );
        for phrase in phrases.iter().chain(&["of them from --ca-file", "a smaller --ca-file"]) {
            assert!(message.contains(phrase), "{phrase:?} is not in {message:?}");
        }
    }
}
