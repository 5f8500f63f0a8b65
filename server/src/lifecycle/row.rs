//! The data that the rules of the lifecycle read and edit, and refusals of requests. The store only stores this data.

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
    /// The job as clients see it.
    pub job: Job,
    /// The state in the newest state event.
    pub announced_state: JobState,
    /// The reason if a user has cancelled the job and its ranks are still being stopped.
    pub cancel_reason: Option<Reason>,
    /// The parent of a fork, if people who can see the fork may not see the parent. `job` then has no parent.
    pub private_parent: Option<Parent>,
    /// Number of failed or lost attempts that count as restarts, since the job was last submitted, resumed or retried.
    pub restarts: u32,
    /// When the job returned to the queue. `None` if it has waited since its submission.
    pub waiting_since: Option<Timestamp>,
    /// Fencing token of the attempt that may write.
    pub fencing_token: Option<FencingToken>,
    /// The state from which the job's newest values and its sparkline are computed.
    pub progress: Progress,
    /// The end of the attempt that held the fencing token, until the end is stored.
    pub attempt_end: Option<AttemptEnd>,
    /// The stored state if this version does not know it, and the state that is shown instead: running while an attempt may write,
    /// otherwise failed. The stored state is kept until the attempt's end.
    pub unknown_state: Option<(String, JobState)>,
}

impl JobRow {
    /// A new job for tests.
    #[cfg(test)]
    pub(crate) fn queued() -> Self {
        let job = serde_json::json!({"id": lockstep_protocol::JobId::generate(), "name": "a job", "project": "default", "tags": [],
            "state": "queued", "spec": lockstep_protocol::JobSpec::default(), "attempt": 0, "ranks": 1, "agents": [], "step": 0, "epoch": 0,
            "total_steps": 0, "steps_per_epoch": 0, "created_at": Timestamp::UNIX_EPOCH, "last": {}, "last_seq": 1, "sparkline": []});
        Self {
            job: serde_json::from_value(job).unwrap(),
            announced_state: JobState::Queued,
            cancel_reason: None,
            private_parent: None,
            restarts: 0,
            waiting_since: None,
            fencing_token: None,
            progress: Progress::default(),
            attempt_end: None,
            unknown_state: None,
        }
    }

    /// Whether the job was forked from another job.
    pub fn is_fork(&self) -> bool {
        self.job.parent.is_some() || self.private_parent.is_some()
    }

    /// The attempt that may write, if there is one.
    pub fn live_attempt(&self) -> Option<AttemptRef> {
        let job = &self.job;
        self.fencing_token.map(|fencing_token| AttemptRef {
            job: job.id.clone(),
            attempt: job.attempt,
            fencing_token,
        })
    }
}

/// The end of an attempt, which is stored with the attempt.
#[derive(Debug, Clone, PartialEq)]
pub struct AttemptEnd {
    /// The state of the attempt, not of the job.
    pub state: AttemptState,
    /// The reason. `None` if the attempt succeeded.
    pub reason: Option<Reason>,
    /// Whether the attempt's ranks have trained. If not, the job's step is from an earlier attempt.
    pub has_trained: bool,
}

/// A request that a job's state forbids.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{detail}")]
pub struct Refusal {
    /// The state of the job.
    pub state: JobState,
    /// Why the request is refused, and what the user can do.
    pub detail: String,
}
