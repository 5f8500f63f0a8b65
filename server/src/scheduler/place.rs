//! Placement: finds agents with enough free slots for a job.

use super::{
    Start,
    candidates::{Candidates, ChosenSlots},
    fewer::FewerRanks,
    gang::{choose_agents, choose_reserved_agents},
    preempt::preempt,
    reasons::wait_reason,
    round::{Round, device_for},
};
use crate::{checkpoints::Wait, store::JobRow};
use lockstep_protocol::reason::{Reason, ReasonKind};
use std::sync::Arc;

/// Finds slots for a job: on one agent with enough for all ranks, or on the fewest agents with enough together. If no agents have enough
/// free slots, agents are reserved, so that later, smaller jobs do not starve a large one. No job ever has only a part of its
/// slots, so two large jobs cannot block each other. Returns the reason why the job waits, if it does not start.
pub(super) fn place_job(round: &mut Round<'_>, row: &Arc<JobRow>) -> Option<Wait> {
    let job = &row.job;
    if let Some(flaw) = &job.unreadable {
        let why = ReasonKind::UnreadableSpec { detail: flaw.as_str().into() };
        return Some(Wait { why: Reason::from(why).into(), keeps_slots: false });
    }
    let fewer = FewerRanks::of_job(round.snapshot, row);
    // A job that may take fewer ranks is handled individually.
    let kind = round.kind_of(job).filter(|_| fewer.is_none());
    if let Some(known) = kind.as_ref().and_then(|kind| round.waits.get(kind)) {
        return Some(known.clone());
    }
    let ranks = job.ranks as usize;
    let candidates = round.candidates(&job.id, device_for(&job.spec));
    if let Some(chosen) = choose_agents(&candidates, ranks, &round.reserved_agents) {
        return start(round, row, candidates, chosen, None);
    }
    if let Some(wait) = preempt(round, row, &candidates) {
        return Some(wait);
    }
    if let Some((chosen, why)) =
        fewer.as_ref().and_then(|fewer| fewer.choose(job, &candidates, &round.reserved_agents))
    {
        return start(round, row, candidates, chosen, Some(why));
    }
    let reserved = choose_reserved_agents(&candidates, ranks);
    let explanation = fewer.as_ref().and_then(|fewer| fewer.in_words(job));
    let why = wait_reason(&candidates, job, reserved.as_deref(), explanation, round);
    let reserved = reserved.or_else(|| fewer.as_ref()?.reserve(&candidates));
    for c in reserved.iter().flatten() {
        round.reserve_agent(job, &candidates[*c]);
    }
    if let Some(kind) = kind {
        // For later jobs of the same kind, the agents are reserved for this job.
        let why = wait_reason(&candidates, job, reserved.as_deref(), None, round);
        round.waits.insert(kind, Wait { why: why.into(), keeps_slots: reserved.is_some() });
    }
    Some(Wait { why: why.into(), keeps_slots: reserved.is_some() })
}

/// Gives a job its slots, unless it waits for a checkpoint. `fewer_ranks_reason`: the reason, if the job starts on fewer ranks.
fn start(
    round: &mut Round<'_>,
    row: &Arc<JobRow>,
    candidates: Arc<Candidates>,
    chosen: ChosenSlots,
    fewer_ranks_reason: Option<Reason>,
) -> Option<Wait> {
    if let Some(wait) = round.checkpoint_wait(row, &candidates, &chosen) {
        // During a check, which is short, jobs of lower priority must not take the slots. An upload or a fetch may take hours, so the slots
        // are not reserved.
        if wait.keeps_slots {
            for (c, slots) in &chosen {
                round.reserve_slots(&row.job.id, &candidates[*c], slots);
            }
        }
        return Some(wait);
    }
    let chosen: Vec<_> =
        chosen.into_iter().map(|(c, slots)| (Arc::clone(&candidates[c].agent), slots)).collect();
    // The round has the only other reference, so that the candidates are not copied when slots are taken.
    drop(candidates);
    for (agent, slots) in &chosen {
        round.take_slots(&agent.row.id, slots);
    }
    round.plan.starts.push(Start { row: Arc::clone(row), chosen, fewer_ranks_reason });
    None
}
