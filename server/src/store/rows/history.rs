//! What a job's history is made of, next to its attempts.

use crate::store::AuditEntry;
use lockstep_protocol::{
    job::{Job, Parent},
    stream::Event,
};

/// Read in one go.
#[derive(Debug, Clone, Default)]
pub struct HistoryRows {
    /// Its newest changes of state, in order.
    pub states: Vec<Event>,
    /// What it was forked from, also where that is private.
    pub parent: Option<Parent>,
    /// Jobs that were forked from it with the ids of the checkpoints that they began from, the oldest first.
    pub forks: Vec<(Job, String)>,
    /// Requests about it that were granted, in order; empty unless they were asked for.
    pub requests: Vec<AuditEntry>,
    /// Waiting jobs that get slots before it.
    pub before_it: u64,
}
