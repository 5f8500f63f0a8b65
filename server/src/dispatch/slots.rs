//! What a round of dispatch has to give: the agents that take work, and their slots.

use crate::{agents::Online, app::App, leases::Leases, store::Occupant};
use lockstep_protocol::{
    agent::Slot,
    job::JobId,
    spec::{Device, JobSpec, Precision},
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
    pub(super) reserved: HashSet<String>,
    /// Jobs that run, once a job has asked for them, and the slots that jobs of this round count on: agent and slot.
    pub(super) occupied: Option<Vec<Occupied>>,
    pub(super) promised: HashSet<(String, u32)>,
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
}

/// An agent that a job may be started on.
#[derive(Clone)]
pub(super) struct Candidate {
    pub(super) agent: Arc<Online>,
    /// Slots of the kind that the job needs, and those of them that are free.
    pub(super) all: Vec<u32>,
    pub(super) free: Vec<u32>,
    /// Where the first of them is among the agent's slots.
    first: Option<usize>,
}

impl Round {
    pub(super) fn begin(app: &App) -> Self {
        // One that was cut off is online until its connection times out, and would hear of no start.
        let heard_since = crate::now() - app.leases.duration;
        let held = app.leases.all_slots_in_use();
        let machine = |agent: Online| Machine {
            in_use: held.get(&agent.row.id).cloned().unwrap_or_default(),
            takes_work: agent.leaving.is_none()
                && agent.row.last_seen_at > heard_since
                && !app.leases.is_cut_off(&agent.row.id)
                && !app.agents.is_draining(&agent.row.id),
            agent: Arc::new(agent),
        };
        let machines = app.agents.online().into_iter().map(machine).collect();
        Self { machines, held, reserved: HashSet::new(), occupied: None, promised: HashSet::new() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.machines.is_empty()
    }

    /// The agents that take this job.
    pub(super) fn candidates(&self, job: &JobId, device: Device) -> Vec<Candidate> {
        let serves = |machine: &&Machine| {
            machine.takes_work && machine.agent.only_job.as_ref().is_none_or(|only| only == job)
        };
        self.machines
            .iter()
            .filter(serves)
            .map(|m| Candidate::of(Arc::clone(&m.agent), &m.in_use, device))
            .collect()
    }

    /// Slots were given away.
    pub(super) fn take(&mut self, agent_id: &str, slots: &[u32]) {
        for machine in self.machines.iter_mut().filter(|m| m.agent.row.id == agent_id) {
            machine.in_use.extend(slots);
        }
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
    candidates.iter().all(|candidate| {
        let agent = &candidate.agent.row.id;
        let now = leases.slots_in_use(agent);
        let is_held = |slot: &u32| now.get(slot).is_some_and(|(job, _)| live.contains(job));
        held.get(agent).into_iter().flatten().all(is_held)
    })
}

impl Candidate {
    pub(super) fn of(agent: Arc<Online>, in_use: &HashSet<u32>, device: Device) -> Self {
        let all = slots_for(&agent.row.slots, device);
        let free = all.iter().copied().filter(|slot| !in_use.contains(slot)).collect();
        let first =
            all.first().and_then(|index| agent.row.slots.iter().position(|slot| slot.index == *index));
        Self { agent, all, free, first }
    }

    fn first(&self) -> Option<&Slot> {
        self.agent.row.slots.get(self.first?)
    }

    /// `cpu` or `cuda`.
    pub(super) fn device(&self) -> &str {
        self.first().map_or("", |slot| slot.device.as_str())
    }

    /// What its slots are: `NVIDIA H200`.
    pub(super) fn model(&self) -> &str {
        self.first().map_or("", |slot| slot.name.as_str())
    }
}

/// The slots of a machine that ranks of such a job may run in.
pub(crate) fn slots_for(slots: &[Slot], device: Device) -> Vec<u32> {
    let of = |kind: &str| -> Vec<u32> {
        slots.iter().filter(|slot| slot.device == kind).map(|slot| slot.index).collect()
    };
    let (first, second) = match device {
        Device::Cuda => ("cuda", None),
        // GPUs where there are any.
        Device::Auto => ("cuda", Some("cpu")),
        // A machine that offers GPUs has CPU cores, too: such a rank takes a GPU's place, not the GPU.
        Device::Cpu => ("cpu", Some("cuda")),
    };
    let found = of(first);
    match second {
        Some(second) if found.is_empty() => of(second),
        _ => found,
    }
}

/// The device that a job needs: half precision is for GPUs alone.
pub(crate) fn device_for(spec: &JobSpec) -> Device {
    let half = matches!(spec.train.precision, Precision::Bf16 | Precision::Fp16);
    match spec.parallel.device {
        Device::Auto if half => Device::Cuda,
        device => device,
    }
}
