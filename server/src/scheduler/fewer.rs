//! Fewer ranks than a job has: how a job continues that has lost an attempt, and for all ranks of which there is no place.

use super::{
    Snapshot,
    candidates::Candidates,
    gang::{choose, reserve},
};
use crate::store::JobRow;
use lockstep_protocol::{
    job::Job,
    reason::{Reason, ReasonKind, Text},
};
use std::collections::HashSet;

/// What a job may do that waits for a place for all its ranks.
pub(super) struct Fewer {
    /// Ranks that it may have instead, most first.
    ranks: Vec<u32>,
    /// It has waited for long enough.
    now: bool,
}

impl Fewer {
    /// None where the job waits for all its ranks, however long that takes.
    pub(super) fn of(snapshot: &Snapshot, row: &JobRow) -> Option<Self> {
        let ranks = if row.job.has_lost_attempt() { row.job.spec.fewer_ranks() } else { Vec::new() };
        if ranks.is_empty() {
            return None;
        }
        // A server that has just started does not know yet which agents are there.
        let since = row.waiting_since.unwrap_or(row.job.created_at).max(snapshot.started_at);
        let waited = snapshot.now.duration_since(since).as_secs();
        let now = waited >= i64::from(row.job.spec.recovery.wait_seconds);
        Some(Self { ranks, now })
    }

    /// The agents to start the job on now, with the slots to take there, and what it says of that.
    pub(super) fn choose(
        &self,
        job: &Job,
        candidates: &Candidates,
        reserved: &HashSet<String>,
    ) -> Option<(Vec<(usize, Vec<u32>)>, Reason)> {
        let tried = self.ranks.iter().filter(|_| self.now);
        let found = |ranks: &u32| Some((*ranks, choose(candidates, *ranks as usize, reserved)?));
        let (ranks, chosen) = tried.into_iter().find_map(found)?;
        let fewer = ReasonKind::FewerRanks {
            ranks,
            slots_needed: job.ranks,
            secs: job.spec.recovery.wait_seconds.into(),
            // Without what was to follow from it.
            detail: job.cause.as_ref().map(|why| why.kind().to_string().into()),
        };
        Some((chosen, fewer.into()))
    }

    /// The agents to keep for the job, where none have room for all its ranks.
    pub(super) fn reserve(&self, candidates: &Candidates) -> Option<Vec<usize>> {
        self.ranks.iter().find_map(|ranks| reserve(candidates, *ranks as usize))
    }

    /// What the job takes once it has waited for long enough, in words.
    pub(super) fn in_words(&self, job: &Job) -> Option<Text> {
        let least = self.ranks.last()?;
        Some(format!("after {} s it takes fewer, {least} at least", job.spec.recovery.wait_seconds).into())
    }
}
