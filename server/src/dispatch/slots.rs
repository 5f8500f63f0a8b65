//! What a round of dispatch has to give: the agents that take work, and their slots.

use crate::{agents::Online, app::App};
use lockstep_protocol::{
    agent::Slot,
    job::JobId,
    spec::{Device, JobSpec, Precision},
};
use std::collections::HashSet;

/// The agents that are online when a round begins. Slots that become free meanwhile are the next round's.
pub(super) struct Round {
    machines: Vec<Machine>,
    /// Agents that are kept for jobs that come before those which are looked at now.
    pub(super) reserved: HashSet<String>,
}

struct Machine {
    agent: Online,
    in_use: HashSet<u32>,
    takes_work: bool,
}

/// An agent that a job may be started on.
pub(super) struct Candidate {
    pub(super) agent: Online,
    /// Slots of the kind that the job needs, and those of them that are free.
    pub(super) all: Vec<u32>,
    pub(super) free: Vec<u32>,
    /// `cpu` or `cuda`.
    pub(super) device: String,
    /// What its slots are: `NVIDIA H200`.
    pub(super) model: String,
}

impl Round {
    pub(super) fn begin(app: &App) -> Self {
        // One that was cut off is online until its connection times out, and would hear of no start.
        let heard_since = crate::now() - app.leases.duration;
        let machine = |agent: Online| Machine {
            in_use: app.leases.slots_in_use(&agent.row.id).into_keys().collect(),
            takes_work: agent.leaving.is_none()
                && agent.row.last_seen_at > heard_since
                && !app.agents.is_draining(&agent.row.id),
            agent,
        };
        Self { machines: app.agents.online().into_iter().map(machine).collect(), reserved: HashSet::new() }
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
            .map(|m| Candidate::of(m.agent.clone(), &m.in_use, device))
            .collect()
    }

    /// Slots were given away.
    pub(super) fn take(&mut self, agent_id: &str, slots: &[u32]) {
        for machine in self.machines.iter_mut().filter(|m| m.agent.row.id == agent_id) {
            machine.in_use.extend(slots);
        }
    }
}

impl Candidate {
    pub(super) fn of(agent: Online, in_use: &HashSet<u32>, device: Device) -> Self {
        let all = slots_for(&agent.row.slots, device);
        let free = all.iter().copied().filter(|slot| !in_use.contains(slot)).collect();
        let first = all.first().and_then(|index| agent.row.slots.iter().find(|slot| slot.index == *index));
        let (device, model) = first.map(|s| (s.device.clone(), s.name.clone())).unwrap_or_default();
        Self { agent, all, free, device, model }
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
