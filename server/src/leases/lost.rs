//! Attempts whose ranks have lost each other, and agents that are not waited for until their leases run out.

use super::{Expired, Lease, Leases};
use crate::lifecycle::PlaceEnd;
use lockstep_protocol::agent::{AttemptRef, Ending};
use std::{
    sync::{MutexGuard, PoisonError},
    time::Instant,
};

/// How the ranks of an attempt came to an end on one of its agents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EndAt {
    /// They finished, were asked to stop, or failed for a reason of their own.
    ByThemselves,
    /// They lost the connection to ranks of other agents.
    LostContact,
    /// Nobody knows: the agent is gone.
    Lost,
}

impl EndAt {
    /// As the store has it.
    pub(crate) fn of(end: &PlaceEnd) -> Self {
        match end {
            PlaceEnd::Ended { ending: Ending::Secondary { .. }, .. } => Self::LostContact,
            PlaceEnd::Ended { .. } | PlaceEnd::Left(_) => Self::ByThemselves,
            PlaceEnd::Lost(_) => Self::Lost,
        }
    }
}

/// Attempts of one agent that are remembered for it.
const CUT_OFF_OF_AGENT: usize = 64;

impl Leases {
    pub(super) fn cut_off(&self) -> MutexGuard<'_, Vec<(String, AttemptRef, Instant)>> {
        self.cut_off.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ranks of an attempt whose machines do not answer, as one of its other ranks says.
    pub(crate) fn unreachable(&self, attempt: &AttemptRef, ranks: &[u32]) {
        let mut leases = self.by_job();
        let Some(lease) = leases.get_mut(&attempt.job).filter(|lease| lease.attempt == *attempt) else {
            return;
        };
        lease.unreachable.extend(ranks);
        drop(leases);
        self.poke();
    }

    /// Whether ranks of an attempt have lost those of other agents: it goes on nowhere, and waits for all agents to end theirs.
    pub(crate) fn is_contact_lost(&self) -> bool {
        self.by_job().values().any(Lease::has_lost_contact)
    }

    /// Agents of attempts whose ranks have lost each other that need not be waited for until their leases run out. An agent is one if
    /// it is silent and either the ranks of others say that its machine does not answer, or its connection has ended. One
    /// that is only slow keeps both its connections and its answers to other ranks, and is waited for.
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

    /// An agent is given up before its lease runs out: until then, or until it says that it has no ranks of the attempt, it gets no work.
    pub(crate) fn give_up(&self, expired: &Expired) {
        let leases = self.by_job();
        let hold = leases.get(&expired.attempt.job).and_then(|lease| lease.held_at(&expired.place.agent_id));
        if let Some(until) = hold.map(|hold| hold.until) {
            let mut cut_off = self.cut_off();
            cut_off.retain(|(_, _, until)| *until > Instant::now());
            cut_off.push((expired.place.agent_id.clone(), expired.attempt.clone(), until));
        }
    }

    /// An agent that was given up says which ranks it has.
    pub(super) fn extend_cut_off(&self, agent_id: &str, attempts: &[AttemptRef], until: Instant) {
        self.cut_off().retain_mut(|(id, attempt, at)| {
            let is_its = id == agent_id;
            if is_its {
                *at = until;
            }
            !is_its || attempts.contains(attempt)
        });
    }

    /// As [`Self::renew`], of an agent that has connected: as long as it has ranks of an attempt that is not its own, it gets no work. It
    /// may have been given up by the server that was there before this one.
    pub(crate) fn greet(&self, agent_id: &str, attempts: &[AttemptRef]) -> Vec<AttemptRef> {
        let not_its = self.renew(agent_id, attempts);
        let (now, until) = (Instant::now(), Instant::now() + self.duration);
        let mut cut_off = self.cut_off();
        cut_off.retain(|(id, _, until)| id != agent_id && *until > now);
        // An agent may name as many as it likes, and one is as good as many.
        let kept = not_its.iter().take(CUT_OFF_OF_AGENT);
        cut_off.extend(kept.map(|attempt| (agent_id.to_owned(), attempt.clone(), until)));
        drop(cut_off);
        not_its
    }

    /// An agent says that its ranks of an attempt have ended.
    pub(crate) fn is_gone(&self, agent_id: &str, attempt: &AttemptRef) {
        let mut cut_off = self.cut_off();
        let before = cut_off.len();
        cut_off.retain(|(id, of, _)| id != agent_id || of != attempt);
        if cut_off.len() < before {
            self.poke();
        }
    }

    /// Whether an agent was given up, and ranks may still be there.
    pub(crate) fn is_cut_off(&self, agent_id: &str) -> bool {
        let now = Instant::now();
        self.cut_off().iter().any(|(id, _, until)| id == agent_id && *until > now)
    }
}
