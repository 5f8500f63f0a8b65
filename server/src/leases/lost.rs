//! Attempts whose ranks have lost each other, and agents that are not waited for until their leases run out.

use super::{Expired, Lease, Leases};
use lockstep_protocol::agent::AttemptRef;
use std::{
    sync::{MutexGuard, PoisonError},
    time::Instant,
};

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

    /// Whether an agent was given up, and ranks may still be there.
    pub(crate) fn is_cut_off(&self, agent_id: &str) -> bool {
        let now = Instant::now();
        self.cut_off().iter().any(|(id, _, until)| id == agent_id && *until > now)
    }
}
