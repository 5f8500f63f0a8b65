//! Placement: finds agents with enough free slots for a job, claims the job and starts it there.

use super::{
    ends::{end_attempt, wanted},
    gang::{address, choose, reserve},
    needs::{fail, needs},
    preempt::{self, Room},
    slots::{Round, device_for},
    waits::wait_reason,
};
use crate::{
    agents::Online,
    app::App,
    artifacts, lifecycle,
    store::{Claim, JobRow, Place, Result, StoreError},
};
use lockstep_protocol::{
    agent::{AttemptEvent, AttemptRef, MARK, RankNetwork, StartAttempt, StartFiles, ToAgent},
    job::{Job, JobState},
    reason::{Facts, Reason, ReasonCode},
};

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

/// Starts a job on the agent with the fewest free slots that has enough for all its ranks, or on the fewest agents that have enough
/// together. While that is not possible, agents are reserved in this round that will have enough, so that smaller jobs behind do not
/// starve a large one. No job ever has a part of its slots, so two large ones cannot keep each other waiting.
pub(super) async fn place(app: &App, row: &JobRow, round: &mut Round) -> Result<Placed> {
    let job = &row.job;
    if let Some(flaw) = &job.unreadable {
        let facts = Facts { detail: Some(flaw.clone()), ..Facts::default() };
        store_wait_reason(app, row, Reason::new(ReasonCode::UnreadableSpec, facts)).await?;
        return Ok(Placed::Waits);
    }
    let ranks = job.ranks as usize;
    let device = device_for(&job.spec);
    let candidates = round.candidates(&job.id, device);
    if let Some(chosen) = choose(&candidates, ranks, &round.reserved) {
        let chosen: Vec<_> =
            chosen.into_iter().map(|(c, slots)| (candidates[c].agent.as_ref(), slots)).collect();
        // Rank 0 reads the checkpoint, and sends the others what is in it.
        let reader = chosen.first().map_or("", |(agent, _)| agent.row.id.as_str());
        if let Some(why) = artifacts::coming(app, job, reader).await? {
            store_wait_reason(app, row, why).await?;
            return Ok(Placed::Waits);
        }
        for (agent, slots) in &chosen {
            round.take(&agent.row.id, slots);
        }
        start(app, row, &chosen).await?;
        return Ok(Placed::Starts);
    }
    match preempt::make_room(app, job, &candidates, round).await? {
        Room::Waits(why) => {
            store_wait_reason(app, row, why).await?;
            return Ok(Placed::Kept);
        }
        Room::Fails(why) => {
            fail(app, &job.id, why).await?;
            return Ok(Placed::Starts);
        }
        Room::None => {}
    }
    let kept = reserve(&candidates, ranks);
    let why = wait_reason(&candidates, job.ranks, device, kept.as_deref(), round.is_empty());
    round.reserved.extend(kept.iter().flatten().map(|c| candidates[*c].agent.row.id.clone()));
    store_wait_reason(app, row, why).await?;
    Ok(if kept.is_some() { Placed::Kept } else { Placed::Waits })
}

/// Sets the reason why a queued job waits.
pub(super) async fn store_wait_reason(app: &App, row: &JobRow, why: Reason) -> Result<()> {
    app.wait_reasons.set(&row.job.id, why.clone());
    // Looked at before anything is written: the queue is gone through twice a second. How many of the slots are free just now is no
    // event of a job: `wait_reasons` has it.
    let steady = |reason: &Reason| {
        let facts = Facts { agent: None, slots_free: None, ..reason.facts().clone() };
        (reason.code().clone(), facts)
    };
    let known = row.job.cause.as_ref().is_some_and(|known| steady(known) == steady(&why));
    if known || lifecycle::waits(&mut row.clone(), &why).is_ok_and(|events| events.is_empty()) {
        return Ok(());
    }
    match app.store.change_job(&row.job.id, Box::new(move |row| lifecycle::waits(row, &why))).await {
        Ok(changed) => app.hub.publish(&changed),
        Err(StoreError::NotFound(_)) => {}
        Err(error) => return Err(error),
    }
    Ok(())
}

/// Starts a job on these agents, in these of their slots. Ranks are numbered machine by machine.
async fn start(app: &App, row: &JobRow, chosen: &[(&Online, Vec<u32>)]) -> Result<()> {
    let job = &row.job;
    let needs = match needs(app, job).await? {
        Ok(needs) => needs,
        Err(why) => return fail(app, &job.id, why).await,
    };
    // Rank 0 reads the checkpoint, and sends the others what is in it.
    let reader = chosen.first().map_or("", |(agent, _)| agent.row.id.as_str());
    forget_missing(app, job, reader).await?;
    let mut files = start_files(app, job).await;
    files.pretrained = needs.pretrained;
    let mut ranks = 0..job.ranks;
    let place = |(agent, slots): &(&Online, Vec<u32>)| Place {
        agent_id: agent.row.id.clone(),
        agent: agent.row.name.clone(),
        ranks: slots.iter().filter_map(|slot| Some((ranks.next()?, *slot))).collect(),
    };
    let places: Vec<_> = chosen.iter().map(place).collect();
    let claim =
        Claim { job: job.id.clone(), after_attempt: job.attempt, places: places.clone(), at: crate::now() };
    let Some(claimed) = app.store.claim(claim).await? else { return Ok(()) };
    let attempt = claimed.attempt;
    app.leases.hold(attempt.clone(), places.clone());
    app.coming.forget(&job.id);
    app.announce(&claimed.changed);
    let mut start = StartAttempt {
        attempt: attempt.clone(),
        spec: needs.spec,
        dataset_path: needs.dataset_path,
        world_size: job.ranks,
        ranks: Vec::new(),
        // Ranks of one machine meet on its own loopback. The agent of rank 0 finds a free port.
        master_addr: master_address(chosen).unwrap_or("127.0.0.1").into(),
        master_port: 0,
        secret: format!("{:032x}{:032x}", uuid::Uuid::new_v4().as_u128(), uuid::Uuid::new_v4().as_u128()),
        // An agent that does not find the mark there uses a folder of its own.
        job_dir: Some(app.job_dir(&job.id).to_string_lossy().into_owned()),
        resume: claimed.resume,
        network: None,
        files,
    };
    let meets_at_loopback = master_address(chosen).is_none();
    for ((agent, _), place) in chosen.iter().zip(&places) {
        let machine = &agent.row.machine;
        start.ranks.clone_from(&place.ranks);
        start.network = address(machine)
            .filter(|_| !meets_at_loopback)
            .map(|address| RankNetwork { address: address.into(), interface: machine.interface.clone() });
        if app.agents.send(&place.agent_id, ToAgent::Start(Box::new(start.clone()))) {
            continue;
        }
        let facts = Facts { agent: Some(agent.row.name.clone()), ..Facts::default() };
        let why = Reason::new(ReasonCode::AgentLeft, facts);
        // Nowhere are ranks started before all agents are ready.
        end_attempt(app, &attempt, move |row| lifecycle::requeue(row, &why, crate::now())).await?;
        stop(app, &attempt, &places, "an agent went away before it could start", false);
        return Ok(());
    }
    // Somebody may have cancelled or paused it between the claim and the start.
    let row = app.store.job(&attempt.job).await?;
    let live = row.as_ref().is_some_and(|r| r.live().as_ref() == Some(&attempt));
    if !live {
        app.leases.release(&attempt.job, attempt.attempt);
    }
    let wish = match &row {
        Some(row) if live => wanted(row),
        // It may also have run to its end by now, as its agent knows best.
        Some(row) if row.job.state != JobState::Cancelled => None,
        _ => Some((Reason::from(ReasonCode::CancelledByUser).words().to_owned(), false)),
    };
    if let Some((reason, patient)) = wish {
        stop(app, &attempt, &places, &reason, patient);
    }
    Ok(())
}

fn stop(app: &App, attempt: &AttemptRef, places: &[Place], reason: &str, patient: bool) {
    for place in places {
        let (attempt, reason) = (attempt.clone(), reason.to_owned());
        app.agents.send(&place.agent_id, ToAgent::Stop { attempt, reason, patient });
    }
}

/// Where rank 0 of a job on these agents listens; none where all of them are on one machine.
fn master_address<'a>(chosen: &[(&'a Online, Vec<u32>)]) -> Option<&'a str> {
    let (first, _) = chosen.first()?;
    let network = |agent: &Online| agent.row.machine.network_id.clone();
    let is_here =
        |(agent, _): &(&Online, Vec<u32>)| network(agent).is_some() && network(agent) == network(first);
    if chosen.len() == 1 || chosen.iter().all(is_here) { None } else { address(&first.row.machine) }
}

/// What an agent needs to know that has not the server's disk. The mark tells it whether it has.
async fn start_files(app: &App, job: &Job) -> StartFiles {
    let folder = app.job_dir(&job.id);
    let word = uuid::Uuid::new_v4().simple().to_string();
    let marked = tokio::fs::write(folder.join(MARK), &word).await;
    if let Err(error) = &marked {
        tracing::warn!(%error, job = %job.id, "the job's folder cannot be marked");
    }
    let mark = marked.is_ok().then_some(word);
    let dataset = tokio::task::spawn_blocking(move || artifacts::dataset_note(&folder)).await;
    StartFiles { mark, dataset: dataset.unwrap_or_default(), pretrained: None }
}

/// Removes the rows of checkpoints that the next attempt cannot have, before one of them is chosen to continue from: those whose folder is
/// gone (a user removed it, or a rank died before it reported removing it), and those that were never uploaded from another machine
/// than `agent`.
async fn forget_missing(app: &App, job: &Job, agent: &str) -> Result<()> {
    // No folder at all: this disk is not where they are.
    let is_here = matches!(tokio::fs::try_exists(app.job_dir(&job.id).join("checkpoints")).await, Ok(true));
    let mut missing = Vec::new();
    for row in app.store.checkpoints(&job.id).await? {
        let holders = artifacts::on_its_way(app, &row);
        let is_missing = match holders.is_empty() {
            false => holders.iter().all(|holder| holder.agent_id != agent),
            true => is_here && matches!(tokio::fs::try_exists(app.checkpoint_dir(&row)).await, Ok(false)),
        };
        if is_missing {
            missing.push((row.info.epoch, row.info.step));
        }
    }
    if missing.is_empty() {
        return Ok(());
    }
    let change = move |row: &mut JobRow| {
        let removed = |(epoch, step): &(u32, u64)| {
            let event = AttemptEvent::CheckpointRemoved { epoch: *epoch, step: *step };
            lifecycle::report(row, event, None, crate::now())
        };
        Ok(missing.iter().map(removed).collect::<std::result::Result<Vec<_>, _>>()?.concat())
    };
    let changed = app.store.change_job(&job.id, Box::new(change)).await?;
    app.announce(&changed);
    Ok(())
}
