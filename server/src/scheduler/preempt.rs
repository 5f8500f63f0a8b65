//! Preemption: a job that does not fit takes the slots of running jobs of lower priority that allow it (`preemptible`), if it fits
//! then. As few jobs as possible are preempted, the lowest priority first. Jobs of the same priority are not preempted, so a
//! preempted job never preempts back.

use super::{
    AgentSlot, Preemption, YieldingJob,
    candidates::{Candidate, Candidates, ChosenSlots},
    gang::choose_agents,
    reasons::wait_reason,
    round::{ReservedAgents, Round},
};
use crate::{checkpoints::Wait, store::JobRow};
use std::{
    cmp::Reverse,
    collections::{HashMap, HashSet},
    sync::Arc,
};

/// Maximum number of victims of a job over several agents for which [`choose_victims_on_several`] checks whether the job fits without them.
const MAX_TRIED: usize = 64;

/// Slots for a job, and the jobs that must end to free the slots, by their index in the list of yielding jobs.
#[derive(Debug, PartialEq)]
struct Choice {
    chosen: ChosenSlots,
    victims: Vec<usize>,
}

/// Plans the preemption of running jobs for a job that does not fit, and reserves their slots. Slots of jobs that are ending anyway are
/// used first, regardless of these jobs' priority. Returns `None` if the job would not fit even then.
pub(super) fn preempt(round: &mut Round<'_>, row: &Arc<JobRow>, candidates: &Candidates) -> Option<Wait> {
    let job = &row.job;
    let (ranks, priority) = (job.ranks as usize, job.spec.priority);
    let choice = choose_victims(
        candidates,
        ranks,
        priority,
        &round.reserved_agents,
        &round.yielding,
        &round.reserved_slots,
    )?;
    if let Some(Wait { why, keeps_slots }) = round.checkpoint_wait(row, candidates, &choice.chosen) {
        // No job is preempted yet, because other jobs would get the freed slots meanwhile. Free slots are reserved during a check.
        for (c, slots) in choice.chosen.iter().filter(|_| keeps_slots) {
            let free = &candidates[*c].free;
            let slots: Vec<u32> = slots.iter().copied().filter(|slot| free.contains(slot)).collect();
            if !slots.is_empty() {
                round.reserve_slots(&job.id, &candidates[*c], &slots);
            }
        }
        return Some(Wait { why, keeps_slots: true });
    }
    let counted_on = ending_jobs_counted_on(&choice, candidates, &round.yielding);
    let is_preempting =
        !choice.victims.is_empty() || counted_on.iter().any(|job| job.occupant.is_being_preempted);
    let occupants = counted_on.iter().map(|job| &job.occupant);
    let ending =
        occupants.filter(|occupant| occupant.must_end).map(|occupant| occupant.job.clone()).collect();
    let victims = choice.victims.iter().map(|victim| round.yielding[*victim].occupant.job.clone()).collect();
    for victim in &choice.victims {
        round.yielding[*victim].is_ending = true;
    }
    let (row, starts_before) = (Arc::clone(row), round.plan.starts.len());
    round.plan.preemptions.push(Preemption { row, victims, ending, starts_before });

    let agents: Vec<usize> = choice.chosen.iter().map(|(c, _)| *c).collect();
    let explanation = is_preempting.then(|| "jobs of lower priority are being preempted".into());
    let why = wait_reason(candidates, job, Some(&agents), explanation, round);
    for (c, slots) in &choice.chosen {
        round.reserve_slots(&job.id, &candidates[*c], slots);
    }
    Some(Wait { why: why.into(), keeps_slots: true })
}

/// The jobs that are ending anyway and have some of the chosen slots.
fn ending_jobs_counted_on<'a>(
    choice: &Choice,
    candidates: &Candidates,
    yielding: &'a [YieldingJob],
) -> Vec<&'a YieldingJob> {
    let chosen = choice.chosen.iter();
    let chosen = chosen.map(|(c, slots)| (candidates[*c].agent.row.id.as_str(), slots));
    let chosen: HashMap<&str, &Vec<u32>> = chosen.collect();
    let is_chosen =
        |(agent, slot): &AgentSlot| chosen.get(agent.as_str()).is_some_and(|slots| slots.contains(slot));
    yielding.iter().filter(|job| job.is_ending && job.slots.iter().any(is_chosen)).collect()
}

/// The candidates with the slots of these jobs counted as free, after the slots that are free now.
fn with_slots_of<'a>(
    candidates: &Candidates,
    jobs: impl IntoIterator<Item = &'a YieldingJob>,
    reserved_slots: &HashSet<AgentSlot>,
) -> Candidates {
    let by_agent: HashMap<&str, usize> =
        candidates.iter().enumerate().map(|(n, c)| (c.agent.row.id.as_str(), n)).collect();
    let mut candidates = candidates.clone();
    for place in jobs.into_iter().flat_map(|job| &job.slots).filter(|place| !reserved_slots.contains(*place))
    {
        let (agent, slot) = place;
        if let Some(candidate) = by_agent.get(agent.as_str()) {
            candidates.add_free_slot(*candidate, *slot);
        }
    }
    candidates
}

/// Finds slots for a job of `ranks` ranks if some yielding jobs end: jobs that are ending anyway, and preemptible jobs of lower priority,
/// the lowest priority first, then the newest job first.
fn choose_victims(
    candidates: &Candidates,
    ranks: usize,
    priority: i32,
    reserved: &ReservedAgents,
    yielding: &[YieldingJob],
    reserved_slots: &HashSet<AgentSlot>,
) -> Option<Choice> {
    let may_end = |YieldingJob { occupant, is_ending, .. }: &YieldingJob| {
        occupant.preemptible && occupant.priority < priority && !is_ending
    };
    let lower_jobs: Vec<usize> = (0..yielding.len()).filter(|n| may_end(&yielding[*n])).collect();
    if lower_jobs.is_empty() && !yielding.iter().any(|job| job.is_ending) {
        return None;
    }
    let after_ends = with_slots_of(candidates, yielding.iter().filter(|job| job.is_ending), reserved_slots);
    if let Some(chosen) = choose_agents(&after_ends, ranks, reserved) {
        // The job did not fit before, so it counts on slots that are not free yet.
        return Some(Choice { chosen, victims: Vec::new() });
    }
    let single = (0..after_ends.len()).filter(|c| !reserved.contains_key(&after_ends[*c].agent.row.id));
    let single = single.filter_map(|c| {
        choose_victims_on_one(&after_ends[c], ranks, yielding, &lower_jobs, reserved_slots)
            .map(|found| (c, found))
    });
    // Fewest victims, then lowest priority, then the agent with most free slots.
    let best = single.min_by_key(|(c, (_, victims))| {
        let highest = victims.iter().map(|victim| yielding[*victim].occupant.priority).max();
        (victims.len(), highest, Reverse(after_ends[*c].free.len()))
    });
    if let Some((c, (slots, victims))) = best {
        return Some(Choice { chosen: vec![(c, slots)], victims });
    }
    choose_victims_on_several(&after_ends, ranks, reserved, yielding, lower_jobs, reserved_slots)
}

/// Finds slots on one agent, and the fewest `lower_jobs` that must end for them.
fn choose_victims_on_one(
    candidate: &Candidate,
    ranks: usize,
    yielding: &[YieldingJob],
    lower_jobs: &[usize],
    reserved_slots: &HashSet<AgentSlot>,
) -> Option<(Vec<u32>, Vec<usize>)> {
    let agent = &candidate.agent.row.id;
    let is_on_agent = |(holder, slot): &AgentSlot| {
        holder == agent
            && candidate.slots.contains(slot)
            && !reserved_slots.contains(&(holder.clone(), *slot))
    };
    let slots_of = |victim: &usize| -> Vec<u32> {
        yielding[*victim].slots.iter().filter(|slot| is_on_agent(slot)).map(|(_, slot)| *slot).collect()
    };
    let mut on_agent: Vec<(usize, Vec<u32>)> = lower_jobs
        .iter()
        .map(|victim| (*victim, slots_of(victim)))
        .filter(|(_, slots)| !slots.is_empty())
        .collect();
    let needed = ranks.saturating_sub(candidate.free.len());
    if on_agent.iter().map(|(_, slots)| slots.len()).sum::<usize>() < needed {
        return None;
    }
    // The number of victims that are needed if the largest jobs are taken first.
    let mut largest: Vec<usize> = on_agent.iter().map(|(_, slots)| slots.len()).collect();
    largest.sort_unstable_by(|a, b| b.cmp(a));
    let (mut sum, mut fewest) = (0, 0);
    while sum < needed {
        sum += largest[fewest];
        fewest += 1;
    }
    // With this number of victims, takes the jobs of the lowest priority. A job is taken if the largest other jobs, `remaining_count` of
    // them, have the slots that are then still missing.
    let (mut missing, mut victims, mut slots) = (needed, Vec::new(), candidate.free.clone());
    while victims.len() < fewest {
        let remaining_count = fewest - victims.len() - 1;
        let index = (0..on_agent.len()).find(|n| {
            let mut rest: Vec<usize> =
                on_agent.iter().enumerate().filter(|(m, _)| m != n).map(|(_, (_, s))| s.len()).collect();
            rest.sort_unstable_by(|a, b| b.cmp(a));
            on_agent[*n].1.len() + rest.iter().take(remaining_count).sum::<usize>() >= missing
        })?;
        let (victim, freed) = on_agent.remove(index);
        missing = missing.saturating_sub(freed.len());
        slots.extend(freed);
        victims.push(victim);
    }
    slots.truncate(ranks);
    Some((slots, victims))
}

/// Like [`choose_victims`], over several agents: ends the `lower_jobs` by ascending priority until the job fits, then spares jobs that are
/// not needed.
fn choose_victims_on_several(
    after_ends: &Candidates,
    ranks: usize,
    reserved: &ReservedAgents,
    yielding: &[YieldingJob],
    lower_jobs: Vec<usize>,
    reserved_slots: &HashSet<AgentSlot>,
) -> Option<Choice> {
    let choose_after = |victims: &[usize]| {
        let victims = victims.iter().map(|victim| &yielding[*victim]);
        choose_agents(&with_slots_of(after_ends, victims, reserved_slots), ranks, reserved)
    };
    choose_after(&lower_jobs)?;
    // Finds the shortest prefix of the list that is enough.
    let lengths: Vec<_> = (1..=lower_jobs.len()).collect();
    let length = lengths.partition_point(|n| choose_after(&lower_jobs[..*n]).is_none()) + 1;
    let chosen = choose_after(&lower_jobs[..length])?;
    let is_used = |victim: &usize| {
        let mut slots = yielding[*victim].slots.iter();
        slots.any(|(agent, slot)| {
            chosen.iter().any(|(c, used)| after_ends[*c].agent.row.id == *agent && used.contains(slot))
        })
    };
    let mut victims: Vec<usize> = lower_jobs[..length].iter().copied().filter(is_used).collect();
    for victim in victims.clone().iter().rev().take(MAX_TRIED) {
        let fewer: Vec<usize> = victims.iter().copied().filter(|other| other != victim).collect();
        if choose_after(&fewer).is_some() {
            victims = fewer;
        }
    }
    Some(Choice { chosen: choose_after(&victims)?, victims })
}

#[cfg(test)]
mod tests;
