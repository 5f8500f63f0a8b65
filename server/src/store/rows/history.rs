//! What a job's history is made of, next to its attempts.

use crate::store::AuditEntry;
use lockstep_protocol::{job::Job, stream::Event};

/// Read in one go.
#[derive(Debug, Clone, Default)]
pub struct HistoryRows {
    /// Its newest changes of state, in order.
    pub states: Vec<Event>,
    /// Jobs that were forked from it, the oldest first.
    pub forks: Vec<Job>,
    /// Requests about it that were granted, in order; empty unless they were asked for.
    pub requests: Vec<AuditEntry>,
    /// Waiting jobs that get slots before it.
    pub before_it: u64,
}
