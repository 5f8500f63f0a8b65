//! Why a job that does not fit waits, in facts.

use super::{
    candidates::{Candidate, Candidates, address},
    gang::most,
    round::{Round, device_for},
};
use lockstep_protocol::{
    job::{Job, JobId},
    reason::{AgentSlots, Facts, Reason, ReasonCode, SLOTS_ON, undrain},
    spec::{DEVICE_KINDS, Device},
};
use std::cmp::Reverse;

/// Why a job waits for which these agents are `kept`, if they will ever do. `more`: what else it waits for.
pub(super) fn wait_reason(
    candidates: &Candidates,
    job: &Job,
    kept: Option<&[usize]>,
    more: Option<String>,
    round: &Round<'_>,
) -> Reason {
    let (ranks, device) = (job.ranks, device_for(&job.spec));
    let mut facts = Facts {
        detail: more,
        slots_needed: Some(ranks),
        // Of `auto`, slots of whatever kind.
        device: Some(if device == Device::Auto { Device::Cpu } else { device }.name().into()),
        ..Facts::default()
    };
    let (drained, drained_slots) = round.drained(&job.id, device);
    let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    if candidates.is_empty() {
        let code = if round.snapshot.agents.is_empty() {
            ReasonCode::NoAgentOnline
        } else {
            ReasonCode::NoAgentAccepts
        };
        return Reason::new(code, Facts { detail: drained, ..Facts::default() });
    }
    let mut takers: Vec<&Candidate> = candidates.iter().filter(|c| !c.all.is_empty()).collect();
    if takers.len() > 1 {
        let on = |c: &Candidate| AgentSlots {
            agent: c.agent.row.name.clone(),
            free: number(c.free.len()),
            total: number(c.all.len()),
        };
        takers.sort_by_key(|c| Reverse(c.free.len()));
        facts.slots_on = takers.into_iter().take(SLOTS_ON + 1).map(on).collect();
    }
    let sum = most(candidates);
    // To have them back helps where that makes enough, and a job with agents of its own waits for those.
    let all = candidates.iter().map(|c| c.all.len()).sum::<usize>() + drained_slots;
    let has_own = candidates.iter().any(|c| c.agent.only_job.is_some());
    let drained = drained.filter(|_| all >= ranks as usize && !has_own);
    let too_few = |facts: Facts| {
        let details: Vec<_> = drained.as_deref().map(undrain).into_iter().chain(facts.detail).collect();
        let detail = (!details.is_empty()).then(|| details.join("; "));
        Reason::new(ReasonCode::TooFewSlots, Facts { detail, ..facts })
    };
    let of_one = |c: &Candidate, facts: &mut Facts| {
        facts.agent = Some(c.agent.row.name.clone());
        (facts.slots_free, facts.slots_total) = (Some(number(c.free.len())), Some(number(c.all.len())));
    };
    match kept {
        Some([one]) => {
            of_one(&candidates[*one], &mut facts);
            reserved(std::slice::from_ref(&candidates[*one]), round, &mut facts);
            Reason::new(ReasonCode::WaitingForSlots, facts)
        }
        None if sum.machines <= 1 => {
            let largest = candidates.iter().max_by_key(|c| (c.all.len(), c.free.len()));
            if let Some(largest) = largest {
                of_one(largest, &mut facts);
            }
            let with_slots: Vec<_> =
                candidates.iter().filter(|c| c.device() == largest_device(candidates)).collect();
            // Together they would have enough, if they could reach each other.
            if with_slots.iter().map(|c| c.all.len()).sum::<usize>() >= ranks as usize {
                let apart = |c: &&&Candidate| address(&c.agent.row.machine).is_none();
                let names = with_slots.iter().filter(apart).map(|c| c.agent.row.name.clone());
                facts.detail = Some(names.collect::<Vec<_>>().join(", "));
                return Reason::new(ReasonCode::MachinesApart, facts);
            }
            too_few(facts)
        }
        kept => {
            facts.machines = Some(number(sum.machines));
            (facts.slots_free, facts.slots_total) = (Some(number(sum.free)), Some(number(sum.slots)));
            if kept.is_some() {
                reserved(candidates, round, &mut facts);
                return Reason::new(ReasonCode::WaitingForSlots, facts);
            }
            too_few(facts)
        }
    }
}

/// Which of the free slots are kept for jobs that come first.
fn reserved(candidates: &[Candidate], round: &Round<'_>, facts: &mut Facts) {
    let mut jobs: Vec<&(JobId, String)> = Vec::new();
    let mut slots = 0;
    for candidate in candidates.iter().filter(|candidate| !candidate.free.is_empty()) {
        if let Some(job) = round.reserved_for.get(&candidate.agent.row.id) {
            slots += candidate.free.len();
            if !jobs.contains(&job) {
                jobs.push(job);
            }
        }
    }
    if !jobs.is_empty() {
        facts.slots_kept = u32::try_from(slots).ok();
        facts.kept_for = jobs.into_iter().map(|(_, name)| name.clone()).collect();
    }
}

/// The kind of slots that most machines here have for a job.
fn largest_device(candidates: &[Candidate]) -> &str {
    let slots = |device: &str| -> usize {
        candidates.iter().filter(|c| c.device() == device).map(|c| c.all.len()).sum()
    };
    // Of several with as many, the one that `auto` prefers.
    DEVICE_KINDS.iter().rev().map(|kind| kind.name).max_by_key(|name| slots(name)).unwrap_or_default()
}
