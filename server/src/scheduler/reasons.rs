//! The reason why a job that does not fit waits.

use super::{
    candidates::{Candidate, Candidates, address},
    gang::max_capacity,
    round::{Round, device_for},
};
use lockstep_protocol::{
    job::{Job, JobId},
    reason::{AgentSlots, MAX_KEPT_FOR, MAX_SLOTS_ON, Reason, ReasonKind, SlotWait, Text, undrain_advice},
    spec::{DEVICE_KINDS, Device},
};
use std::cmp::Reverse;

/// The reason why a job waits. `reserved`: the agents that are reserved for the job; `None` if no agents would ever have enough slots.
/// `explanation`: a text that is added.
pub(super) fn wait_reason(
    candidates: &Candidates,
    job: &Job,
    reserved: Option<&[usize]>,
    explanation: Option<Text>,
    round: &Round<'_>,
) -> Reason {
    let (ranks, device) = (job.ranks, device_for(&job.spec));
    let (drained, drained_slots) = round.drained_agents(&job.id, device);
    let to_u32 = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    if round.snapshot.agents.is_empty() {
        return ReasonKind::NoAgentOnline.into();
    }
    if candidates.is_empty() {
        return ReasonKind::NoAgentAccepts { detail: drained.map(Into::into) }.into();
    }
    let capacity = max_capacity(candidates);
    let mut wait = SlotWait {
        // The device `auto` uses slots of any kind.
        device: if device == Device::Auto { Device::Cpu } else { device },
        slots_needed: ranks,
        slots_free: to_u32(capacity.free),
        slots_total: to_u32(capacity.slots),
        agent: None,
        machines: Some(to_u32(capacity.machines)),
        slots_kept: None,
        kept_for: Vec::new(),
        slots_on: Vec::new(),
        detail: explanation,
    };
    let mut takers: Vec<&Candidate> = candidates.iter().filter(|c| !c.slots.is_empty()).collect();
    if takers.len() > 1 {
        let slots_on = |c: &Candidate| AgentSlots {
            agent: c.agent.row.name.as_str().into(),
            free: to_u32(c.free.len()),
            total: to_u32(c.slots.len()),
        };
        takers.sort_by_key(|c| Reverse(c.free.len()));
        wait.slots_on = takers.into_iter().take(MAX_SLOTS_ON + 1).map(slots_on).collect();
    }
    // Drained agents are only named if the job would fit with them. A job with its own agents waits for its own agents.
    let total = candidates.iter().map(|c| c.slots.len()).sum::<usize>() + drained_slots;
    let has_own_agents = candidates.iter().any(|c| c.agent.only_job.is_some());
    let drained = drained.filter(|_| total >= ranks as usize && !has_own_agents);
    let too_few = |mut wait: SlotWait| {
        if let Some(drained) = drained.as_deref().map(undrain_advice) {
            let explanation = wait.detail.map_or(String::new(), |text| format!("; {text}"));
            wait.detail = Some(format!("{drained}{explanation}").into());
        }
        ReasonKind::TooFewSlots(wait)
    };
    let describe_one = |c: &Candidate, wait: &mut SlotWait| {
        (wait.agent, wait.machines) = (Some(c.agent.row.name.as_str().into()), None);
        (wait.slots_free, wait.slots_total) = (to_u32(c.free.len()), to_u32(c.slots.len()));
    };
    let kind = match reserved {
        Some([one]) => {
            describe_one(&candidates[*one], &mut wait);
            add_reserved(std::slice::from_ref(&candidates[*one]), round, &mut wait);
            ReasonKind::WaitingForSlots(wait)
        }
        None if capacity.machines <= 1 => {
            let largest = candidates.iter().max_by_key(|c| (c.slots.len(), c.free.len()));
            if let Some(largest) = largest {
                describe_one(largest, &mut wait);
            }
            let of_device: Vec<_> =
                candidates.iter().filter(|c| c.device() == largest_device(candidates)).collect();
            // The machines would have enough slots together if they could reach each other.
            if of_device.iter().map(|c| c.slots.len()).sum::<usize>() >= ranks as usize {
                let is_unreachable = |c: &&&Candidate| address(&c.agent.row.machine).is_none();
                let names = of_device.iter().filter(is_unreachable).map(|c| c.agent.row.name.clone());
                let detail = names.collect::<Vec<_>>().join(", ").into();
                ReasonKind::MachinesApart { device: wait.device, slots_needed: ranks, detail }
            } else {
                too_few(wait)
            }
        }
        Some(_) => {
            add_reserved(candidates, round, &mut wait);
            ReasonKind::WaitingForSlots(wait)
        }
        None => too_few(wait),
    };
    kind.into()
}

/// Adds the number of free slots that are reserved for earlier jobs, and these jobs' names, to `wait`.
fn add_reserved(candidates: &[Candidate], round: &Round<'_>, wait: &mut SlotWait) {
    let mut jobs: Vec<&(JobId, String)> = Vec::new();
    let mut slots = 0;
    for candidate in candidates.iter().filter(|candidate| !candidate.free.is_empty()) {
        if let Some(job) = round.reserved_agents.get(&candidate.agent.row.id) {
            slots += candidate.free.len();
            if !jobs.contains(&job) {
                jobs.push(job);
            }
        }
    }
    if !jobs.is_empty() {
        wait.slots_kept = u32::try_from(slots).ok();
        wait.kept_for = jobs.into_iter().take(MAX_KEPT_FOR).map(|(_, name)| name.as_str().into()).collect();
    }
}

/// The kind of slot that the candidates have most of.
fn largest_device(candidates: &[Candidate]) -> &str {
    let slots = |device: &str| -> usize {
        candidates.iter().filter(|c| c.device() == device).map(|c| c.slots.len()).sum()
    };
    // Of kinds with equally many slots, the kind that `auto` prefers.
    DEVICE_KINDS.iter().rev().map(|kind| kind.name).max_by_key(|name| slots(name)).unwrap_or_default()
}
