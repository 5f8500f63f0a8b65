//! The configuration of a rank process, written by the program that starts it.

use lockstep_engine::{DeviceChoice, registry};
use lockstep_host::gpu::RankGpu;
use lockstep_protocol::agent::StartAttempt;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The configuration of a rank process: the file `rank.<r>.json` in its attempt's folder.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankConfig {
    /// The server's order to start the attempt, with a `master_port`.
    pub start: StartAttempt,
    pub rank: u32,
    pub slot: u32,
    /// The number of the attempt's ranks on this machine.
    pub local_ranks: u32,
    pub threads: u32,
    /// The GPU. Absent if the rank computes on CPU cores.
    pub gpu: Option<RankGpu>,
    /// The file with the deadline of the agent's lease. Absent if there is no agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<PathBuf>,
    /// The job's folder. The attempt's folder is in `attempts` below it.
    pub job_dir: PathBuf,
    /// Seconds after SIGTERM during which the rank may finish its step and the checkpoint.
    pub stop_within_secs: u32,
}

/// The default of [`RankConfig::stop_within_secs`]: the usual time between SIGTERM and SIGKILL (Slurm and Kubernetes:
/// 30 s), minus [`TO_LEAVE_SECS`].
pub const STOP_WITHIN_SECS: u32 = KILLED_AFTER_SECS - TO_LEAVE_SECS;
/// Time from SIGTERM to SIGKILL: the default of Slurm's KillWait and of Kubernetes' terminationGracePeriodSeconds.
pub const KILLED_AFTER_SECS: u32 = 30;
/// The part of [`KILLED_AFTER_SECS`] that is reserved for ranks to exit, and for their agent to report their end.
pub const TO_LEAVE_SECS: u32 = 10;

impl RankConfig {
    pub fn attempt_dir(&self) -> PathBuf {
        self.job_dir.join("attempts").join(self.start.attempt.folder_name())
    }

    pub fn device(&self) -> DeviceChoice {
        registry::device_of(self.gpu.as_ref(), self.start.spec.parallel.device)
    }

    pub fn checkpoints_dir(&self) -> PathBuf {
        self.job_dir.join("checkpoints")
    }
}
