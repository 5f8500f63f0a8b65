//! The queue, as `GET /queue` lists it: waiting jobs in order, what they wait for, and reserved slots. Times are RFC 3339 UTC.

use crate::{
    job::{Job, JobId, JobState},
    reason::Reason,
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Why a job waits. If the job's own reason describes the end of its last attempt, that reason is appended. The same
/// as `#waitingBanner` in `static/job/facts.js`.
pub fn reason_for_waiting(job: &Job) -> Option<String> {
    let now = job.queue.as_ref().and_then(|queue| queue.reason.as_ref()).map(Reason::words);
    match (now, job.reason.as_deref()) {
        (Some(now), Some(before)) if now != before && job.attempt > 0 => {
            Some(format!("{now}. Before: {before}"))
        }
        (now, reason) => now.or(reason).map(str::to_owned),
    }
}

/// A page of the queue.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct QueueList {
    /// Jobs in the order in which they get slots: by priority, then fair share if the server uses it, then age.
    pub jobs: Vec<QueuedJob>,
    /// Slots that are kept for jobs; jobs further back do not get these slots. Every page has all reservations.
    pub reservations: Vec<Reservation>,
    /// Pass it as `cursor` for the next page; null on the last page.
    pub next_cursor: Option<String>,
    /// With `count=true`: the number of jobs on all pages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total: Option<u64>,
}

/// A waiting job. For a job that is private to another person, every field except `place` is null.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct QueuedJob {
    /// The job's place in the queue, from 1. Jobs with lower places get slots first, if they fit.
    pub place: u64,
    #[schema(value_type = Option<String>)]
    pub id: Option<JobId>,
    pub name: Option<String>,
    /// `queued`, or `restarting` after a failure.
    pub state: Option<JobState>,
    pub project: Option<String>,
    /// The owner. Also null if the server has no sign-in.
    pub owner: Option<String>,
    pub priority: Option<i32>,
    /// Number of slots that the job needs, all at once.
    pub ranks: Option<u32>,
    /// Time of the submission, or of the return to the queue.
    pub waiting_since: Option<jiff::Timestamp>,
    /// Why the job waits. Null until the scheduler has considered it.
    pub reason: Option<Reason>,
    /// Number of slots that are kept for the job now, including slots of ending jobs; `reservations` has the machines.
    pub kept_slots: Option<u32>,
}

/// Slots of a machine that are kept for a job while the job waits.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Reservation {
    /// The machine's id, as in `GET /agents`.
    pub agent_id: String,
    /// The machine's name.
    pub agent: String,
    /// The job; null if it is private to somebody else.
    #[schema(value_type = Option<String>)]
    pub job: Option<JobId>,
    /// The job's name; null if the job is private to somebody else.
    pub name: Option<String>,
    /// Indices of the slots that are free and that no other job gets.
    pub free: Vec<u32>,
    /// Indices of the slots whose jobs are ending, such as preempted jobs that write a checkpoint.
    pub ending: Vec<u32>,
    /// Whether all other slots of this machine are also kept as soon as they become free.
    pub whole_machine: bool,
    /// Time since which slots are kept; at the earliest, the server's start.
    pub since: jiff::Timestamp,
}
