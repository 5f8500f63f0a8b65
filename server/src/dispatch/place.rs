//! Placement: finds agents with enough free slots for a job.

use super::{
    candidates::Candidates,
    fewer::Fewer,
    gang::{choose, reserve},
    needs::fail,
    preempt::{self, Room},
    slots::{DoesNotFit, Round, Start, device_for},
    waits::wait_reason,
};
use crate::{
    app::App,
    artifacts,
    store::{JobRow, Result},
};
use lockstep_protocol::reason::{Facts, Reason, ReasonCode};
use std::sync::Arc;

/// What a round had for a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Placed {
    /// It waits no longer.
    Starts,
    /// It waits for slots that are kept for it.
    Kept,
    /// It waits, and takes nothing from others.
    Waits,
}

/// Finds slots for a job: of one agent that has enough for all its ranks, or of the fewest agents that have enough together. While that is not possible, agents are reserved in this round that will have enough, so that smaller jobs behind do
/// not starve a large one. No job ever has a part of its slots, so two large ones cannot keep each other waiting.
pub(super) async fn place(app: &App, row: &Arc<JobRow>, round: &mut Round) -> Result<Placed> {
    let job = &row.job;
    if let Some(flaw) = &job.unreadable {
        let facts = Facts { detail: Some(flaw.clone()), ..Facts::default() };
        round.waits(row, Reason::new(ReasonCode::UnreadableSpec, facts));
        return Ok(Placed::Waits);
    }
    let fewer = Fewer::of(app, row);
    // One that does with less is of no kind.
    let kind = round.kind(job).filter(|_| fewer.is_none());
    if let Some(known) = kind.as_ref().and_then(|kind| round.does_not_fit(kind)) {
        round.waits(row, known.why);
        return Ok(if known.is_kept { Placed::Kept } else { Placed::Waits });
    }
    let ranks = job.ranks as usize;
    let device = device_for(&job.spec);
    let candidates = round.candidates(&job.id, device);
    if let Some(chosen) = choose(&candidates, ranks, round.reserved()) {
        return start(app, row, round, candidates, (chosen, None)).await;
    }
    match preempt::make_room(app, row, &candidates, round).await? {
        Room::Waits(why) => {
            round.waits(row, why);
            return Ok(Placed::Kept);
        }
        Room::Fails(why) => {
            fail(app, &job.id, why).await?;
            return Ok(Placed::Starts);
        }
        Room::NotNow => return Ok(Placed::Waits),
        Room::None => {}
    }
    if let Some((chosen, why)) =
        fewer.as_ref().and_then(|fewer| fewer.choose(job, &candidates, round.reserved()))
    {
        return start(app, row, round, candidates, (chosen, Some(why))).await;
    }
    let mut kept = reserve(&candidates, ranks);
    let mut why = wait_reason(&candidates, &job.id, job.ranks, device, kept.as_deref(), round);
    if let Some(fewer) = &fewer {
        kept = kept.or_else(|| fewer.reserve(&candidates));
        why = fewer.with_fewest_ranks(job, why);
    }
    for c in kept.iter().flatten() {
        round.reserve(job, &candidates[*c]);
    }
    if let Some(kind) = kind {
        // To the next of its kind, these agents are kept for this job.
        let why = wait_reason(&candidates, &job.id, job.ranks, device, kept.as_deref(), round);
        round.note(kind, DoesNotFit { why: why.into(), is_kept: kept.is_some() });
    }
    round.waits(row, why);
    Ok(if kept.is_some() { Placed::Kept } else { Placed::Waits })
}

/// Gives a job its slots, unless it waits for a checkpoint. `fewer`: what it says where they are fewer than its ranks.
async fn start(
    app: &App,
    row: &Arc<JobRow>,
    round: &mut Round,
    candidates: Arc<Candidates>,
    (chosen, fewer): (Vec<(usize, Vec<u32>)>, Option<Reason>),
) -> Result<Placed> {
    // Rank 0 reads the checkpoint, and sends the others what is in it.
    let reader = chosen.first().map_or("", |(c, _)| candidates[*c].agent.row.id.as_str());
    if let Some(wait) = artifacts::wait_for_newer(app, row, reader, &mut round.check_wait).await? {
        // Jobs of lower priority would take its slots in the moment that a check lasts. An upload or a fetch may take hours.
        if wait.is_checked {
            for (c, slots) in &chosen {
                round.promise(&row.job.id, &candidates[*c], slots);
            }
        }
        round.waits(row, wait.why);
        return Ok(if wait.is_checked { Placed::Kept } else { Placed::Waits });
    }
    let chosen: Vec<_> =
        chosen.into_iter().map(|(c, slots)| (Arc::clone(&candidates[c].agent), slots)).collect();
    // Nobody else has it when slots are taken, so that it is not copied.
    drop(candidates);
    for (agent, slots) in &chosen {
        round.take(&agent.row.id, slots);
    }
    round.starts.push(Start { row: Arc::clone(row), chosen, fewer });
    Ok(Placed::Starts)
}
