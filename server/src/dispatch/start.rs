//! Starts: claims jobs that have been given slots, and tells their agents.

use super::{
    candidates::address,
    ends::{end_attempt, wanted},
    needs::{Needs, fail, needs},
    skip_permanent_error,
    slots::{Start, device_for},
};
use crate::{
    agents::Online,
    app::App,
    artifacts, lifecycle,
    store::{Claim, Claimed, JobRow, Place, Result},
};
use futures_util::future::join_all;
use lockstep_protocol::{
    agent::{AttemptEvent, AttemptRef, MARK, RankNetwork, StartAttempt, StartFiles, ToAgent},
    job::{Job, JobState},
    reason::{Facts, Reason, ReasonCode},
};
use std::sync::Arc;

/// Jobs that are claimed in one transaction, at most: the first of them waits for the last.
const TOGETHER: usize = 16;

/// A job that may be claimed: what it needs is there.
struct Prepared {
    start: Start,
    needs: Needs,
    files: StartFiles,
    claim: Claim,
}

/// Starts jobs, those first that were given slots first, and says whether all of them started. One whose start fails does not keep the
/// others waiting.
///
/// # Errors
/// The first that may pass, once all others are started.
pub(super) async fn start_all(app: &App, mut starts: Vec<Start>) -> Result<bool> {
    let wanted = starts.len();
    let mut started = 0;
    let mut fell_through = false;
    let mut passing = Ok(());
    while !starts.is_empty() {
        let later = starts.split_off(TOGETHER.min(starts.len()));
        let now = std::mem::replace(&mut starts, later);
        let jobs: Vec<_> = now.iter().map(|start| start.row.job.id.clone()).collect();
        let mut prepared = Vec::with_capacity(now.len());
        for (job, done) in jobs.iter().zip(join_all(now.into_iter().map(|start| prepare(app, start))).await) {
            match done {
                Ok(found) => {
                    fell_through |= found.is_none();
                    prepared.extend(found);
                }
                Err(error) => passing = passing.and(skip_permanent_error(job, Err(error))),
            }
        }
        if prepared.is_empty() {
            continue;
        }
        let claimed = claim(app, &prepared).await?;
        // All of them hold their slots before anybody may look which are free.
        for (Prepared { start, claim, .. }, claimed) in prepared.iter().zip(&claimed) {
            match claimed {
                Some(claimed) => {
                    started += 1;
                    app.leases.hold(claimed.attempt.clone(), claim.places.clone());
                    app.waiting.remove(&claim.job);
                }
                // It does not wait any more: to be read again.
                None => app.waiting.note(&start.row.job),
            }
        }
        let told = prepared.into_iter().zip(claimed).filter_map(|(prepared, claimed)| {
            claimed.map(|claimed| async move {
                let job = claimed.attempt.job.clone();
                (job, tell(app, prepared, claimed).await)
            })
        });
        for (job, told) in join_all(told).await {
            passing = passing.and(skip_permanent_error(&job, told));
        }
    }
    if fell_through {
        // Its slots are free.
        app.leases.poke();
    }
    passing.map(|()| started == wanted)
}

/// Whether what was found out about a job as it was known holds for what is stored of it.
fn may_start(stored: &Job, known: &Job) -> bool {
    matches!(stored.state, JobState::Queued | JobState::Restarting)
        && stored.unreadable.is_none()
        && stored.ranks == known.ranks
        && device_for(&stored.spec) == device_for(&known.spec)
}

/// What an attempt needs before it is claimed; none where its job has failed for want of it, or must be looked at again.
async fn prepare(app: &App, mut start: Start) -> Result<Option<Prepared>> {
    // The queue in memory may be behind the store.
    let stored = app.store.job(&start.row.job.id).await?;
    let is_draining = start.chosen.iter().any(|(agent, _)| app.agents.is_draining(&agent.row.id));
    let Some(stored) = stored.filter(|stored| !is_draining && may_start(&stored.job, &start.row.job)) else {
        app.waiting.note(&start.row.job);
        return Ok(None);
    };
    start.row = Arc::new(stored);
    let job = &start.row.job;
    let needs = match needs(app, job).await? {
        Ok(needs) => needs,
        Err(why) => return fail(app, &job.id, why).await.map(|()| None),
    };
    // Rank 0 reads the checkpoint, and sends the others what is in it.
    let reader = start.chosen.first().map_or("", |(agent, _)| agent.row.id.as_str());
    forget_missing(app, job, reader).await?;
    let mut files = start_files(app, job).await;
    files.pretrained.clone_from(&needs.pretrained);
    // Ranks are numbered machine by machine.
    let mut ranks = 0..job.ranks;
    let place = |(agent, slots): &(Arc<Online>, Vec<u32>)| Place {
        agent_id: agent.row.id.clone(),
        agent: agent.row.name.clone(),
        ranks: slots.iter().filter_map(|slot| Some((ranks.next()?, *slot))).collect(),
    };
    let places = start.chosen.iter().map(place).collect();
    let claim = Claim { job: job.id.clone(), after_attempt: job.attempt, places, at: crate::now() };
    Ok(Some(Prepared { start, needs, files, claim }))
}

/// Claims jobs: all in one transaction or, where one of them is refused for good, each by itself.
async fn claim(app: &App, prepared: &[Prepared]) -> Result<Vec<Option<Claimed>>> {
    let claims: Vec<_> = prepared.iter().map(|prepared| prepared.claim.clone()).collect();
    match app.store.claim_all(&claims).await {
        Err(error) if !error.may_pass() => {}
        done => return done,
    }
    let mut claimed = Vec::with_capacity(claims.len());
    for claim in claims {
        let job = claim.job.clone();
        claimed.push(app.store.claim(claim).await.unwrap_or_else(|error| {
            // Those before it are claimed, and their agents must be told, whatever this is.
            if let Err(error) = skip_permanent_error(&job, Err(error)) {
                tracing::warn!(%error, %job, "a job could not be claimed; trying again");
            }
            None
        }));
    }
    Ok(claimed)
}

/// Tells the agents of a job that was claimed to start it.
async fn tell(app: &App, prepared: Prepared, claimed: Claimed) -> Result<()> {
    let Prepared { start: Start { row, chosen }, needs, files, claim: Claim { places, .. } } = prepared;
    let (job, attempt) = (&row.job, claimed.attempt);
    app.coming.forget(&job.id);
    app.reservations.forget(&job.id);
    app.announce(&claimed.changed);
    let mut start = StartAttempt {
        attempt: attempt.clone(),
        spec: needs.spec,
        dataset_path: needs.dataset_path,
        world_size: job.ranks,
        ranks: Vec::new(),
        // Ranks of one machine meet on its own loopback. The agent of rank 0 finds a free port.
        master_addr: master_address(&chosen).unwrap_or("127.0.0.1").into(),
        master_port: 0,
        secret: format!("{:032x}{:032x}", uuid::Uuid::new_v4().as_u128(), uuid::Uuid::new_v4().as_u128()),
        // An agent that does not find the mark there uses a folder of its own.
        job_dir: Some(app.job_dir(&job.id).to_string_lossy().into_owned()),
        resume: claimed.resume,
        network: None,
        files,
    };
    let meets_at_loopback = master_address(&chosen).is_none();
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
fn master_address(chosen: &[(Arc<Online>, Vec<u32>)]) -> Option<&str> {
    let (first, _) = chosen.first()?;
    let network = |agent: &Online| agent.row.machine.network_id.clone();
    let is_here =
        |(agent, _): &(Arc<Online>, Vec<u32>)| network(agent).is_some() && network(agent) == network(first);
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
