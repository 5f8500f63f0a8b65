//! The queue as `GET /queue` lists it: what waits, in which order, for what, and which slots are kept for whom. Times are RFC 3339 UTC.

use crate::{
    job::{Job, JobId, JobState},
    reason::Reason,
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What a waiting job waits for now and, where its own reason tells how its last attempt ended instead, that behind it. As `#waiting` in
/// `static/job/facts.js`.
pub fn waits_for(job: &Job) -> Option<String> {
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
    /// In the order in which they are given slots: by priority, then fair share where the server has it, then age.
    pub jobs: Vec<QueuedJob>,
    /// What is kept on which machine for which job, on every page: jobs behind that one do not get it.
    pub reservations: Vec<Reservation>,
    /// Give it as `cursor` for the next page; null on the last.
    pub next_cursor: Option<String>,
    /// With `count=true`: jobs on all pages together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total: Option<u64>,
}

/// A job that waits. A job that is private to somebody else shows its place alone: every other field is null.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct QueuedJob {
    /// From 1. Jobs before it get slots first, if they fit.
    pub place: u64,
    #[schema(value_type = Option<String>)]
    pub id: Option<JobId>,
    pub name: Option<String>,
    /// `queued`, or `restarting` after a failure.
    pub state: Option<JobState>,
    pub project: Option<String>,
    /// Null also where nobody is asked who they are.
    pub owner: Option<String>,
    pub priority: Option<i32>,
    /// Slots that it wants: all of them at once.
    pub ranks: Option<u32>,
    /// Since it was submitted, or went back to the queue.
    #[schema(value_type = Option<String>)]
    pub waiting_since: Option<jiff::Timestamp>,
    /// What it waits for. Null until it has been looked at.
    pub reason: Option<Reason>,
    /// Slots that are kept for it now, free ones and those of jobs that end; `reservations` says where.
    pub kept_slots: Option<u32>,
}

/// What is kept for a job on a machine, as long as that job waits.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Reservation {
    /// The machine's id, as in `GET /agents`.
    pub agent_id: String,
    /// Its name.
    pub agent: String,
    /// The job; null where it is private to somebody else.
    #[schema(value_type = Option<String>)]
    pub job: Option<JobId>,
    /// Its name; null as well.
    pub name: Option<String>,
    /// Slots that are free, and given to nobody else.
    pub free: Vec<u32>,
    /// Slots whose jobs are ending, such as those that are preempted for it and write a checkpoint.
    pub ending: Vec<u32>,
    /// Whatever else becomes free on this machine is kept for it, too.
    pub whole_machine: bool,
    /// Since when something is kept for it there; at the earliest when the server was started.
    #[schema(value_type = String)]
    pub since: jiff::Timestamp,
}
