//! Leases: the slots that attempts occupy, and the time until which they may occupy them.
//!
//! Leases are in memory and use the monotonic clock, so a change of the system time expires no lease. A restarted server gives every live
//! attempt one full lease, within which its agent has to report. The store decides by the fencing token which attempt may write.

use crate::{store::Place, util::lock};
use lockstep_protocol::{agent::AttemptRef, job::JobId};
use std::{
    collections::{HashMap, HashSet},
    sync::Mutex,
    time::{Duration, Instant},
};
use tokio::sync::Notify;

mod given_up;

use given_up::GivenUp;
pub(crate) use given_up::RanksEnd;

/// The slots that attempts occupy, and the time until which they may occupy them.
#[derive(Debug)]
pub(crate) struct Leases {
    pub(crate) duration: Duration,
    table: Mutex<LeaseTable>,
    given_up: Mutex<Vec<GivenUp>>,
    pub(crate) wake: Notify,
}

#[derive(Debug, Default)]
struct LeaseTable {
    by_job: HashMap<JobId, Lease>,
    /// For each agent, the jobs with slots on the agent.
    on_agent: HashMap<String, HashSet<JobId>>,
}

/// An attempt and the slots of its ranks.
#[derive(Debug)]
struct Lease {
    attempt: AttemptRef,
    holds: Vec<AgentHold>,
    /// Whether the agents were requested to stop the ranks, or will be requested in their `Welcome`.
    is_stop_requested: bool,
    /// Ranks whose machines do not respond, as reported by neighbouring ranks.
    unreachable: HashSet<u32>,
}

/// The slots of an attempt on one agent.
#[derive(Debug)]
struct AgentHold {
    place: Place,
    expires_at: Instant,
    /// How the ranks on this agent have ended. `None` while the ranks may run.
    end: Option<RanksEnd>,
    /// Whether the agent has reported the attempt to this server, so the order to start has reached the agent.
    has_order: bool,
    /// `None` until the agent has finished its preflight check, which only attempts over several agents have. The inner value is the port,
    /// which only rank 0's agent gives.
    ready: Option<Option<u16>>,
}

/// The part of an attempt on one agent. The part ends, because its lease has expired or the agent is given up.
#[derive(Debug)]
pub(crate) struct AttemptPart {
    pub(crate) attempt: AttemptRef,
    pub(crate) place: Place,
    /// Number of all agents to which the attempt was given.
    pub(crate) agent_count: usize,
    /// Whether the order to start has reached this agent.
    pub(crate) had_order: bool,
}

impl Lease {
    /// The holds whose ranks may run.
    fn live_holds(&self) -> impl Iterator<Item = &AgentHold> {
        self.holds.iter().filter(|hold| hold.end.is_none())
    }

    /// The places of the ranks that may run.
    fn live_places(&self) -> Vec<Place> {
        self.live_holds().map(|hold| hold.place.clone()).collect()
    }

    fn has_lost_contact(&self) -> bool {
        !self.unreachable.is_empty() || self.holds.iter().any(|hold| hold.end == Some(RanksEnd::LostContact))
    }

    fn part_on(&self, hold: &AgentHold) -> AttemptPart {
        AttemptPart {
            attempt: self.attempt.clone(),
            place: hold.place.clone(),
            agent_count: self.holds.len(),
            had_order: hold.has_order,
        }
    }

    fn live_hold_on(&self, agent_id: &str) -> Option<&AgentHold> {
        self.live_holds().find(|hold| hold.place.agent_id == agent_id)
    }
}

impl LeaseTable {
    fn put(&mut self, lease: Lease) {
        let job = lease.attempt.job.clone();
        self.remove(&job);
        for hold in &lease.holds {
            self.on_agent.entry(hold.place.agent_id.clone()).or_default().insert(job.clone());
        }
        self.by_job.insert(job, lease);
    }

    fn remove(&mut self, job: &JobId) {
        for hold in self.by_job.remove(job).into_iter().flat_map(|lease| lease.holds) {
            if let Some(jobs) = self.on_agent.get_mut(&hold.place.agent_id) {
                jobs.remove(job);
                if jobs.is_empty() {
                    self.on_agent.remove(&hold.place.agent_id);
                }
            }
        }
    }

    /// The lease of an attempt. `None` if the attempt has ended.
    fn lease_of(&self, attempt: &AttemptRef) -> Option<&Lease> {
        self.by_job.get(&attempt.job).filter(|lease| lease.attempt == *attempt)
    }

    fn lease_of_mut(&mut self, attempt: &AttemptRef) -> Option<&mut Lease> {
        self.by_job.get_mut(&attempt.job).filter(|lease| lease.attempt == *attempt)
    }

    /// Leases with live ranks on an agent.
    fn leases_on(&self, agent_id: &str) -> impl Iterator<Item = (&Lease, &AgentHold)> {
        let jobs = self.on_agent.get(agent_id).into_iter().flatten();
        jobs.filter_map(|job| self.by_job.get(job))
            .filter_map(move |lease| Some((lease, lease.live_hold_on(agent_id)?)))
    }
}

impl Leases {
    pub(crate) fn new(duration: Duration) -> Self {
        Self { duration, table: Mutex::default(), given_up: Mutex::default(), wake: Notify::new() }
    }

    /// Wakes dispatch, which then processes the queue.
    pub(crate) fn wake_dispatch(&self) {
        self.wake.notify_one();
    }

    pub(crate) fn add(&self, attempt: AttemptRef, places: Vec<Place>) {
        let expires_at = Instant::now() + self.duration;
        let hold = |place| AgentHold { place, expires_at, end: None, has_order: false, ready: None };
        let holds = places.into_iter().map(hold).collect();
        lock(&self.table).put(Lease {
            attempt,
            holds,
            is_stop_requested: false,
            unreachable: HashSet::new(),
        });
    }

    /// Records that the agents of an attempt were requested to stop its ranks.
    pub(crate) fn note_stop_requested(&self, attempt: &AttemptRef) {
        if let Some(lease) = lock(&self.table).lease_of_mut(attempt) {
            lease.is_stop_requested = true;
        }
    }

    /// Whether the agents of a job's attempt were requested to stop it.
    pub(crate) fn is_stop_requested(&self, job: &JobId) -> bool {
        lock(&self.table).by_job.get(job).is_some_and(|lease| lease.is_stop_requested)
    }

    /// Releases the slots of an attempt. The slots of a later attempt of the job stay occupied.
    pub(crate) fn release(&self, job: &JobId, attempt: u32) {
        let mut leases = lock(&self.table);
        if leases.by_job.get(job).is_some_and(|lease| lease.attempt.attempt <= attempt) {
            leases.remove(job);
        }
        drop(leases);
        self.wake_dispatch();
    }

    /// Frees an attempt's slots on an agent whose ranks have ended or whose lease has expired. Returns the other agents that still have
    /// ranks of the attempt.
    pub(crate) fn note_end(&self, attempt: &AttemptRef, agent_id: &str, how: RanksEnd) -> Vec<Place> {
        let mut leases = lock(&self.table);
        let Some(lease) = leases.lease_of_mut(attempt) else { return Vec::new() };
        for hold in lease.holds.iter_mut().filter(|hold| hold.place.agent_id == agent_id) {
            hold.end = Some(how);
        }
        let others = lease.live_places();
        drop(leases);
        self.wake_dispatch();
        others
    }

    /// Renews the leases of the attempts that an agent reports. Returns the attempts that do not or no longer belong to the agent.
    pub(crate) fn renew(&self, agent_id: &str, attempts: &[AttemptRef]) -> Vec<AttemptRef> {
        let expires_at = Instant::now() + self.duration;
        self.update_given_up(agent_id, attempts, expires_at);
        let mut leases = lock(&self.table);
        let mut renew_one = |attempt: &AttemptRef| {
            let mut holds = leases.lease_of_mut(attempt).into_iter().flat_map(|lease| lease.holds.iter_mut());
            match holds.find(|hold| hold.place.agent_id == agent_id) {
                // An attempt no longer belongs to an agent that was lost or given up (`Unknown`).
                Some(hold) if hold.end != Some(RanksEnd::Unknown) => {
                    hold.expires_at = expires_at;
                    hold.has_order = true;
                    true
                }
                _ => false,
            }
        };
        attempts.iter().filter(|attempt| !renew_one(attempt)).cloned().collect()
    }

    /// Records that an agent has finished its preflight check. After the last agent, returns all agents and the port on which rank 0 will
    /// listen.
    pub(crate) fn note_ready(
        &self,
        attempt: &AttemptRef,
        agent_id: &str,
        port: Option<u16>,
    ) -> Option<(u16, Vec<Place>)> {
        let mut leases = lock(&self.table);
        let lease = leases.lease_of_mut(attempt)?;
        let hold = lease.holds.iter_mut().find(|hold| hold.place.agent_id == agent_id)?;
        hold.has_order = true;
        // Only rank 0's agent may choose the port.
        hold.ready = Some(port.filter(|_| hold.place.has_rank_0()));
        let ready: Vec<_> = lease.holds.iter().filter_map(|hold| hold.ready).collect();
        let port = ready.iter().flatten().next().copied()?;
        let are_all_ready = ready.len() == lease.holds.len() && lease.live_holds().count() == ready.len();
        are_all_ready.then(|| (port, lease.holds.iter().map(|hold| hold.place.clone()).collect()))
    }

    /// Live attempts on an agent, each with the places of all its live ranks.
    pub(crate) fn attempts_on(&self, agent_id: &str) -> Vec<(AttemptRef, Vec<Place>)> {
        lock(&self.table)
            .leases_on(agent_id)
            .map(|(lease, _)| (lease.attempt.clone(), lease.live_places()))
            .collect()
    }

    /// Number of agents to which an attempt was given; 0 if the attempt has ended.
    pub(crate) fn agent_count(&self, attempt: &AttemptRef) -> usize {
        lock(&self.table).lease_of(attempt).map_or(0, |lease| lease.holds.len())
    }

    /// Whether an agent has ranks of an attempt, and `rank` was given to another agent.
    pub(crate) fn is_elsewhere(&self, agent_id: &str, attempt: &AttemptRef, rank: u32) -> bool {
        let has_rank = |hold: &AgentHold| hold.place.ranks.iter().any(|(other, _)| *other == rank);
        let is_here = |hold: &AgentHold| hold.place.agent_id == agent_id;
        lock(&self.table).lease_of(attempt).is_some_and(|lease| {
            lease.holds.iter().any(is_here) && lease.holds.iter().any(|hold| !is_here(hold) && has_rank(hold))
        })
    }

    /// Whether ranks of an attempt may run on an agent.
    pub(crate) fn has_live_ranks(&self, agent_id: &str, attempt: &AttemptRef) -> bool {
        lock(&self.table).lease_of(attempt).is_some_and(|lease| lease.live_hold_on(agent_id).is_some())
    }

    /// A job's attempt that may run.
    pub(crate) fn attempt_of(&self, job: &JobId) -> Option<AttemptRef> {
        lock(&self.table).by_job.get(job).map(|lease| lease.attempt.clone())
    }

    /// The shortest time that an attempt on this agent may continue without contact; `None` if there is no attempt.
    pub(crate) fn remaining_time(&self, agent_id: &str) -> Option<Duration> {
        let now = Instant::now();
        let leases = lock(&self.table);
        leases.leases_on(agent_id).map(|(_, hold)| hold.expires_at.saturating_duration_since(now)).min()
    }

    /// Job and rank of each slot in use on an agent.
    pub(crate) fn slots_in_use(&self, agent_id: &str) -> HashMap<u32, (JobId, u32)> {
        let leases = lock(&self.table);
        let slots = leases.leases_on(agent_id).flat_map(|(lease, hold)| {
            let job = &lease.attempt.job;
            hold.place.ranks.iter().map(move |(rank, slot)| (*slot, (job.clone(), *rank)))
        });
        slots.collect()
    }

    /// For each agent's id, the job in each slot in use.
    pub(crate) fn jobs_in_slots(&self) -> HashMap<String, HashMap<u32, JobId>> {
        let mut by_agent: HashMap<String, HashMap<u32, JobId>> = HashMap::new();
        for (job, lease) in &lock(&self.table).by_job {
            for hold in lease.live_holds() {
                let slots = hold.place.ranks.iter().map(|(_, slot)| (*slot, job.clone()));
                by_agent.entry(hold.place.agent_id.clone()).or_default().extend(slots);
            }
        }
        by_agent
    }

    /// Jobs whose ranks have ended on one agent, so that their ranks on other agents will end, too.
    pub(crate) fn ending_jobs(&self) -> Vec<JobId> {
        let ends = |lease: &Lease| lease.holds.iter().any(|hold| hold.end.is_some());
        lock(&self.table).by_job.iter().filter(|(_, lease)| ends(lease)).map(|(job, _)| job.clone()).collect()
    }

    /// The places of a job's ranks that may run.
    pub(crate) fn places_of(&self, job: &JobId) -> Vec<Place> {
        lock(&self.table).by_job.get(job).map(Lease::live_places).unwrap_or_default()
    }

    /// The parts of attempts whose leases have expired.
    pub(crate) fn expired_parts(&self) -> Vec<AttemptPart> {
        let now = Instant::now();
        let expired = |lease: &Lease| -> Vec<AttemptPart> {
            // If all ranks have ended, all parts may expire, because the store may lack some of the ends.
            let has_ended = lease.live_holds().next().is_none();
            let may_expire = |hold: &&AgentHold| has_ended || hold.end.is_none();
            let holds = lease.holds.iter().filter(may_expire).filter(|hold| hold.expires_at <= now);
            holds.map(|hold| lease.part_on(hold)).collect()
        };
        lock(&self.table).by_job.values().flat_map(expired).collect()
    }
}
