//! How an agent runs, and why it ended.

use super::{place::Datasets, state_dir::StateDirError};
use crate::{rank::TO_LEAVE_SECS, tls::IdentityFiles};
use lockstep_protocol::job::JobId;
use std::path::PathBuf;

/// How an agent runs.
#[derive(Debug, Clone)]
pub struct Options {
    /// `http://HOST:PORT` or `https://HOST:PORT`.
    pub server: String,
    /// Authorities that are trusted besides the system's, for `https` (PEM).
    pub ca_file: Option<PathBuf>,
    /// Sent as `Authorization: Bearer`.
    pub token: Option<String>,
    /// The certificate by which the agent shows who it is, for `https`; read again for each connection.
    pub identity: Option<IdentityFiles>,
    /// Join a server on another machine without TLS.
    pub insecure_http: bool,
    /// Shown on the dashboard; when absent the name in the certificate, or the host's.
    pub name: Option<String>,
    /// The agent's own folder.
    pub dir: PathBuf,
    /// CPU slots, whatever GPUs there are. When absent, one slot per GPU; without GPUs, one per core.
    pub cpu_slots: Option<u32>,
    /// The GPUs to use, among the visible ones: numbers or UUIDs, separated by commas.
    pub gpus: Option<String>,
    /// Serve this job alone, and end with it.
    pub only_job: Option<JobId>,
    /// Do not end with an attempt of this job, but when the job is over; a signal before that is reported as [`AgentError::Signalled`].
    pub until_final: bool,
    /// The address by which ranks of other machines reach the ranks here. When absent, that of `interface`, or of this end of the
    /// connection to the server.
    pub advertise: Option<String>,
    /// The network interface that ranks use among machines.
    pub interface: Option<String>,
    /// The program that ranks run, started with `rank FILE ...`; this very binary when absent.
    pub program: Option<PathBuf>,
    /// Most disk space for records that no server has taken; when it is used up, ranks write a checkpoint and end.
    pub spool_bytes: u64,
    /// End when the process that started this one has ended and no rank is alive here.
    pub follow_parent: bool,
    /// Where this machine has the server's datasets.
    pub datasets: Datasets,
    /// Where copies of datasets are kept that this machine has not; when absent, in the agent's own folder.
    pub dataset_cache: Option<PathBuf>,
    /// What these copies may have together; 0: nothing is copied.
    pub dataset_cache_bytes: u64,
    /// From SIGTERM to SIGKILL, for this agent and its ranks alike: what whoever starts it does to end it.
    pub killed_after_secs: u32,
}

impl Options {
    /// How long ranks that are asked to end have for their step and its checkpoint.
    pub(super) fn stop_within_secs(&self) -> u32 {
        self.killed_after_secs.saturating_sub(TO_LEAVE_SECS).max(1)
    }
}

/// Why an agent ended.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// It was asked for something impossible.
    #[error("{0}")]
    Wrong(String),
    /// Its folder.
    #[error(transparent)]
    StateDir(#[from] StateDirError),
    /// The server does not want it.
    #[error("the server at {server} refused this agent: {reason}")]
    Refused {
        /// The server's address.
        server: String,
        /// What it said.
        reason: String,
    },
    /// The one job that it served has failed.
    #[error("the job failed on this agent")]
    JobFailed,
    /// A signal came before the one job that it served was over.
    #[error("a signal ended this agent before its job was over")]
    Signalled,
    /// The system.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

impl AgentError {
    /// Whether the request was wrong, rather than something failed while running.
    pub fn is_wrong_request(&self) -> bool {
        matches!(self, AgentError::Wrong(_) | AgentError::StateDir(_))
    }
}
