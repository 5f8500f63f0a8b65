//! The state of a plan while it is made: agents that accept work, and their remaining slots.

use super::{
    AgentSlot, AgentState, Plan, Reservation, Snapshot, YieldingJob,
    candidates::{Candidate, Candidates, ChosenSlots, slots_for},
};
use crate::{
    checkpoints::Wait,
    store::{AgentRow, JobRow},
};
use lockstep_protocol::{
    job::{Job, JobId},
    spec::{DEVICE_KINDS, Device, JobSpec, Precision},
};
use std::{
    collections::{HashMap, HashSet, hash_map::Entry},
    sync::Arc,
};

/// The state of an unfinished plan.
pub(super) struct Round<'a> {
    pub(super) snapshot: &'a Snapshot,
    pub(super) plan: Plan,
    /// Slots in use on each agent of the snapshot, including slots that jobs of this round get or count on.
    slots_in_use: Vec<HashSet<u32>>,
    /// Running jobs that are ending or may be preempted. Jobs that this round preempts count as ending.
    pub(super) yielding: Vec<YieldingJob>,
    pub(super) reserved_agents: ReservedAgents,
    /// Slots that jobs of this round count on.
    pub(super) reserved_slots: HashSet<AgentSlot>,
    /// Jobs that have their own agents: each of these agents takes only its `only_job`.
    jobs_with_agents: HashSet<JobId>,
    /// The candidates of each device, for jobs without their own agents.
    candidates_by_device: Vec<(Device, Arc<Candidates>)>,
    /// Why jobs of a kind wait. Hundreds of jobs may be of one kind. Slots do not become free during a round, so a kind that does not fit
    /// does not fit later in the round. A reservation changes the reasons, so it clears this map.
    pub(super) waits: HashMap<JobKind, Wait>,
}

/// Agents that are reserved for earlier jobs, by id: the job, and its name, which is empty for a private job.
pub(super) type ReservedAgents = HashMap<String, (JobId, String)>;

/// The properties that decide whether a job fits: ranks, device and priority.
pub(super) type JobKind = (u32, &'static str, i32);

impl<'a> Round<'a> {
    pub(super) fn new(snapshot: &'a Snapshot) -> Self {
        Self {
            snapshot,
            plan: Plan::default(),
            slots_in_use: snapshot.agents.iter().map(|agent| agent.slots_in_use.clone()).collect(),
            yielding: snapshot.yielding_jobs.clone(),
            reserved_agents: ReservedAgents::new(),
            reserved_slots: HashSet::new(),
            jobs_with_agents: snapshot.agents.iter().filter_map(|agent| agent.only_job.clone()).collect(),
            candidates_by_device: Vec::new(),
            waits: HashMap::new(),
        }
    }

    /// Names of some drained agents that would take this job and have slots for the device, and the number of slots of all such agents.
    pub(super) fn drained_agents(&self, job: &JobId, device: Device) -> (Option<String>, usize) {
        const MAX_NAMED: usize = 5;
        let mut slots = 0;
        let mut names = Vec::new();
        for agent in self.snapshot.agents.iter().filter(|agent| agent.is_drained && agent.serves(job)) {
            let count = slots_for(&agent.row.slots, device).len();
            slots += count;
            if count > 0 {
                names.push(agent.row.name.as_str());
            }
        }
        if names.len() > MAX_NAMED {
            names.splice(MAX_NAMED.., ["and others"]);
        }
        ((!names.is_empty()).then(|| names.join(", ")), slots)
    }

    /// The agents on which this job may be started.
    pub(super) fn candidates(&mut self, job: &JobId, device: Device) -> Arc<Candidates> {
        let has_own_agents = self.jobs_with_agents.contains(job);
        let known = self.candidates_by_device.iter().find(|(known, _)| *known == device);
        if let Some((_, known)) = known.filter(|_| !has_own_agents) {
            return Arc::clone(known);
        }
        let agents = self.snapshot.agents.iter().zip(&self.slots_in_use);
        let found = agents.filter(|(agent, _)| agent.takes_work && agent.serves(job));
        let found = found.map(|(agent, in_use)| Candidate::of(Arc::clone(agent), in_use, device));
        let found = Arc::new(Candidates::new(found.collect()));
        if !has_own_agents {
            self.candidates_by_device.push((device, Arc::clone(&found)));
        }
        found
    }

    /// The reason why a job with these slots waits for a checkpoint; `None` if it need not wait. If the snapshot does not contain the
    /// answer, the job is added to the plan's `unknown_checkpoints`.
    pub(super) fn checkpoint_wait(
        &mut self,
        row: &Arc<JobRow>,
        candidates: &Candidates,
        chosen: &ChosenSlots,
    ) -> Option<Wait> {
        let job = &row.job;
        // A job that has never run, is not a fork and has no pretrained weights needs no checkpoint.
        if job.attempt == 0 && !row.is_fork() && job.spec.model.pretrained.is_none() {
            return None;
        }
        // Rank 0 reads the checkpoint and sends its content to the other ranks.
        let reader = chosen.first().map_or("", |(c, _)| candidates[*c].agent.row.id.as_str());
        let known = self.snapshot.checkpoint_waits.get(&(job.id.clone(), reader.to_owned()));
        if known.is_none() {
            self.plan.unknown_checkpoints.push((Arc::clone(row), reader.to_owned()));
        }
        known.cloned().flatten()
    }

    /// Reserves an agent for a waiting job, unless the agent is already reserved for an earlier job.
    pub(super) fn reserve_agent(&mut self, job: &Job, candidate: &Candidate) {
        let agent_id = &candidate.agent.row.id;
        if let Entry::Vacant(entry) = self.reserved_agents.entry(agent_id.clone()) {
            let name = if job.spec.private { String::new() } else { job.name.clone() };
            entry.insert((job.id.clone(), name));
            self.waits.clear();
            self.plan.reservations.push(Reservation {
                job: job.id.clone(),
                agent_id: agent_id.clone(),
                free: candidate.free.clone(),
                ending: Vec::new(),
                is_whole_machine: true,
                since: self.snapshot.now,
            });
        }
    }

    /// Reserves slots of an agent for a waiting job: free slots and slots of jobs that are ending.
    pub(super) fn reserve_slots(&mut self, job: &JobId, candidate: &Candidate, slots: &[u32]) {
        let agent_id = &candidate.agent.row.id;
        self.take_slots(agent_id, slots);
        self.reserved_slots.extend(slots.iter().map(|slot| (agent_id.clone(), *slot)));
        let (free, ending) = slots.iter().partition(|slot| candidate.free.contains(slot));
        self.plan.reservations.push(Reservation {
            job: job.clone(),
            agent_id: agent_id.clone(),
            free,
            ending,
            is_whole_machine: false,
            since: self.snapshot.now,
        });
    }

    /// Marks slots as in use.
    pub(super) fn take_slots(&mut self, agent_id: &str, slots: &[u32]) {
        let agents = self.snapshot.agents.iter().zip(&mut self.slots_in_use);
        for (_, in_use) in agents.filter(|(agent, _)| agent.row.id == agent_id) {
            in_use.extend(slots);
        }
        for (_, candidates) in &mut self.candidates_by_device {
            Arc::make_mut(candidates).remove_free_slots(agent_id, slots);
        }
    }

    /// The kind of a job; `None` if the job has its own agents, so that other jobs of the kind have other candidates.
    pub(super) fn kind_of(&self, job: &Job) -> Option<JobKind> {
        let device = device_for(&job.spec).as_str();
        (!self.jobs_with_agents.contains(&job.id)).then_some((job.ranks, device, job.spec.priority))
    }
}

impl AgentState {
    /// An agent whose slots are free for every job.
    pub(super) fn idle(row: Arc<AgentRow>) -> Self {
        Self { row, only_job: None, takes_work: true, is_drained: false, slots_in_use: HashSet::new() }
    }

    fn serves(&self, job: &JobId) -> bool {
        self.only_job.as_ref().is_none_or(|only| only == job)
    }
}

/// The device that a job needs. `auto` with half precision needs the first kind that supports the precision, because not every machine of
/// the other kinds has the instructions.
pub(crate) fn device_for(spec: &JobSpec) -> Device {
    let precision = spec.train.precision;
    let is_half = matches!(precision, Precision::Bf16 | Precision::Fp16);
    match spec.parallel.device {
        Device::Auto if is_half => DEVICE_KINDS
            .iter()
            .find(|kind| kind.half_precisions.contains(&precision))
            .map_or(Device::Auto, |kind| kind.device),
        device => device,
    }
}
