//! Attempts whose ranks have lost their connections, and agents that are given up before their leases expire.

use super::{Expired, Lease, Leases};
use crate::lifecycle::PlaceEnd;
use lockstep_protocol::agent::{AttemptRef, Ending};
use std::{
    sync::{MutexGuard, PoisonError},
    time::Instant,
};

/// How the ranks of an attempt ended on one of its agents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EndAt {
    /// The ranks finished, were asked to stop, or failed for their own reason.
    ByThemselves,
    /// The ranks lost the connection to ranks of other agents.
    LostContact,
    /// Unknown, because the agent is lost.
    Lost,
}

impl EndAt {
    /// Converts the stored end.
    pub(crate) fn of(end: &PlaceEnd) -> Self {
        match end {
            PlaceEnd::Ended { ending: Ending::Secondary { .. }, .. } => Self::LostContact,
            PlaceEnd::Ended { .. } | PlaceEnd::Left(_) => Self::ByThemselves,
            PlaceEnd::Lost(_) => Self::Lost,
        }
    }
}

/// Maximum number of attempts that are remembered per agent.
const MAX_CUT_OFF: usize = 64;

impl Leases {
    pub(super) fn cut_off(&self) -> MutexGuard<'_, Vec<(String, AttemptRef, Instant)>> {
        self.cut_off.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the ranks of an attempt whose machines do not answer, as one of its other ranks has reported.
    pub(crate) fn mark_unreachable(&self, attempt: &AttemptRef, ranks: &[u32]) {
        let mut leases = self.by_job();
        let Some(lease) = leases.get_mut(&attempt.job).filter(|lease| lease.attempt == *attempt) else {
            return;
        };
        lease.unreachable.extend(ranks);
        drop(leases);
        self.wake_dispatch();
    }

    /// Whether ranks of an attempt have lost ranks of other agents. The attempt then cannot continue, and waits for all agents to end their
    /// ranks.
    pub(crate) fn is_contact_lost(&self) -> bool {
        self.by_job().values().any(Lease::has_lost_contact)
    }

    /// Agents that can be given up before their leases expire: a silent agent of an attempt whose ranks have lost each other,
    /// if its machine does not respond to other ranks or its connection is closed. An agent that is only slow has its
    /// connection, and its kernel responds to other ranks, so it keeps its lease.
    pub(crate) fn abandoned(
        &self,
        is_silent: impl Fn(&str) -> bool,
        is_connected: impl Fn(&str) -> bool,
    ) -> Vec<Expired> {
        let leases = self.by_job();
        let mut found = Vec::new();
        for lease in leases.values().filter(|lease| lease.has_lost_contact()) {
            for hold in lease.held().filter(|hold| is_silent(&hold.place.agent_id)) {
                let is_unreachable =
                    hold.place.ranks.iter().any(|(rank, _)| lease.unreachable.contains(rank));
                if is_unreachable || !is_connected(&hold.place.agent_id) {
                    found.push(lease.expired_at(hold));
                }
            }
        }
        found
    }

    /// Whether a lease that had expired was renewed.
    pub(crate) fn is_renewed(&self, expired: &Expired) -> bool {
        let now = Instant::now();
        let leases = self.by_job();
        let lease = leases.get(&expired.attempt.job).filter(|lease| lease.attempt == expired.attempt);
        let mut holds = lease.into_iter().flat_map(|lease| &lease.holds);
        holds.any(|hold| hold.place.agent_id == expired.place.agent_id && hold.until > now)
    }

    /// Gives up an agent before its lease expires. Until the expiry, or until the agent reports no ranks of the attempt, it gets no work.
    pub(crate) fn give_up(&self, expired: &Expired) {
        let leases = self.by_job();
        let hold = leases.get(&expired.attempt.job).and_then(|lease| lease.held_at(&expired.place.agent_id));
        if let Some(until) = hold.map(|hold| hold.until) {
            let mut cut_off = self.cut_off();
            cut_off.retain(|(_, _, until)| *until > Instant::now());
            cut_off.push((expired.place.agent_id.clone(), expired.attempt.clone(), until));
        }
    }

    /// Updates an agent that was given up with the ranks that it reports.
    pub(super) fn extend_cut_off(&self, agent_id: &str, attempts: &[AttemptRef], until: Instant) {
        self.cut_off().retain_mut(|(id, attempt, at)| {
            let is_its = id == agent_id;
            if is_its {
                *at = until;
            }
            !is_its || attempts.contains(attempt)
        });
    }

    /// Like [`Self::renew`], for an agent that has just connected. While the agent has ranks of another agent's attempt, it gets no work:
    /// an earlier server may have given it up.
    pub(crate) fn greet(&self, agent_id: &str, attempts: &[AttemptRef]) -> Vec<AttemptRef> {
        let not_its = self.renew(agent_id, attempts);
        let (now, until) = (Instant::now(), Instant::now() + self.duration);
        let mut cut_off = self.cut_off();
        cut_off.retain(|(id, _, until)| id != agent_id && *until > now);
        // One attempt is enough, and the list may have any length.
        let kept = not_its.iter().take(MAX_CUT_OFF);
        cut_off.extend(kept.map(|attempt| (agent_id.to_owned(), attempt.clone(), until)));
        drop(cut_off);
        not_its
    }

    /// Records that an agent's ranks of an attempt have ended.
    pub(crate) fn note_ranks_ended(&self, agent_id: &str, attempt: &AttemptRef) {
        let mut cut_off = self.cut_off();
        let before = cut_off.len();
        cut_off.retain(|(id, of, _)| id != agent_id || of != attempt);
        if cut_off.len() < before {
            self.wake_dispatch();
        }
    }

    /// Whether an agent was given up and its ranks may still run.
    pub(crate) fn is_cut_off(&self, agent_id: &str) -> bool {
        let now = Instant::now();
        self.cut_off().iter().any(|(id, _, until)| id == agent_id && *until > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_protocol::JobId;
    use std::time::Duration;

    #[test]
    fn at_most_64_unknown_attempts_of_an_agent_are_remembered() {
        for (count, last) in [(MAX_CUT_OFF, MAX_CUT_OFF), (MAX_CUT_OFF + 1, MAX_CUT_OFF)] {
            let leases = Leases::new(Duration::from_secs(600));
            let one = || AttemptRef { job: JobId::generate(), attempt: 1, fencing_token: 1.into() };
            let unknown: Vec<_> = (0..count).map(|_| one()).collect();
            assert_eq!(leases.greet("a", &unknown).len(), count, "the agent is told to end all of them");
            for attempt in &unknown[..last] {
                assert!(leases.is_cut_off("a"));
                leases.note_ranks_ended("a", attempt);
            }
            assert!(!leases.is_cut_off("a"), "of {count}");
        }
    }
}
