//! What a round of dispatch has to give: the agents that take work, and their slots.

use super::candidates::{Candidate, Candidates, slots_for};
use crate::{
    agents::Online,
    app::App,
    artifact_fetches::CheckWait,
    leases::Leases,
    reservations::Kept,
    store::{JobRow, Occupant},
};
use lockstep_protocol::{
    job::{Job, JobId},
    reason::Reason,
    spec::{DEVICE_KINDS, Device, JobSpec, Precision},
};
use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

/// The agents that are online when a round begins. Slots that become free meanwhile are the next round's.
pub(super) struct Round {
    machines: Vec<Machine>,
    /// The slots that attempts held when it began, by agent.
    held: HashMap<String, HashSet<u32>>,
    /// Agents that are kept for jobs that come before those which are looked at now.
    reserved: HashSet<String>,
    /// What is kept for which job, for those who ask.
    pub(super) kept: Vec<Kept>,
    /// For those who wait behind: the names of the jobs that agents are reserved for, by agent; an empty one is private.
    reserved_for: HashMap<String, (JobId, String)>,
    /// Jobs that may yield, once a job has asked for them, and the slots that jobs of this round count on: agent and slot.
    pub(super) occupied: Option<Vec<Occupied>>,
    pub(super) promised: HashSet<(String, u32)>,
    /// Jobs that agents are there for alone.
    served: HashSet<JobId>,
    /// For all other jobs: what each kind of device has for them.
    by_device: Vec<(Device, Arc<Candidates>)>,
    /// Kinds of jobs that do not fit: hundreds of jobs may be of one kind. Slots are only taken in a round, so that no kind fits later; a
    /// reservation changes why.
    do_not_fit: HashMap<JobKind, DoesNotFit>,
    /// Jobs that start when the round is over, in order, with their slots.
    pub(super) starts: Vec<Start>,
    /// What is left of the time that it waits for checks of checkpoints.
    pub(super) check_wait: CheckWait,
    /// Why jobs wait, for when those that start have been started.
    pub(super) reasons: Vec<(Arc<JobRow>, Arc<Reason>)>,
}

/// What decides whether a job fits: ranks, device and priority.
pub(super) type JobKind = (u32, &'static str, i32);

/// What a round has found out about a kind of jobs.
#[derive(Clone)]
pub(super) struct DoesNotFit {
    pub(super) why: Arc<Reason>,
    /// Agents are reserved for it.
    pub(super) is_kept: bool,
}

/// A job that is about to start, with the agents and their slots.
pub(super) struct Start {
    pub(super) row: Arc<JobRow>,
    pub(super) chosen: Vec<(Arc<Online>, Vec<u32>)>,
    /// With how many ranks and why, where these are fewer than the job's.
    pub(super) fewer: Option<Reason>,
}

/// A job that runs, and its slots: agent and slot.
#[derive(Debug, Clone)]
pub(super) struct Occupied {
    pub(super) by: Occupant,
    /// Its slots become free without anybody's doing, soon.
    pub(super) ends: bool,
    pub(super) slots: Vec<(String, u32)>,
}

struct Machine {
    agent: Arc<Online>,
    in_use: HashSet<u32>,
    takes_work: bool,
    is_drained: bool,
}

impl Round {
    pub(super) fn begin(app: &App) -> Self {
        // One that was cut off is online until its connection times out, and would hear of no start.
        let heard_since = crate::now() - app.leases.duration;
        let held = app.leases.all_slots_in_use();
        let machine = |agent: Online| Machine {
            in_use: held.get(&agent.row.id).cloned().unwrap_or_default(),
            takes_work: agent.leaving.is_none()
                && agent.no_work.is_none()
                && agent.row.last_seen_at > heard_since
                && !app.leases.is_cut_off(&agent.row.id)
                && !app.agents.is_draining(&agent.row.id),
            is_drained: app.agents.is_draining(&agent.row.id),
            agent: Arc::new(agent),
        };
        let machines: Vec<_> = app.agents.online().into_iter().map(machine).collect();
        let served = machines.iter().filter_map(|m| m.agent.only_job.clone()).collect();
        Self {
            machines,
            held,
            reserved: HashSet::new(),
            kept: Vec::new(),
            reserved_for: HashMap::new(),
            occupied: None,
            promised: HashSet::new(),
            served,
            by_device: Vec::new(),
            do_not_fit: HashMap::new(),
            starts: Vec::new(),
            check_wait: CheckWait::default(),
            reasons: Vec::new(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.machines.is_empty()
    }

    /// Names of drained agents that are online, serve this job and have slots of this kind, some of them, and how many slots all of them have.
    pub(super) fn drained(&self, job: &JobId, device: Device) -> (Option<String>, usize) {
        const NAMED: usize = 5;
        let mut slots = 0;
        let mut names = Vec::new();
        let serves = |m: &&Machine| m.is_drained && m.agent.only_job.as_ref().is_none_or(|only| only == job);
        for machine in self.machines.iter().filter(serves) {
            let own = slots_for(&machine.agent.row.slots, device).len();
            slots += own;
            if own > 0 {
                names.push(machine.agent.row.name.as_str());
            }
        }
        if names.len() > NAMED {
            names.splice(NAMED.., ["and others"]);
        }
        ((!names.is_empty()).then(|| names.join(", ")), slots)
    }

    /// The agents that take this job.
    pub(super) fn candidates(&mut self, job: &JobId, device: Device) -> Arc<Candidates> {
        let is_served = self.served.contains(job);
        let known = self.by_device.iter().find(|(of, _)| *of == device);
        if let Some((_, known)) = known.filter(|_| !is_served) {
            return Arc::clone(known);
        }
        let serves = |machine: &&Machine| {
            machine.takes_work && machine.agent.only_job.as_ref().is_none_or(|only| only == job)
        };
        let found = self.machines.iter().filter(serves);
        let found = found.map(|m| Candidate::of(Arc::clone(&m.agent), &m.in_use, device));
        let found = Arc::new(Candidates::new(found.collect()));
        if !is_served {
            self.by_device.push((device, Arc::clone(&found)));
        }
        found
    }

    /// Keeps a machine for a job that waits. One that is kept already is so for a job that comes before this one.
    pub(super) fn reserve(&mut self, job: &Job, candidate: &Candidate) {
        let agent_id = &candidate.agent.row.id;
        if self.reserved.insert(agent_id.clone()) {
            self.do_not_fit.clear();
            let name = if job.spec.private { String::new() } else { job.name.clone() };
            self.reserved_for.insert(agent_id.clone(), (job.id.clone(), name));
            self.kept.push(Kept {
                job: job.id.clone(),
                agent_id: agent_id.clone(),
                free: candidate.free.clone(),
                ending: Vec::new(),
                whole_machine: true,
            });
        }
    }

    /// Keeps slots of a machine for a job that waits, free ones and those of jobs that end.
    pub(super) fn promise(&mut self, job: &JobId, candidate: &Candidate, slots: &[u32]) {
        let agent_id = &candidate.agent.row.id;
        self.take(agent_id, slots);
        self.promised.extend(slots.iter().map(|slot| (agent_id.clone(), *slot)));
        let (free, ending) = slots.iter().partition(|slot| candidate.free.contains(slot));
        let (job, agent_id) = (job.clone(), agent_id.clone());
        self.kept.push(Kept { job, agent_id, free, ending, whole_machine: false });
    }

    /// Slots were given away.
    pub(super) fn take(&mut self, agent_id: &str, slots: &[u32]) {
        for machine in self.machines.iter_mut().filter(|m| m.agent.row.id == agent_id) {
            machine.in_use.extend(slots);
        }
        for (_, candidates) in &mut self.by_device {
            Arc::make_mut(candidates).take(agent_id, slots);
        }
    }

    /// Notes why a job waits.
    pub(super) fn waits(&mut self, row: &Arc<JobRow>, why: impl Into<Arc<Reason>>) {
        self.reasons.push((Arc::clone(row), why.into()));
    }

    /// The job that a machine is reserved for, and its name.
    pub(super) fn reserved_for(&self, agent_id: &str) -> Option<&(JobId, String)> {
        self.reserved_for.get(agent_id)
    }

    pub(super) fn reserved(&self) -> &HashSet<String> {
        &self.reserved
    }

    /// The kind of a job that any other of its kind can stand for.
    pub(super) fn kind(&self, job: &Job) -> Option<JobKind> {
        let device = device_for(&job.spec).name();
        (!self.served.contains(&job.id)).then_some((job.ranks, device, job.spec.priority))
    }

    /// What was found out about this kind.
    pub(super) fn does_not_fit(&self, kind: &JobKind) -> Option<DoesNotFit> {
        self.do_not_fit.get(kind).cloned()
    }

    pub(super) fn note(&mut self, kind: JobKind, found: DoesNotFit) {
        self.do_not_fit.insert(kind, found);
    }

    /// Whether all that was in use on these candidates when the round began still is. An attempt ends in the store first, and then lets
    /// go of its slots: `live` are the jobs with an attempt that may write, read just now.
    pub(super) fn is_current(
        &self,
        candidates: &[Candidate],
        leases: &Leases,
        live: &HashSet<JobId>,
    ) -> bool {
        all_still_held(&self.held, candidates, leases, live)
    }
}

/// As [`Round::is_current`].
pub(super) fn all_still_held(
    held: &HashMap<String, HashSet<u32>>,
    candidates: &[Candidate],
    leases: &Leases,
    live: &HashSet<JobId>,
) -> bool {
    let now = leases.jobs_in_slots();
    candidates.iter().all(|candidate| {
        let agent = &candidate.agent.row.id;
        let now = now.get(agent);
        let is_held = |slot: &u32| now.and_then(|now| now.get(slot)).is_some_and(|job| live.contains(job));
        held.get(agent).into_iter().flatten().all(is_held)
    })
}

/// The device that a job needs: half precision is not for all kinds.
pub(crate) fn device_for(spec: &JobSpec) -> Device {
    let half = matches!(spec.train.precision, Precision::Bf16 | Precision::Fp16);
    match spec.parallel.device {
        Device::Auto if half => {
            DEVICE_KINDS.iter().find(|kind| kind.has_half_precision).map_or(Device::Auto, |kind| kind.device)
        }
        device => device,
    }
}
