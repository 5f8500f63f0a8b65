//! Preemption: a job that does not fit takes the slots of running jobs of lower priority that allow it (`preemptible`). Only if it
//! fits then, and of as few jobs as possible, those of the lowest priority first. Jobs of its own priority are left alone: one that
//! was preempted never preempts back.

use super::{
    ends::order_stop,
    gang::choose,
    slots::{Candidate, Occupied, Round, device_for},
    waits::wait_reason,
};
use crate::{
    app::App,
    artifacts, lifecycle,
    store::{JobRow, Occupant, Result, StoreError},
};
use lockstep_protocol::{
    job::{Job, JobId},
    reason::{Facts, Reason, ReasonCode},
};
use std::collections::{HashMap, HashSet};

/// Of a job over several agents: so many of the jobs that it takes the slots of are looked at twice, whether it needs them.
const MOST_TRIED: usize = 64;

/// Slots for a job, by the place of their agent among the candidates, and the jobs that have to end for it, by their place in the
/// list of those that run.
#[derive(Debug, PartialEq)]
struct Plan {
    chosen: Vec<(usize, Vec<u32>)>,
    victims: Vec<usize>,
}

/// Orders running jobs to end in favour of one that does not fit, and keeps their slots for it in this round. Some: it now waits for
/// them, or for those that were ordered to end in an earlier round.
pub(super) async fn make_room(
    app: &App,
    job: &Job,
    candidates: &[Candidate],
    round: &mut Round,
) -> Result<Option<Reason>> {
    if round.occupied.is_none() {
        let occupied = |by: Occupant| {
            let places = app.leases.places_of(&by.job);
            let slots = places.into_iter().flat_map(|place| {
                place.ranks.into_iter().map(move |(_, slot)| (place.agent_id.clone(), slot))
            });
            Occupied { slots: slots.collect(), by }
        };
        round.occupied = Some(app.store.preemptible().await?.into_iter().map(occupied).collect());
    }
    let occupied = round.occupied.as_deref().unwrap_or_default();
    // They come in the order of their priorities.
    let lower = occupied.partition_point(|o| o.by.priority < job.spec.priority);
    let Some(plan) =
        plan(candidates, job.ranks as usize, &round.reserved, &occupied[..lower], &round.promised)
    else {
        return Ok(None);
    };
    let reader = plan.chosen.first().map_or("", |(c, _)| candidates[*c].agent.row.id.as_str());
    if let Some(why) = artifacts::coming(app, job, reader).await? {
        // The slots would be given to others meanwhile.
        return Ok(Some(why));
    }
    let victims: Vec<JobId> = plan.victims.iter().map(|victim| occupied[*victim].by.job.clone()).collect();
    let agents: Vec<usize> = plan.chosen.iter().map(|(c, _)| *c).collect();
    let device = device_for(&job.spec);
    let mut why = wait_reason(candidates, job.ranks, device, Some(&agents), round.is_empty());
    for (c, slots) in &plan.chosen {
        let agent = &candidates[*c].agent.row.id;
        round.take(agent, slots);
        round.promised.extend(slots.iter().map(|slot| (agent.clone(), *slot)));
    }
    for occupied in round.occupied.iter_mut().flatten() {
        occupied.by.ends |= victims.contains(&occupied.by.job);
    }
    for victim in &victims {
        let by = job.clone();
        let change = move |row: &mut JobRow| lifecycle::preempt(row, &by, crate::now());
        match app.store.change_job(victim, Box::new(change)).await {
            Ok(changed) => app.announce(&changed),
            Err(StoreError::NotFound(_)) => continue,
            Err(error) => return Err(error),
        }
        order_stop(app, victim).await?;
    }
    if *why.code() == ReasonCode::WaitingForSlots {
        let detail = "jobs of lower priority are being preempted".to_owned();
        why = Reason::new(ReasonCode::WaitingForSlots, Facts { detail: Some(detail), ..why.facts().clone() });
    }
    Ok(Some(why))
}

/// The candidates as if the slots of these jobs were free, too: behind those that are.
fn without<'a>(
    candidates: &[Candidate],
    jobs: impl IntoIterator<Item = &'a Occupied>,
    promised: &HashSet<(String, u32)>,
) -> Vec<Candidate> {
    let by_agent: HashMap<&str, usize> =
        candidates.iter().enumerate().map(|(n, c)| (c.agent.row.id.as_str(), n)).collect();
    let mut candidates = candidates.to_vec();
    for of in jobs.into_iter().flat_map(|job| &job.slots).filter(|of| !promised.contains(*of)) {
        let (agent, slot) = of;
        if let Some(candidate) = by_agent.get(agent.as_str()).and_then(|n| candidates.get_mut(*n))
            && candidate.all.contains(slot)
            && !candidate.free.contains(slot)
        {
            candidate.free.push(*slot);
        }
    }
    candidates
}

/// Where a job fits when some of these end, all of which have a lower priority: the lowest first, of equal ones the newest.
fn plan(
    candidates: &[Candidate],
    ranks: usize,
    reserved: &HashSet<String>,
    lower: &[Occupied],
    promised: &HashSet<(String, u32)>,
) -> Option<Plan> {
    if lower.is_empty() {
        return None;
    }
    let ending = || lower.iter().filter(|o| o.by.ends);
    let ended = without(candidates, ending(), promised);
    if let Some(chosen) = choose(&ended, ranks, reserved) {
        // Only where it counts on slots that are not free yet, which is so: it did not fit before.
        return Some(Plan { chosen, victims: Vec::new() });
    }
    let of_one = (0..ended.len()).filter(|c| !reserved.contains(&ended[*c].agent.row.id));
    let of_one = of_one.filter_map(|c| on_one(&ended[c], ranks, lower, promised).map(|found| (c, found)));
    // Fewest, then lowest, then the agent on which most is free.
    let best = of_one.min_by_key(|(_, (_, victims))| {
        (victims.len(), victims.iter().map(|victim| lower[*victim].by.priority).max())
    });
    if let Some((c, (slots, victims))) = best {
        return Some(Plan { chosen: vec![(c, slots)], victims });
    }
    on_several(candidates, ranks, reserved, lower, promised)
}

/// The slots on one agent and the fewest jobs that have to end there.
fn on_one(
    candidate: &Candidate,
    ranks: usize,
    lower: &[Occupied],
    promised: &HashSet<(String, u32)>,
) -> Option<(Vec<u32>, Vec<usize>)> {
    let agent = &candidate.agent.row.id;
    let is_here = |(of, slot): &(String, u32)| {
        of == agent && candidate.all.contains(slot) && !promised.contains(&(of.clone(), *slot))
    };
    let slots_of = |victim: &usize| -> Vec<u32> {
        lower[*victim].slots.iter().filter(|slot| is_here(slot)).map(|(_, slot)| *slot).collect()
    };
    let mut here: Vec<(usize, Vec<u32>)> = (0..lower.len())
        .filter(|victim| !lower[*victim].by.ends)
        .map(|victim| (victim, slots_of(&victim)))
        .filter(|(_, slots)| !slots.is_empty())
        .collect();
    let needed = ranks.saturating_sub(candidate.free.len());
    if here.iter().map(|(_, slots)| slots.len()).sum::<usize>() < needed {
        return None;
    }
    // As many as are needed when the largest are taken first.
    let mut largest: Vec<usize> = here.iter().map(|(_, slots)| slots.len()).collect();
    largest.sort_unstable_by(|a, b| b.cmp(a));
    let (mut sum, mut fewest) = (0, 0);
    while sum < needed {
        sum += largest[fewest];
        fewest += 1;
    }
    // Of so many, the lowest: each is taken if the largest of the rest can still make up what is then missing.
    let (mut missing, mut victims, mut slots) = (needed, Vec::new(), candidate.free.clone());
    while victims.len() < fewest {
        let left = fewest - victims.len() - 1;
        let at = (0..here.len()).find(|n| {
            let mut rest: Vec<usize> =
                here.iter().enumerate().filter(|(m, _)| m != n).map(|(_, (_, s))| s.len()).collect();
            rest.sort_unstable_by(|a, b| b.cmp(a));
            here[*n].1.len() + rest.iter().take(left).sum::<usize>() >= missing
        })?;
        let (victim, its) = here.remove(at);
        missing = missing.saturating_sub(its.len());
        slots.extend(its);
        victims.push(victim);
    }
    slots.truncate(ranks);
    Some((slots, victims))
}

/// As [`plan`], over several agents: as many of the lowest as it takes, less those that turn out not to be needed, the highest first.
fn on_several(
    candidates: &[Candidate],
    ranks: usize,
    reserved: &HashSet<String>,
    lower: &[Occupied],
    promised: &HashSet<(String, u32)>,
) -> Option<Plan> {
    let with = |victims: &[usize]| {
        let ending = lower.iter().filter(|o| o.by.ends);
        let chosen = victims.iter().map(|victim| &lower[*victim]);
        choose(&without(candidates, ending.chain(chosen), promised), ranks, reserved)
    };
    let all: Vec<usize> = (0..lower.len()).filter(|victim| !lower[*victim].by.ends).collect();
    with(&all)?;
    // The shortest beginning of the list that is enough.
    let enough = (1..=all.len()).collect::<Vec<_>>().partition_point(|n| with(&all[..*n]).is_none()) + 1;
    let chosen = with(&all[..enough])?;
    let is_used = |victim: &usize| {
        let mut slots = lower[*victim].slots.iter();
        slots.any(|(agent, slot)| {
            chosen.iter().any(|(c, taken)| candidates[*c].agent.row.id == *agent && taken.contains(slot))
        })
    };
    let mut victims: Vec<usize> = all[..enough].iter().copied().filter(is_used).collect();
    for victim in victims.clone().iter().rev().take(MOST_TRIED) {
        let fewer: Vec<usize> = victims.iter().copied().filter(|other| other != victim).collect();
        if with(&fewer).is_some() {
            victims = fewer;
        }
    }
    Some(Plan { chosen: with(&victims)?, victims })
}

#[cfg(test)]
mod tests;
