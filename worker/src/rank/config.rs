//! The configuration of a rank process, written by the program that starts it.

use lockstep_engine::{DeviceChoice, registry};
use lockstep_host::gpu::RankGpu;
use lockstep_protocol::agent::StartAttempt;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The configuration of a rank process: the file `rank.<r>.json` in its attempt's folder.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankConfig {
    /// The attempt, with `master_port` already chosen.
    pub start: StartAttempt,
    /// This process's rank, from 0.
    pub rank: u32,
    /// The slot it runs in.
    pub slot: u32,
    /// Ranks of the attempt on this machine.
    pub local_ranks: u32,
    /// Threads of this rank.
    pub threads: u32,
    /// Absent: it computes on CPU cores.
    #[serde(default)]
    pub gpu: Option<RankGpu>,
    /// The file with the deadline of its agent's lease; absent where there is no agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<PathBuf>,
    /// The job's folder; this attempt's is in `attempts` in it.
    pub job_dir: PathBuf,
    /// Seconds after SIGTERM that the rank waits for its step and the checkpoint.
    #[serde(default = "stop_within_secs")]
    pub stop_within_secs: u32,
}

/// The default: the usual time between SIGTERM and SIGKILL (Slurm and Kubernetes: 30 s), less [`TO_LEAVE_SECS`].
pub fn stop_within_secs() -> u32 {
    KILLED_AFTER_SECS - TO_LEAVE_SECS
}

/// The default of Slurm's KillWait and of a pod's terminationGracePeriodSeconds.
pub const KILLED_AFTER_SECS: u32 = 30;
/// For ranks to end after that, and for their agent to report how.
pub const TO_LEAVE_SECS: u32 = 10;

impl RankConfig {
    /// The attempt's folder.
    pub fn attempt_dir(&self) -> PathBuf {
        self.job_dir.join("attempts").join(self.start.attempt.folder_name())
    }

    /// Where it computes.
    pub fn device(&self) -> DeviceChoice {
        registry::device_of(self.gpu.as_ref(), self.start.spec.parallel.device)
    }

    /// Where the job's checkpoints are.
    pub fn checkpoints_dir(&self) -> PathBuf {
        self.job_dir.join("checkpoints")
    }
}
