//! Attempts whose ranks have lost their connections, and agents that are given up before their leases expire.

use super::{AttemptPart, Lease, Leases};
use crate::{lifecycle::EndOnAgent, util::lock};
use lockstep_protocol::agent::{AttemptRef, Ending};
use std::time::Instant;

/// How the ranks of an attempt ended on one of its agents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RanksEnd {
    /// The ranks finished, were asked to stop, or failed for another reason than lost contact. The agent need not have reported the reason.
    OtherCause,
    /// The ranks lost the connection to ranks of other agents.
    LostContact,
    /// Unknown, because the agent is lost or was given up.
    Unknown,
}

impl RanksEnd {
    /// Converts the stored end.
    pub(crate) fn of(end: &EndOnAgent) -> Self {
        match end {
            EndOnAgent::Ended { ending: Ending::Secondary { .. }, .. } => Self::LostContact,
            EndOnAgent::Ended { .. } | EndOnAgent::LeftUnreported(_) => Self::OtherCause,
            EndOnAgent::Lost(_) => Self::Unknown,
        }
    }
}

/// An agent that gets no work: `attempt` was taken from it, but its ranks of the attempt may still run.
#[derive(Debug)]
pub(super) struct GivenUp {
    agent_id: String,
    attempt: AttemptRef,
    /// The time by which the ranks end themselves.
    ranks_end_by: Instant,
}

/// Maximum number of attempts that are remembered per agent.
const MAX_GIVEN_UP: usize = 64;

impl Leases {
    /// Records that the machines of these ranks do not respond, as another rank of the attempt has reported.
    pub(crate) fn mark_unreachable(&self, attempt: &AttemptRef, ranks: &[u32]) {
        let mut leases = lock(&self.table);
        let Some(lease) = leases.lease_of_mut(attempt) else { return };
        lease.unreachable.extend(ranks);
        drop(leases);
        self.wake_dispatch();
    }

    /// Whether the ranks of any attempt have lost the connection to ranks of other agents. Such an attempt ends when all agents have ended
    /// its ranks; dispatch polls faster meanwhile.
    pub(crate) fn any_attempt_lost_contact(&self) -> bool {
        lock(&self.table).by_job.values().any(Lease::has_lost_contact)
    }

    /// Agents that are given up before their leases expire. The ranks of such an agent's attempt have lost contact with each other, the
    /// agent is silent, and either its machine does not respond to other ranks or its connection to the server is closed. An agent that is
    /// only slow keeps its lease: it is connected, and its kernel responds to other ranks.
    pub(crate) fn agents_to_give_up(
        &self,
        is_silent: impl Fn(&str) -> bool,
        is_connected: impl Fn(&str) -> bool,
    ) -> Vec<AttemptPart> {
        let leases = lock(&self.table);
        let mut given_up = Vec::new();
        for lease in leases.by_job.values().filter(|lease| lease.has_lost_contact()) {
            for hold in lease.live_holds().filter(|hold| is_silent(&hold.place.agent_id)) {
                let is_unreachable =
                    hold.place.ranks.iter().any(|(rank, _)| lease.unreachable.contains(rank));
                if is_unreachable || !is_connected(&hold.place.agent_id) {
                    given_up.push(lease.part_on(hold));
                }
            }
        }
        given_up
    }

    /// Whether a lease that had expired was renewed.
    pub(crate) fn is_renewed(&self, part: &AttemptPart) -> bool {
        let now = Instant::now();
        let leases = lock(&self.table);
        let mut holds = leases.lease_of(&part.attempt).into_iter().flat_map(|lease| &lease.holds);
        holds.any(|hold| hold.place.agent_id == part.place.agent_id && hold.expires_at > now)
    }

    /// Gives up an agent before its lease expires. Until the expiry, or until the agent reports no ranks of the attempt, it gets no work.
    pub(crate) fn give_up(&self, part: &AttemptPart) {
        let leases = lock(&self.table);
        let lease = leases.by_job.get(&part.attempt.job);
        let hold = lease.and_then(|lease| lease.live_hold_on(&part.place.agent_id));
        if let Some(ranks_end_by) = hold.map(|hold| hold.expires_at) {
            let (agent_id, attempt) = (part.place.agent_id.clone(), part.attempt.clone());
            let mut given_up = lock(&self.given_up);
            given_up.retain(|entry| entry.ranks_end_by > Instant::now());
            given_up.push(GivenUp { agent_id, attempt, ranks_end_by });
        }
    }

    /// Updates the entries of an agent after a report: entries of attempts that the agent still reports stay until `ranks_end_by`, and the
    /// other entries are removed.
    pub(super) fn update_given_up(&self, agent_id: &str, attempts: &[AttemptRef], ranks_end_by: Instant) {
        lock(&self.given_up).retain_mut(|entry| {
            let is_of_agent = entry.agent_id == agent_id;
            if is_of_agent {
                entry.ranks_end_by = ranks_end_by;
            }
            !is_of_agent || attempts.contains(&entry.attempt)
        });
    }

    /// Like [`Self::renew`], for an agent that has just connected. Returns the attempts that do not or no longer belong to the agent. Until
    /// the agent's ranks of these attempts have ended, the agent gets no work, because an earlier server may have given it up.
    pub(crate) fn renew_at_connect(&self, agent_id: &str, attempts: &[AttemptRef]) -> Vec<AttemptRef> {
        let foreign = self.renew(agent_id, attempts);
        let (now, ranks_end_by) = (Instant::now(), Instant::now() + self.duration);
        let entry = |attempt: &AttemptRef| GivenUp {
            agent_id: agent_id.into(),
            attempt: attempt.clone(),
            ranks_end_by,
        };
        let mut given_up = lock(&self.given_up);
        given_up.retain(|entry| entry.agent_id != agent_id && entry.ranks_end_by > now);
        // The agent may report any number of attempts. It gets no work while a remembered attempt remains.
        given_up.extend(foreign.iter().take(MAX_GIVEN_UP).map(entry));
        drop(given_up);
        foreign
    }

    /// Records that an agent's ranks of an attempt have ended.
    pub(crate) fn note_ranks_ended(&self, agent_id: &str, attempt: &AttemptRef) {
        let mut given_up = lock(&self.given_up);
        let before = given_up.len();
        given_up.retain(|entry| entry.agent_id != agent_id || entry.attempt != *attempt);
        if given_up.len() < before {
            self.wake_dispatch();
        }
    }

    /// Whether an agent was given up and its ranks may still run.
    pub(crate) fn is_given_up(&self, agent_id: &str) -> bool {
        let now = Instant::now();
        lock(&self.given_up).iter().any(|entry| entry.agent_id == agent_id && entry.ranks_end_by > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_protocol::JobId;
    use std::time::Duration;

    #[test]
    fn at_most_64_unknown_attempts_of_an_agent_are_remembered() {
        for count in [MAX_GIVEN_UP, MAX_GIVEN_UP + 1] {
            let leases = Leases::new(Duration::from_secs(600));
            let attempt = || AttemptRef { job: JobId::generate(), attempt: 1, fencing_token: 1.into() };
            let unknown: Vec<_> = (0..count).map(|_| attempt()).collect();
            // The agent is told to end all of them.
            assert_eq!(leases.renew_at_connect("a", &unknown).len(), count);
            for attempt in &unknown[..MAX_GIVEN_UP] {
                assert!(leases.is_given_up("a"));
                leases.note_ranks_ended("a", attempt);
            }
            assert!(!leases.is_given_up("a"), "with {count} attempts");
        }
    }
}
