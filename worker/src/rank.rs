//! One rank of an attempt: rendezvous, engine, training, and how it ends.

use lockstep_protocol::agent::StartAttempt;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// What a rank process is told, as the file `rank.<r>.json` in its attempt's folder.
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
    /// The job's folder; this attempt's is `attempts/<n>` in it.
    pub job_dir: PathBuf,
}

impl RankConfig {
    /// The attempt's folder.
    pub fn attempt_dir(&self) -> PathBuf {
        self.job_dir.join("attempts").join(self.start.attempt.attempt.to_string())
    }
}

/// Exit status of a rank whose training is done.
pub const EXIT_FINISHED: i32 = 0;
/// Exit status of a rank that failed; its last record is `RankFailed`.
pub const EXIT_FAILED: i32 = 1;
/// Exit status of a rank that was told to stop (SIGTERM or SIGINT).
pub const EXIT_STOPPED: i32 = 3;
