//! Starts: claims jobs that have been given slots, and tells their agents. If the transaction of a claim fails, the jobs are read again,
//! because it may have been committed nevertheless.

use super::{
    ends::{end_attempt, wanted},
    left::{Left, NONE_LEFT, forget_missing},
    needs::{Needs, datasets, fail, needs},
    skip_permanent_error,
};
use crate::{
    app::App,
    dataset_notes,
    holders::Holder,
    lifecycle,
    scheduler::{AgentState, Start, address, device_for},
    store::{Changed, Claim, Claimed, JobRow, Place, Result, StoreError},
};
use futures_util::future::join_all;
use lockstep_protocol::{
    agent::{AttemptRef, MARK, RankNetwork, StartAttempt, StartFiles, ToAgent},
    dataset::Dataset,
    job::{Job, JobId, JobState},
    reason::{Facts, Reason, ReasonCode},
};
use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

/// Jobs that are claimed in one transaction, at most: the first of them waits for the last. Each transaction costs a sync of the disk, and
/// waits for the one before it.
const TOGETHER: usize = 64;

/// Pauses before it is asked again what became of claims: the first, and the longest.
const ASK_AGAIN: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

/// A job that may be claimed: what it needs is there.
struct Prepared {
    start: Start,
    needs: Needs,
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
    let mut passing = Ok(());
    while !starts.is_empty() {
        let later = starts.split_off(TOGETHER.min(starts.len()));
        let now = std::mem::replace(&mut starts, later);
        let (prepared, failed) = prepare_all(app, now).await?;
        passing = passing.and(failed);
        if prepared.is_empty() {
            continue;
        }
        // What is written to the disk for a job that turns out not to wait any more is written anew before its next start.
        let (claimed, files) = tokio::join!(claim(app, &prepared), start_files(app, &prepared));
        let claimed = claimed?;
        // All of them hold their slots before anybody may look which are free.
        let mut orders = Vec::with_capacity(claimed.len());
        for ((prepared, files), claimed) in prepared.into_iter().zip(files).zip(claimed) {
            match claimed {
                Some(claimed) => {
                    started += 1;
                    app.leases.hold(claimed.attempt.clone(), prepared.claim.places.clone(), false);
                    app.waiting.remove(&prepared.claim.job);
                    orders.push((prepared, files, claimed));
                }
                // It does not wait any more: to be read again.
                None => app.waiting.note(&prepared.start.row.job),
            }
        }
        // Before anything that takes long: their agents are notified.
        let order = |(prepared, files, claimed)| order(app, prepared, files, claimed);
        let ordered: Vec<_> = orders.into_iter().map(order).collect();
        passing = passing.and(follow_up(app, ordered).await);
    }
    passing.map(|()| started == wanted)
}

/// Whether what was found out about a job as it was known holds for what is stored of it.
fn may_start(stored: &Job, known: &Job) -> bool {
    matches!(stored.state, JobState::Queued | JobState::Restarting)
        && stored.unreadable.is_none()
        && stored.ranks == known.ranks
        && device_for(&stored.spec) == device_for(&known.spec)
        && stored.spec.data.dataset == known.spec.data.dataset
}

/// What attempts need before they are claimed; without those whose jobs have failed for want of it, or must be looked at again. Also the
/// first error that may pass.
async fn prepare_all(app: &App, starts: Vec<Start>) -> Result<(Vec<Prepared>, Result<()>)> {
    let ids: Vec<_> = starts.iter().map(|start| start.row.job.id.clone()).collect();
    // The queue in memory may be behind the store.
    let known = starts.iter().map(|start| &start.row.job);
    let (stored, datasets) = tokio::try_join!(app.store.jobs_of(&ids), datasets(app, known))?;
    let mut stored: HashMap<JobId, JobRow> =
        stored.into_iter().map(|row| (row.job.id.clone(), row)).collect();
    let mut ready = Vec::with_capacity(starts.len());
    for start in starts {
        let is_draining = start.chosen.iter().any(|(agent, _)| app.agents.is_draining(&agent.row.id));
        let stored = stored.remove(&start.row.job.id);
        match stored.filter(|stored| !is_draining && may_start(&stored.job, &start.row.job)) {
            Some(row) => ready.push(Start { row: Arc::new(row), ..start }),
            None => {
                app.waiting.note(&start.row.job);
                // Its slots are free.
                app.leases.poke();
            }
        }
    }
    let ids: Vec<_> = ready.iter().map(|start| start.row.job.id.clone()).collect();
    let prepared = join_all(ready.into_iter().map(|start| prepare(app, start, &datasets))).await;
    let (mut found, mut passing) = (Vec::with_capacity(prepared.len()), Ok(()));
    for (job, done) in ids.iter().zip(prepared) {
        match done {
            Ok(Some(prepared)) => found.push(prepared),
            Ok(None) => app.leases.poke(),
            Err(error) => passing = passing.and(skip_permanent_error(job, Err(error))),
        }
    }
    Ok((found, passing))
}

/// What an attempt needs before it is claimed; none where its job has failed for want of it.
async fn prepare(app: &App, start: Start, datasets: &HashMap<String, Dataset>) -> Result<Option<Prepared>> {
    let job = &start.row.job;
    let mut needs = match needs(app, job, datasets).await? {
        Ok(needs) => needs,
        Err(why) => return fail(app, &job.id, why).await.map(|()| None),
    };
    // One that has never run, and continues nobody's run, has no checkpoint.
    if job.attempt > 0 || start.row.is_fork() {
        // Rank 0 reads the checkpoint, and sends the others what is in it.
        let reader = start.chosen.first().map_or("", |(agent, _)| agent.row.id.as_str());
        if forget_missing(app, job, reader).await? == Left::None {
            return fail(app, &job.id, NONE_LEFT.into()).await.map(|()| None);
        }
    }
    if let Some(ranks) = start.fewer.as_ref().and_then(|fewer| fewer.facts().ranks) {
        needs.spec = needs.spec.on_ranks(ranks);
    }
    // Ranks are numbered machine by machine.
    let mut ranks = 0..needs.spec.parallel.ranks;
    let place = |(agent, slots): &(Arc<AgentState>, Vec<u32>)| Place {
        agent_id: agent.row.id.clone(),
        agent: agent.row.name.clone(),
        ranks: slots.iter().filter_map(|slot| Some((ranks.next()?, *slot))).collect(),
    };
    let places = start.chosen.iter().map(place).collect();
    let claim = Claim {
        job: job.id.clone(),
        after_attempt: job.attempt,
        places,
        fewer: start.fewer.clone(),
        at: crate::now(),
    };
    Ok(Some(Prepared { start, needs, claim }))
}

/// Claims jobs: all in one transaction or, where one of them is refused for good, each by itself.
async fn claim(app: &App, prepared: &[Prepared]) -> Result<Vec<Option<Claimed>>> {
    let claims: Vec<_> = prepared.iter().map(|prepared| prepared.claim.clone()).collect();
    match app.store.claim_all(&claims).await {
        Err(error) if error.may_pass() => return find_claimed(app, &claims, error).await,
        Err(_) => {}
        Ok(done) => return Ok(done),
    }
    let mut claimed = Vec::with_capacity(claims.len());
    for claim in claims {
        let job = claim.job.clone();
        claimed.push(match app.store.claim(claim.clone()).await {
            Ok(done) => done,
            // Those before it are claimed, and their agents must be notified, whatever this is.
            Err(error) if error.may_pass() => {
                let found = find_claimed(app, &[claim], error).await;
                found.ok().and_then(|mut found| found.pop()).flatten()
            }
            Err(error) => skip_permanent_error(&job, Err(error)).map(|()| None)?,
        });
    }
    Ok(claimed)
}

/// What became of claims whose transaction failed with `error`: it may have been carried out nevertheless, as when the connection broke at
/// its end. Their attempts may write then, and must not stay without a lease. Asks until the database answers.
///
/// # Errors
/// `error`, where nothing was claimed or the server stops.
async fn find_claimed(app: &App, claims: &[Claim], error: StoreError) -> Result<Vec<Option<Claimed>>> {
    let (mut pause, longest) = ASK_AGAIN;
    let found = loop {
        match read_claimed(app, claims).await {
            Err(again) if again.may_pass() => {
                tracing::warn!(error = %again, "what became of a claim is not known; asking again");
                tokio::select! {
                    () = tokio::time::sleep(pause) => {}
                    () = app.stopping.cancelled() => return Err(error),
                }
                pause = (pause * 2).min(longest);
            }
            found => break found?,
        }
    };
    if found.iter().all(Option::is_none) { Err(error) } else { Ok(found) }
}

async fn read_claimed(app: &App, claims: &[Claim]) -> Result<Vec<Option<Claimed>>> {
    // Readers would not see a commit that the database still carries out.
    app.store.settled().await?;
    let ids: Vec<_> = claims.iter().map(|claim| claim.job.clone()).collect();
    let rows = app.store.jobs_of(&ids).await?;
    let mut found = Vec::with_capacity(claims.len());
    for claim in claims {
        let row = rows.iter().find(|row| row.job.id == claim.job);
        // Nobody else claims jobs.
        let attempt = row.and_then(JobRow::live).filter(|live| live.attempt == claim.after_attempt + 1);
        let (Some(row), Some(attempt)) = (row, attempt) else {
            found.push(None);
            continue;
        };
        let attempts = app.store.attempts(&claim.job).await?;
        let made = attempts.into_iter().find(|made| made.attempt == attempt.attempt);
        let from = made.and_then(|made| made.checkpoint);
        let resume = from.and_then(|id| Some(id.strip_prefix(&format!("{}-", claim.job))?.to_owned()));
        // Its events are stored; whoever follows it reads them there.
        app.hub.catch_up(&row.job);
        let changed = Changed { job: row.job.clone(), events: Vec::new() };
        found.push(Some(Claimed { attempt, resume, changed }));
    }
    Ok(found)
}

/// A start that its agents were notified of, unless one of them has gone away.
struct Ordered {
    attempt: AttemptRef,
    places: Vec<Place>,
    gone: Option<String>,
}

/// Notifies the agents of a job that was claimed: they start it.
fn order(app: &App, prepared: Prepared, files: StartFiles, claimed: Claimed) -> Ordered {
    let Prepared { start: Start { row, chosen, .. }, needs, claim: Claim { places, .. } } = prepared;
    let (job, attempt) = (&row.job, claimed.attempt);
    app.checkpoint_waits.forget(&job.id);
    app.last_plan.release(&job.id);
    app.announce(&claimed.changed);
    let mut start = StartAttempt {
        attempt: attempt.clone(),
        world_size: needs.spec.parallel.ranks,
        spec: needs.spec,
        dataset_path: needs.dataset_path,
        ranks: Vec::new(),
        // Ranks of one machine meet on its own loopback. The agent of rank 0 finds a free port.
        master_addr: master_address(&chosen).unwrap_or("127.0.0.1").into(),
        master_port: 0,
        secret: format!("{:032x}{:032x}", uuid::Uuid::new_v4().as_u128(), uuid::Uuid::new_v4().as_u128()),
        // An agent that does not find the mark there uses a folder of its own.
        job_dir: Some(app.job_dir(&job.id).to_string_lossy().into_owned()),
        resume: claimed.resume,
        network: None,
        files: StartFiles {
            pretrained: needs.pretrained,
            registered: needs.registered,
            weights_in: needs.weights_in,
            dataset_in: needs.dataset_in,
            ..files
        },
    };
    let meets_at_loopback = master_address(&chosen).is_none();
    let mut gone = None;
    for ((agent, _), place) in chosen.iter().zip(&places) {
        let machine = &agent.row.machine;
        start.ranks.clone_from(&place.ranks);
        start.network = address(machine).filter(|_| !meets_at_loopback).map(|address| RankNetwork {
            address: address.into(),
            interface: machine.interface.clone(),
            named_by: None,
        });
        if !app.agents.send(&place.agent_id, ToAgent::Start(Box::new(start.clone()))) {
            gone = Some(agent.row.name.clone());
            break;
        }
    }
    Ordered { attempt, places, gone }
}

/// What has happened between the claims and the orders: agents may have gone away, and jobs may have been cancelled or paused.
///
/// # Errors
/// The first that may pass, once all others are looked at.
async fn follow_up(app: &App, ordered: Vec<Ordered>) -> Result<()> {
    let mut passing = Ok(());
    let (ordered, failed): (Vec<_>, Vec<_>) = ordered.into_iter().partition(|order| order.gone.is_none());
    for Ordered { attempt, places, gone } in failed {
        let facts = Facts { agent: gone, ..Facts::default() };
        let why = Reason::new(ReasonCode::AgentLeft, facts);
        // Nowhere are ranks started before all agents are ready.
        let ended = end_attempt(app, &attempt, move |row| lifecycle::requeue(row, &why, crate::now())).await;
        passing = passing.and(skip_permanent_error(&attempt.job, ended));
        stop(app, &attempt, &places, "an agent went away before it could start", false);
    }
    let ids: Vec<_> = ordered.iter().map(|ordered| ordered.attempt.job.clone()).collect();
    let rows = app.store.jobs_of(&ids).await?;
    let rows: HashMap<&JobId, &JobRow> = rows.iter().map(|row| (&row.job.id, row)).collect();
    for Ordered { attempt, places, .. } in ordered {
        let row = rows.get(&attempt.job).copied();
        let live = row.is_some_and(|r| r.live().as_ref() == Some(&attempt));
        if !live {
            app.leases.release(&attempt.job, attempt.attempt);
        }
        let wish = match row {
            Some(row) if live => wanted(row),
            // It may also have run to its end by now, as its agent knows best.
            Some(row) if row.job.state != JobState::Cancelled => None,
            _ => Some((Reason::from(ReasonCode::CancelledByUser).words().to_owned(), false)),
        };
        if let Some((reason, patient)) = wish {
            stop(app, &attempt, &places, &reason, patient);
        }
    }
    passing
}

fn stop(app: &App, attempt: &AttemptRef, places: &[Place], reason: &str, patient: bool) {
    for place in places {
        let (attempt, reason) = (attempt.clone(), reason.to_owned());
        app.agents.send(&place.agent_id, ToAgent::Stop { attempt, reason, patient });
    }
}

/// Where rank 0 of a job on these agents listens; none where all of them are on one machine.
fn master_address(chosen: &[(Arc<AgentState>, Vec<u32>)]) -> Option<&str> {
    let (first, _) = chosen.first()?;
    let network = |agent: &AgentState| agent.row.machine.network_id.clone();
    let is_here = |(agent, _): &(Arc<AgentState>, Vec<u32>)| {
        network(agent).is_some() && network(agent) == network(first)
    };
    if chosen.len() == 1 || chosen.iter().all(is_here) { None } else { address(&first.row.machine) }
}

/// What agents need to know that have not the server's disk, of each of these jobs. The mark tells them whether they have.
async fn start_files(app: &App, prepared: &[Prepared]) -> Vec<StartFiles> {
    let folder = |claim: &Claim| (app.job_dir(&claim.job), claim.after_attempt + 1);
    let folders: Vec<_> = prepared.iter().map(|prepared| folder(&prepared.claim)).collect();
    let number = folders.len();
    // The rest is known when it is sent.
    let files = |(folder, attempt): (PathBuf, u32)| {
        Holder::forget_all(&folder, attempt);
        StartFiles {
            mark: mark(&folder),
            dataset: dataset_notes::dataset_note(&folder),
            ..StartFiles::default()
        }
    };
    let all = tokio::task::spawn_blocking(move || folders.into_iter().map(files).collect());
    all.await.unwrap_or_else(|_| vec![StartFiles::default(); number])
}

/// Writes a random word into a job's folder.
fn mark(folder: &Path) -> Option<String> {
    let word = uuid::Uuid::new_v4().simple().to_string();
    // A data directory that was lost has no folders of its jobs.
    let marked = fs::create_dir_all(folder).and_then(|()| fs::write(folder.join(MARK), &word));
    if let Err(error) = &marked {
        tracing::warn!(%error, folder = %folder.display(), "the job's folder cannot be marked");
    }
    marked.is_ok().then_some(word)
}
