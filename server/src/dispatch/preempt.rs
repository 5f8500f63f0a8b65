//! Preemption: a job that does not fit takes the slots of running jobs of lower priority that allow it (`preemptible`). Only if it
//! fits then, and of as few jobs as possible, those of the lowest priority first. Jobs of its own priority are left alone: one that
//! was preempted never preempts back.

use super::{
    candidates::{Candidate, Candidates},
    ends::order_stop,
    gang::choose,
    needs::{datasets, needs},
    slots::{Occupied, Round, device_for},
    start::start_all,
    waits::wait_reason,
};
use crate::{
    app::App,
    artifacts, lifecycle,
    store::{JobRow, Occupant, Result, StoreError},
};
use lockstep_protocol::{
    job::JobId,
    reason::{Facts, Reason, ReasonCode},
};
use std::{
    cmp::Reverse,
    collections::{HashMap, HashSet},
};

/// Of a job over several agents: so many of the jobs that it takes the slots of are looked at twice, whether it needs them.
const MOST_TRIED: usize = 64;

/// Slots for a job, by the place of their agent among the candidates, and the jobs that have to end for it, by their place in the
/// list of those that run.
#[derive(Debug, PartialEq)]
struct Plan {
    chosen: Vec<(usize, Vec<u32>)>,
    victims: Vec<usize>,
}

/// What becomes of a job that does not fit.
pub(super) enum Room {
    /// Nothing: it does not fit without others, either.
    None,
    /// What it would need is not known before the next round.
    NotNow,
    /// Its slots are kept for it in this round. It waits for them.
    Waits(Reason),
    /// Nobody is stopped for it: it cannot start.
    Fails(Reason),
}

/// Orders running jobs to end in favour of one that does not fit, and keeps their slots for it in this round. Slots of jobs that end
/// anyway are counted on first, whatever the priority of these.
pub(super) async fn make_room(
    app: &App,
    row: &JobRow,
    candidates: &Candidates,
    round: &mut Round,
) -> Result<Room> {
    let job = &row.job;
    if round.occupied.is_none() {
        round.occupied = Some(occupied(app).await?);
    }
    let occupied = round.occupied.as_deref().unwrap_or_default();
    let needs_slots = (job.ranks as usize, job.spec.priority);
    let Some(plan) = plan(candidates, needs_slots, round.reserved(), occupied, &round.promised) else {
        return Ok(Room::None);
    };
    // Nobody is preempted for slots that a job before was given and did not take.
    if !plan.victims.is_empty() && !start_all(app, std::mem::take(&mut round.starts)).await? {
        return Ok(Room::NotNow);
    }
    let occupied = round.occupied.as_deref().unwrap_or_default();
    let reader = plan.chosen.first().map_or("", |(c, _)| candidates[*c].agent.row.id.as_str());
    if let Some(wait) = artifacts::wait_for_newer(app, row, reader, &mut round.check_wait).await? {
        // Nobody is stopped yet: the slots would be given to others meanwhile. Those that are free wait for a check.
        for (c, slots) in plan.chosen.iter().filter(|_| wait.is_checked) {
            let free = &candidates[*c].free;
            let slots: Vec<u32> = slots.iter().copied().filter(|slot| free.contains(slot)).collect();
            if !slots.is_empty() {
                round.promise(&job.id, &candidates[*c], &slots);
            }
        }
        return Ok(Room::Waits(wait.why));
    }
    if !plan.victims.is_empty()
        && let Err(why) = needs(app, job, &datasets(app, [job]).await?).await?
    {
        return Ok(Room::Fails(why));
    }
    let mut victims: Vec<JobId> =
        plan.victims.iter().map(|victim| occupied[*victim].by.job.clone()).collect();
    let counted_on = counted_on(&plan, candidates, occupied);
    let mut preempts = counted_on.iter().any(|of| of.by.preempted);
    let unnotified = counted_on.iter().filter(|of| of.by.ends && !app.leases.is_stop_requested(&of.by.job));
    let unnotified: Vec<JobId> = unnotified.map(|of| of.by.job.clone()).collect();
    let agents: Vec<usize> = plan.chosen.iter().map(|(c, _)| *c).collect();
    let device = device_for(&job.spec);
    let mut why = wait_reason(candidates, &job.id, job.ranks, device, Some(&agents), round);
    for (c, slots) in &plan.chosen {
        round.promise(&job.id, &candidates[*c], slots);
    }
    if !victims.is_empty() {
        let live = app.store.occupants().await?.into_iter().map(|by| by.job).collect();
        if !round.is_current(candidates, &app.leases, &live) {
            // The plan does not know that slots have become free. Whoever frees them wakes dispatch for the next round.
            victims.clear();
        }
    }
    preempts |= !victims.is_empty();
    for of in round.occupied.iter_mut().flatten() {
        of.ends |= victims.contains(&of.by.job);
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
    // Its state was stored, and then something failed before its agents heard of it.
    for job in &unnotified {
        order_stop(app, job).await?;
    }
    if preempts && *why.code() == ReasonCode::WaitingForSlots {
        let detail = "jobs of lower priority are being preempted".to_owned();
        why = Reason::new(ReasonCode::WaitingForSlots, Facts { detail: Some(detail), ..why.facts().clone() });
    }
    Ok(Room::Waits(why))
}

/// Jobs whose slots somebody may count on, with these, in the order of their priorities.
async fn occupied(app: &App) -> Result<Vec<Occupied>> {
    let (mut by, ending) = (app.store.yielding().await?, app.leases.ending());
    let known: HashSet<JobId> = by.iter().map(|by| by.job.clone()).collect();
    // Those that end because their ranks have on another agent: nobody has to be stopped, so their priority does not matter.
    let also = ending.iter().filter(|job| !known.contains(*job)).map(|job| Occupant {
        job: job.clone(),
        priority: i32::MAX,
        preemptible: false,
        ends: false,
        preempted: false,
    });
    by.extend(also);
    let ending: HashSet<JobId> = ending.into_iter().collect();
    let occupied = |by: Occupant| {
        let places = app.leases.places_of(&by.job);
        let slots = places
            .into_iter()
            .flat_map(|place| place.ranks.into_iter().map(move |(_, slot)| (place.agent_id.clone(), slot)));
        let ends = by.ends || ending.contains(&by.job);
        Occupied { slots: slots.collect(), by, ends }
    };
    Ok(by.into_iter().map(occupied).collect())
}

/// The jobs that end anyway whose slots a plan counts on.
fn counted_on<'a>(plan: &Plan, candidates: &Candidates, occupied: &'a [Occupied]) -> Vec<&'a Occupied> {
    let chosen = plan.chosen.iter();
    let chosen = chosen.map(|(c, slots)| (candidates[*c].agent.row.id.as_str(), slots));
    let chosen: HashMap<&str, &Vec<u32>> = chosen.collect();
    let is_chosen =
        |(agent, slot): &(String, u32)| chosen.get(agent.as_str()).is_some_and(|slots| slots.contains(slot));
    occupied.iter().filter(|of| of.ends && of.slots.iter().any(is_chosen)).collect()
}

/// The candidates as if the slots of these jobs were free, too: behind those that are.
fn without<'a>(
    candidates: &Candidates,
    jobs: impl IntoIterator<Item = &'a Occupied>,
    promised: &HashSet<(String, u32)>,
) -> Candidates {
    let by_agent: HashMap<&str, usize> =
        candidates.iter().enumerate().map(|(n, c)| (c.agent.row.id.as_str(), n)).collect();
    let mut candidates = candidates.clone();
    for of in jobs.into_iter().flat_map(|job| &job.slots).filter(|of| !promised.contains(*of)) {
        let (agent, slot) = of;
        if let Some(candidate) = by_agent.get(agent.as_str()) {
            candidates.free(*candidate, *slot);
        }
    }
    candidates
}

/// Where a job of so many ranks, of this priority, fits when some of these end: those that do so anyway, and of the preemptible ones of
/// lower priority the lowest first, of equal ones the newest.
fn plan(
    candidates: &Candidates,
    (ranks, priority): (usize, i32),
    reserved: &HashSet<String>,
    occupied: &[Occupied],
    promised: &HashSet<(String, u32)>,
) -> Option<Plan> {
    let may_end = |of: &Occupied| of.by.preemptible && of.by.priority < priority && !of.ends;
    let lower: Vec<usize> = (0..occupied.len()).filter(|n| may_end(&occupied[*n])).collect();
    if lower.is_empty() && !occupied.iter().any(|of| of.ends) {
        return None;
    }
    let ended = without(candidates, occupied.iter().filter(|of| of.ends), promised);
    if let Some(chosen) = choose(&ended, ranks, reserved) {
        // Only where it counts on slots that are not free yet, which is so: it did not fit before.
        return Some(Plan { chosen, victims: Vec::new() });
    }
    let of_one = (0..ended.len()).filter(|c| !reserved.contains(&ended[*c].agent.row.id));
    let of_one =
        of_one.filter_map(|c| on_one(&ended[c], ranks, occupied, &lower, promised).map(|found| (c, found)));
    // Fewest, then lowest, then the agent on which most is free.
    let best = of_one.min_by_key(|(c, (_, victims))| {
        let highest = victims.iter().map(|victim| occupied[*victim].by.priority).max();
        (victims.len(), highest, Reverse(ended[*c].free.len()))
    });
    if let Some((c, (slots, victims))) = best {
        return Some(Plan { chosen: vec![(c, slots)], victims });
    }
    on_several(&ended, ranks, reserved, occupied, lower, promised)
}

/// The slots on one agent and the fewest of the `lower` jobs that have to end there.
fn on_one(
    candidate: &Candidate,
    ranks: usize,
    occupied: &[Occupied],
    lower: &[usize],
    promised: &HashSet<(String, u32)>,
) -> Option<(Vec<u32>, Vec<usize>)> {
    let agent = &candidate.agent.row.id;
    let is_here = |(of, slot): &(String, u32)| {
        of == agent && candidate.all.contains(slot) && !promised.contains(&(of.clone(), *slot))
    };
    let slots_of = |victim: &usize| -> Vec<u32> {
        occupied[*victim].slots.iter().filter(|slot| is_here(slot)).map(|(_, slot)| *slot).collect()
    };
    let mut here: Vec<(usize, Vec<u32>)> = lower
        .iter()
        .map(|victim| (*victim, slots_of(victim)))
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
    ended: &Candidates,
    ranks: usize,
    reserved: &HashSet<String>,
    occupied: &[Occupied],
    all: Vec<usize>,
    promised: &HashSet<(String, u32)>,
) -> Option<Plan> {
    let with = |victims: &[usize]| {
        choose(&without(ended, victims.iter().map(|victim| &occupied[*victim]), promised), ranks, reserved)
    };
    with(&all)?;
    // The shortest beginning of the list that is enough.
    let enough = (1..=all.len()).collect::<Vec<_>>().partition_point(|n| with(&all[..*n]).is_none()) + 1;
    let chosen = with(&all[..enough])?;
    let is_used = |victim: &usize| {
        let mut slots = occupied[*victim].slots.iter();
        slots.any(|(agent, slot)| {
            chosen.iter().any(|(c, taken)| ended[*c].agent.row.id == *agent && taken.contains(slot))
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
