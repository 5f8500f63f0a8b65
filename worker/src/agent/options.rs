//! The options of an agent, and the reasons why it ends.

use super::place::Datasets;
use crate::{rank::TO_LEAVE_SECS, tls::IdentityFiles};
use lockstep_protocol::{agent::Slot, job::JobId};
use std::path::PathBuf;

#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The server's address: `http://HOST:PORT` or `https://HOST:PORT`.
    pub server: String,
    /// CA certificates trusted in addition to the system's, for `https` (PEM).
    pub ca_file: Option<PathBuf>,
    /// The token, sent as `Authorization: Bearer`.
    pub token: Option<String>,
    /// The agent's client certificate for `https`, read again for each connection.
    pub identity: Option<IdentityFiles>,
    /// Whether to join a server on another machine without TLS.
    pub insecure_http: bool,
    /// The name shown on the dashboard. If absent, the name in the certificate, or the host's.
    pub name: Option<String>,
    pub dir: PathBuf,
    /// The number of CPU slots, even if there are GPUs. If absent, one slot per GPU, or one per core without GPUs.
    pub cpu_slots: Option<u32>,
    /// The GPUs to use, among the visible GPUs: indices or UUIDs, separated by commas.
    pub gpus: Option<String>,
    /// Serve only this job, and end with it.
    pub only_job: Option<JobId>,
    /// End when `only_job` has finished, rather than after an attempt of this job. A signal before the job's end is
    /// reported as [`AgentError::Signalled`].
    pub until_final: bool,
    /// The address at which ranks of other machines reach the ranks of this machine. If absent, the address of
    /// `interface`, or the local address of the connection to the server.
    pub advertise: Option<String>,
    /// The network interface for connections of ranks on different machines.
    pub interface: Option<String>,
    /// The executable of ranks, started with `rank FILE ...`. If absent, this executable.
    pub program: Option<PathBuf>,
    /// Maximum disk space for records that the server has not stored. When it is used up, ranks write a checkpoint and
    /// end.
    pub spool_bytes: u64,
    /// End when the parent process has ended and no rank is alive on this machine.
    pub follow_parent: bool,
    /// The paths of the server's datasets on this machine.
    pub datasets: Datasets,
    /// The folder for copies of datasets that this machine does not have. If absent, it is in the agent's own folder.
    pub dataset_cache: Option<PathBuf>,
    /// Maximum disk space of all copies. 0 disables copies.
    pub dataset_cache_bytes: u64,
    /// Time from SIGTERM to SIGKILL, for this agent and its ranks, as configured in the program that runs the agent.
    pub killed_after_secs: u32,
    /// The GPUs that are kept open for the next rank.
    pub warm: Warm,
}

/// GPUs with at least this much memory can spare about 0.5 GB for the context of a waiting process.
const MIN_WARM_BYTES: u64 = 40_000_000_000;

/// The GPUs on which an agent keeps a spare process with an open GPU context, also while a rank trains on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Warm {
    /// GPUs with at least 40 GB of memory.
    #[default]
    Auto,
    On,
    Off,
}

impl Warm {
    pub(super) fn includes(self, slot: &Slot) -> bool {
        match self {
            Self::Auto => slot.memory_bytes >= MIN_WARM_BYTES,
            Self::On => true,
            Self::Off => false,
        }
    }
}

impl Options {
    /// How long ranks that are asked to end may take for their step and checkpoint.
    pub(super) fn stop_within_secs(&self) -> u32 {
        self.killed_after_secs.saturating_sub(TO_LEAVE_SECS).max(1)
    }
}

/// Why an agent ended.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The options are invalid, or name a folder that cannot be used.
    #[error("{0}")]
    InvalidOptions(String),
    #[error("the server at {server} refused this agent: {reason}")]
    Refused { server: String, reason: String },
    #[error("the job failed on this agent")]
    JobFailed,
    /// A signal arrived before the agent's only job had finished.
    #[error("a signal ended this agent before its job was over")]
    Signalled,
    #[error(transparent)]
    Io(#[from] std::io::Error),
}
