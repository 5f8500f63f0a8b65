//! Starts: claims jobs that have been given slots, then notifies their agents. If a claim's transaction fails, the jobs are read again,
//! because the transaction may have been committed nevertheless.

use super::{
    ends::{StopMode, end_attempt, send_stop, stop_reason},
    needs::{Needs, fail, find_needs, read_datasets},
    resume_point::{ALL_LOST, ResumePoint, remove_missing_checkpoints},
    skip_permanent_error,
};
use crate::{
    datasets::notes,
    lifecycle,
    scheduler::{AgentState, Scheduler, Start, address, device_for},
    store::{ChangedJob, Claim, ClaimedAttempt, JobRow, Place, Result, StoreError},
};
use futures_util::future::join_all;
use lockstep_protocol::{
    agent::{AttemptRef, MARK, RankNetwork, StartAttempt, StartFiles, ToAgent},
    backoff::Backoff,
    dataset::Dataset,
    job::{Job, JobState},
    reason::{Reason, ReasonKind},
};
use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

/// Maximum number of jobs that are claimed in a transaction. Each transaction costs a disk sync, but the first job waits for the last.
const BATCH_SIZE: usize = 64;

/// Pauses between attempts to find out which claims were committed: the first and the longest.
const RETRY: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(2));

/// A job that may be claimed, with its requirements.
struct PreparedJob {
    start: Start,
    needs: Needs,
    claim: Claim,
}

/// Starts jobs in the order of the plan. Returns false if not all of them started. A start that fails does not delay other starts.
///
/// # Errors
/// The first transient error, after all other jobs were started.
pub(super) async fn start_all(scheduler: &Scheduler, mut starts: Vec<Start>) -> Result<bool> {
    let planned = starts.len();
    let mut started = 0;
    let mut first_error = Ok(());
    while !starts.is_empty() {
        let later = starts.split_off(BATCH_SIZE.min(starts.len()));
        let batch = std::mem::replace(&mut starts, later);
        let (prepared, error) = prepare_all(scheduler, batch).await?;
        first_error = first_error.and(error);
        if prepared.is_empty() {
            continue;
        }
        // If a job no longer waits, its files are written needlessly. The job's next start overwrites them.
        let (claimed, files) =
            tokio::join!(claim(scheduler, &prepared), write_start_files(scheduler, &prepared));
        let claimed = claimed?;
        // All jobs hold their slots before another task may see which slots are free.
        let mut orders = Vec::with_capacity(claimed.len());
        for ((prepared, files), claimed) in prepared.into_iter().zip(files).zip(claimed) {
            match claimed {
                Some(claimed) => {
                    started += 1;
                    let places = prepared.claim.places.clone();
                    scheduler.agents.leases.add(claimed.attempt.clone(), places);
                    scheduler.waiting.remove(&prepared.claim.job);
                    orders.push((prepared, files, claimed));
                }
                // The job no longer waits, so the queue must read it again.
                None => scheduler.waiting.note_change(&prepared.start.row.job),
            }
        }
        // Agents are notified before slower work.
        let send = |(prepared, files, claimed)| send_orders(scheduler, prepared, files, claimed);
        let notified: Vec<_> = orders.into_iter().map(send).collect();
        first_error = first_error.and(follow_up(scheduler, notified).await);
    }
    first_error.map(|()| started == planned)
}

/// Whether a job may start as planned, because its `stored` row still fits the row in the plan (`known`).
fn may_start(stored: &Job, known: &Job) -> bool {
    matches!(stored.state, JobState::Queued | JobState::Restarting)
        && stored.unreadable.is_none()
        && stored.ranks == known.ranks
        && device_for(&stored.spec) == device_for(&known.spec)
        && stored.spec.data.dataset == known.spec.data.dataset
}

/// Finds the requirements of jobs before they are claimed. Also returns the first transient error. Jobs that have failed, or must be
/// planned again, are left out.
async fn prepare_all(scheduler: &Scheduler, starts: Vec<Start>) -> Result<(Vec<PreparedJob>, Result<()>)> {
    let ids: Vec<_> = starts.iter().map(|start| start.row.job.id.clone()).collect();
    // The queue in memory may be behind the store.
    let known = starts.iter().map(|start| &start.row.job);
    let (mut stored, datasets) =
        tokio::try_join!(scheduler.store.jobs_by_id(&ids), read_datasets(scheduler, known))?;
    let mut ready = Vec::with_capacity(starts.len());
    for start in starts {
        let is_draining = start.chosen.iter().any(|(agent, _)| scheduler.agents.is_draining(&agent.row.id));
        let stored = stored.remove(&start.row.job.id);
        match stored.filter(|stored| !is_draining && may_start(&stored.job, &start.row.job)) {
            Some(row) => ready.push(Start { row: Arc::new(row), ..start }),
            None => {
                scheduler.waiting.note_change(&start.row.job);
                // The job's slots are free, so a new round is due.
                scheduler.agents.leases.wake_dispatch();
            }
        }
    }
    let ids: Vec<_> = ready.iter().map(|start| start.row.job.id.clone()).collect();
    let prepared = join_all(ready.into_iter().map(|start| prepare(scheduler, start, &datasets))).await;
    let (mut found, mut first_error) = (Vec::with_capacity(prepared.len()), Ok(()));
    for (job, done) in ids.iter().zip(prepared) {
        match done {
            Ok(Some(prepared)) => found.push(prepared),
            Ok(None) => scheduler.agents.leases.wake_dispatch(),
            Err(error) => first_error = first_error.and(skip_permanent_error(job, Err(error))),
        }
    }
    Ok((found, first_error))
}

/// Finds the requirements of a job before it is claimed; `None` if the job has failed instead.
async fn prepare(
    scheduler: &Scheduler,
    start: Start,
    datasets: &HashMap<String, Dataset>,
) -> Result<Option<PreparedJob>> {
    let job = &start.row.job;
    let mut needs = match find_needs(scheduler, job, datasets).await? {
        Ok(needs) => needs,
        Err(why) => return fail(scheduler, &job.id, why).await.map(|()| None),
    };
    // A job that has never run and is no fork has no checkpoint.
    if job.attempt > 0 || start.row.is_fork() {
        // Rank 0 reads the checkpoint and sends its content to the other ranks.
        let reader = start.chosen.first().map_or("", |(agent, _)| agent.row.id.as_str());
        if remove_missing_checkpoints(scheduler, job, reader).await? == ResumePoint::AllLost {
            return fail(scheduler, &job.id, ALL_LOST.into()).await.map(|()| None);
        }
    }
    if let Some(ReasonKind::FewerRanks { ranks, .. }) = start.fewer_ranks_reason.as_ref().map(Reason::kind) {
        needs.spec = needs.spec.on_ranks(*ranks);
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
        fewer_ranks_reason: start.fewer_ranks_reason.clone(),
        at: crate::now(),
    };
    Ok(Some(PreparedJob { start, needs, claim }))
}

/// Claims jobs, all in one transaction. If one of them is refused permanently, each is claimed separately.
async fn claim(scheduler: &Scheduler, prepared: &[PreparedJob]) -> Result<Vec<Option<ClaimedAttempt>>> {
    let claims: Vec<_> = prepared.iter().map(|prepared| prepared.claim.clone()).collect();
    match scheduler.store.claim_jobs(&claims).await {
        Err(error) if error.is_temporary() => return find_committed_claims(scheduler, &claims, error).await,
        Err(_) => {}
        Ok(done) => return Ok(done),
    }
    let mut claimed = Vec::with_capacity(claims.len());
    for claim in claims {
        let job = claim.job.clone();
        claimed.push(match scheduler.store.claim(claim.clone()).await {
            Ok(done) => done,
            // Earlier jobs are claimed, and their agents must be notified in any case.
            Err(error) if error.is_temporary() => {
                let found = find_committed_claims(scheduler, &[claim], error).await;
                found.ok().and_then(|mut found| found.pop()).flatten()
            }
            Err(error) => skip_permanent_error(&job, Err(error)).map(|()| None)?,
        });
    }
    Ok(claimed)
}

/// Finds the claims that were committed although their transaction failed with `error`, as when the connection breaks during the commit.
/// Their attempts may write, so they need leases. Retries until the database answers.
///
/// # Errors
/// `error`, if nothing was claimed or the server is stopping.
async fn find_committed_claims(
    scheduler: &Scheduler,
    claims: &[Claim],
    error: StoreError,
) -> Result<Vec<Option<ClaimedAttempt>>> {
    let mut backoff = RETRY;
    let found = loop {
        match read_committed_claims(scheduler, claims).await {
            Err(read_error) if read_error.is_temporary() => {
                tracing::warn!(error = %read_error, "cannot read whether jobs were claimed; trying again");
                tokio::select! {
                    () = tokio::time::sleep(backoff.next_pause()) => {}
                    () = scheduler.tasks.stopping.cancelled() => return Err(error),
                }
            }
            found => break found?,
        }
    };
    if found.iter().all(Option::is_none) { Err(error) } else { Ok(found) }
}

async fn read_committed_claims(
    scheduler: &Scheduler,
    claims: &[Claim],
) -> Result<Vec<Option<ClaimedAttempt>>> {
    // A commit that is still in progress would not be visible.
    scheduler.store.wait_for_writer().await?;
    let ids: Vec<_> = claims.iter().map(|claim| claim.job.clone()).collect();
    let rows = scheduler.store.jobs_by_id(&ids).await?;
    let mut found = Vec::with_capacity(claims.len());
    for claim in claims {
        let row = rows.get(&claim.job);
        // Only this task claims jobs, so the next attempt is this claim's attempt.
        let attempt =
            row.and_then(JobRow::live_attempt).filter(|live| live.attempt == claim.after_attempt + 1);
        let (Some(row), Some(attempt)) = (row, attempt) else {
            found.push(None);
            continue;
        };
        let attempts = scheduler.store.attempts(&claim.job).await?;
        let stored = attempts.into_iter().find(|stored| stored.attempt == attempt.attempt);
        let checkpoint = stored.and_then(|stored| stored.checkpoint);
        let resume_checkpoint =
            checkpoint.and_then(|id| Some(id.strip_prefix(&format!("{}-", claim.job))?.to_owned()));
        // The claim's events are stored; followers read them from the store.
        scheduler.events.hub.catch_up(&row.job);
        let changed = ChangedJob { job: row.job.clone(), events: Vec::new() };
        found.push(Some(ClaimedAttempt { attempt, resume_checkpoint, changed }));
    }
    Ok(found)
}

/// A claimed job whose agents were notified.
struct NotifiedJob {
    attempt: AttemptRef,
    places: Vec<Place>,
    /// The name of an agent that was not connected.
    disconnected: Option<String>,
}

/// Orders the agents of a claimed job to start it.
fn send_orders(
    scheduler: &Scheduler,
    prepared: PreparedJob,
    files: StartFiles,
    claimed: ClaimedAttempt,
) -> NotifiedJob {
    let PreparedJob { start: Start { row, chosen, .. }, needs, claim: Claim { places, .. } } = prepared;
    let (job, attempt) = (&row.job, claimed.attempt);
    scheduler.checkpoints.waits.forget(&job.id);
    scheduler.last_plan.remove_reservations(&job.id);
    scheduler.events.publish(&claimed.changed);
    let master_addr = master_address(&chosen);
    let mut start = StartAttempt {
        attempt: attempt.clone(),
        world_size: needs.spec.parallel.ranks,
        spec: needs.spec,
        dataset_path: needs.dataset_path,
        ranks: Vec::new(),
        // Ranks of one machine connect to each other over the loopback address. The agent of rank 0 chooses a free port.
        master_addr: master_addr.unwrap_or("127.0.0.1").into(),
        master_port: 0,
        secret: format!("{:032x}{:032x}", uuid::Uuid::new_v4().as_u128(), uuid::Uuid::new_v4().as_u128()),
        // An agent that does not find the mark in this folder uses its own folder.
        job_dir: Some(scheduler.config.job_dir(&job.id).to_string_lossy().into_owned()),
        resume: claimed.resume_checkpoint,
        pause_after: row.progress.pause_after,
        network: None,
        files: StartFiles { mark: files.mark, dataset: files.dataset, ..needs.files },
    };
    let mut disconnected = None;
    for ((agent, _), place) in chosen.iter().zip(&places) {
        let machine = &agent.row.machine;
        start.ranks.clone_from(&place.ranks);
        start.network = address(machine).filter(|_| master_addr.is_some()).map(|address| RankNetwork {
            address: address.into(),
            interface: machine.interface.clone(),
            named_by: None,
        });
        if !scheduler.agents.send(&place.agent_id, ToAgent::Start(Box::new(start.clone()))) {
            disconnected = Some(agent.row.name.clone());
            break;
        }
    }
    NotifiedJob { attempt, places, disconnected }
}

/// Handles what happened between claims and orders: agents that disconnected, and jobs that were cancelled or paused.
///
/// # Errors
/// The first transient error, after all jobs were handled.
async fn follow_up(scheduler: &Scheduler, notified: Vec<NotifiedJob>) -> Result<()> {
    let mut first_error = Ok(());
    let (notified, failed): (Vec<_>, Vec<_>) =
        notified.into_iter().partition(|job| job.disconnected.is_none());
    for NotifiedJob { attempt, places, disconnected } in failed {
        let why: Reason = ReasonKind::AgentLeft { agent: disconnected.unwrap_or_default().into() }.into();
        // No rank has started, because not all agents are ready.
        let ended =
            end_attempt(scheduler, &attempt, move |row| lifecycle::requeue(row, &why, crate::now())).await;
        first_error = first_error.and(skip_permanent_error(&attempt.job, ended));
        send_stop(
            scheduler,
            &places,
            &attempt,
            "an agent disconnected before it could start",
            StopMode::AtOnce,
        );
    }
    let ids: Vec<_> = notified.iter().map(|notified| notified.attempt.job.clone()).collect();
    let rows = scheduler.store.jobs_by_id(&ids).await?;
    for NotifiedJob { attempt, places, .. } in notified {
        let row = rows.get(&attempt.job);
        let is_live = row.is_some_and(|r| r.live_attempt().as_ref() == Some(&attempt));
        if !is_live {
            scheduler.agents.leases.release(&attempt.job, attempt.attempt);
        }
        let stop = match row {
            Some(row) if is_live => stop_reason(row),
            // The attempt has ended, and its agents know.
            Some(row) if row.job.state != JobState::Cancelled => None,
            _ => Some((ReasonKind::CancelledByUser { detail: None }.to_string(), StopMode::AtOnce)),
        };
        if let Some((reason, mode)) = stop {
            send_stop(scheduler, &places, &attempt, &reason, mode);
        }
    }
    first_error
}

/// The address at which rank 0 listens; `None` if all agents are on one machine.
fn master_address(chosen: &[(Arc<AgentState>, Vec<u32>)]) -> Option<&str> {
    let (first, _) = chosen.first()?;
    let network = |agent: &AgentState| agent.row.machine.network_id.clone();
    let is_same_machine = |(agent, _): &(Arc<AgentState>, Vec<u32>)| {
        network(agent).is_some() && network(agent) == network(first)
    };
    if chosen.len() == 1 || chosen.iter().all(is_same_machine) { None } else { address(&first.row.machine) }
}

/// Prepares the files of each job for agents without the server's disk, and the mark by which an agent recognises this disk.
async fn write_start_files(scheduler: &Scheduler, prepared: &[PreparedJob]) -> Vec<StartFiles> {
    let folders: Vec<_> =
        prepared.iter().map(|prepared| scheduler.config.job_dir(&prepared.claim.job)).collect();
    let count = folders.len();
    // `Needs` has the other fields.
    let files = |folder: PathBuf| StartFiles {
        mark: write_mark(&folder),
        dataset: notes::dataset_note(&folder),
        ..StartFiles::default()
    };
    let written = tokio::task::spawn_blocking(move || folders.into_iter().map(files).collect());
    written.await.unwrap_or_else(|_| vec![StartFiles::default(); count])
}

/// Writes a random mark into a job's folder, by which agents recognise the server's disk. Returns the mark, or `None` if it cannot be
/// written.
fn write_mark(folder: &Path) -> Option<String> {
    let mark = uuid::Uuid::new_v4().simple().to_string();
    // The folder is missing if the data directory was lost.
    let written = fs::create_dir_all(folder).and_then(|()| fs::write(folder.join(MARK), &mark));
    if let Err(error) = &written {
        tracing::warn!(%error, folder = %folder.display(), "the job's folder cannot be marked");
    }
    written.is_ok().then_some(mark)
}
