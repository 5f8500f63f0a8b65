//! Fewer ranks: how a job that has lost an attempt continues if not all of its ranks fit.

use super::{
    Snapshot,
    candidates::{Candidates, ChosenSlots},
    gang::{choose_agents, choose_reserved_agents},
    round::ReservedAgents,
};
use crate::store::JobRow;
use lockstep_protocol::{
    job::Job,
    reason::{Reason, ReasonKind, Text},
};

/// The numbers of ranks on which a job may continue if not all of its ranks fit.
pub(super) struct FewerRanks {
    /// Smaller numbers of ranks, the largest first.
    ranks: Vec<u32>,
    /// Whether the job has waited for `recovery.wait_seconds`.
    has_waited: bool,
}

impl FewerRanks {
    /// `None` if the job waits for all of its ranks without a time limit.
    pub(super) fn of_job(snapshot: &Snapshot, row: &JobRow) -> Option<Self> {
        let ranks = if row.job.may_use_fewer_ranks() { row.job.spec.fewer_ranks() } else { Vec::new() };
        if ranks.is_empty() {
            return None;
        }
        // Counts from the server's start at the earliest, because agents may still be reconnecting then.
        let since = row.waiting_since.unwrap_or(row.job.created_at).max(snapshot.started_at);
        let waited = snapshot.now.duration_since(since).as_secs();
        let has_waited = waited >= i64::from(row.job.spec.recovery.wait_seconds);
        Some(Self { ranks, has_waited })
    }

    /// Chooses agents and slots to start the job on fewer ranks now. Also returns the reason that the job then shows. `None` before the end
    /// of `recovery.wait_seconds`, or if the slots do not suffice for any of these numbers of ranks.
    pub(super) fn choose(
        &self,
        job: &Job,
        candidates: &Candidates,
        reserved: &ReservedAgents,
    ) -> Option<(ChosenSlots, Reason)> {
        let tried = self.ranks.iter().filter(|_| self.has_waited);
        let found = |ranks: &u32| Some((*ranks, choose_agents(candidates, *ranks as usize, reserved)?));
        let (ranks, chosen) = tried.into_iter().find_map(found)?;
        let fewer = ReasonKind::FewerRanks {
            ranks,
            slots_needed: job.ranks,
            secs: job.spec.recovery.wait_seconds.into(),
            // How the last attempt ended, without the sentence about what happens next.
            detail: job.cause.as_ref().map(|why| why.kind().to_string().into()),
        };
        Some((chosen, fewer.into()))
    }

    /// Chooses agents to reserve for fewer ranks.
    pub(super) fn reserve(&self, candidates: &Candidates) -> Option<Vec<usize>> {
        self.ranks.iter().find_map(|ranks| choose_reserved_agents(candidates, *ranks as usize))
    }

    /// Returns a text about the number of ranks on which the job starts after its wait.
    pub(super) fn in_words(&self, job: &Job) -> Option<Text> {
        let least = self.ranks.last()?;
        Some(
            format!("after {} s it starts on fewer ranks, at least {least}", job.spec.recovery.wait_seconds)
                .into(),
        )
    }
}
