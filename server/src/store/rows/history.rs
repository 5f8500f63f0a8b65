//! Changes of a job's state, its forks, and requests about it.

use lockstep_protocol::{access::AuditEntry, job::Job, stream::Event};

#[derive(Debug, Clone, Default)]
pub struct HistoryRows {
    /// The job's newest changes of state and alerts, in order.
    pub events: Vec<Event>,
    /// Forks of the job, each with the id of the checkpoint from which it began, the oldest first.
    pub forks: Vec<(Job, String)>,
    /// Successful requests about the job, in order; empty unless requested.
    pub requests: Vec<AuditEntry>,
}
