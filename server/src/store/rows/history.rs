//! The parts of a job's history except its attempts.

use lockstep_protocol::{
    access::AuditEntry,
    job::{Job, Parent},
    stream::Event,
};

#[derive(Debug, Clone, Default)]
pub struct HistoryRows {
    /// The job's newest changes of state and alerts, in order.
    pub events: Vec<Event>,
    /// The checkpoint from which the job was forked, even if the checkpoint's job is private.
    pub parent: Option<Parent>,
    /// Forks of the job, each with the id of the checkpoint from which it began, the oldest first.
    pub forks: Vec<(Job, String)>,
    /// Successful requests about the job, in order; empty unless requested.
    pub requests: Vec<AuditEntry>,
}
