//! The data that a change of a job reads and edits, and its refusals. The store keeps it and knows no more of the rules.

use super::progress::Progress;
use jiff::Timestamp;
use lockstep_protocol::{
    agent::{AttemptRef, FencingToken},
    attempt::AttemptState,
    job::{Job, JobState, Parent},
    reason::Reason,
};

/// A job with the fields that only the server uses.
#[derive(Debug, Clone, PartialEq)]
pub struct JobRow {
    /// As it is shown.
    pub job: Job,
    /// The state that the newest event has told.
    pub announced: JobState,
    /// Why its ranks are being stopped at somebody's wish.
    pub stop: Option<Reason>,
    /// What a fork that others see began from, where they do not see that: then `job` does not show it.
    pub private_parent: Option<Parent>,
    /// Failed or lost attempts since it was last submitted or retried.
    pub restarts: u32,
    /// When it went back to the queue; none for one that has waited since its submission.
    pub waiting_since: Option<Timestamp>,
    /// Fencing token of the attempt that may write.
    pub fencing_token: Option<FencingToken>,
    /// What its newest values and its sparkline come from.
    pub progress: Progress,
    /// How the attempt that held the fencing token ended, until that is stored.
    pub ended: Option<AttemptEnd>,
    /// The stored state, when this version does not know it, and what it is shown as: running while an attempt may write,
    /// else failed. It stays as it is until the attempt's end makes another of it.
    pub unknown_state: Option<(String, JobState)>,
}

impl JobRow {
    /// Whether it continues another job's run.
    pub fn is_fork(&self) -> bool {
        self.job.parent.is_some() || self.private_parent.is_some()
    }

    /// The attempt that may write, if there is one.
    pub fn live(&self) -> Option<AttemptRef> {
        let job = &self.job;
        self.fencing_token.map(|fencing_token| AttemptRef {
            job: job.id.clone(),
            attempt: job.attempt,
            fencing_token,
        })
    }
}

/// How an attempt ended, to be kept with it.
#[derive(Debug, Clone, PartialEq)]
pub struct AttemptEnd {
    /// Its own, not the job's.
    pub state: AttemptState,
    /// None when it succeeded.
    pub reason: Option<Reason>,
    /// Whether its ranks ever trained: if not, the job's steps are not this attempt's.
    pub trained: bool,
}

/// A request that a job's state forbids.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{detail}")]
pub struct Refused {
    /// The state.
    pub state: JobState,
    /// Why not, and what can be done.
    pub detail: String,
}
