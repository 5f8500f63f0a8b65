//! Checkpoints on the server's disk of jobs that train on other machines: which are there, which are still on their way, and which are
//! no longer kept.

use crate::{
    app::App,
    artifact_fetches::{Availability, CheckWait, fetch_if_missing},
    artifact_store::{ArtifactStore, StoredState},
    holders::Holder,
    lifecycle,
    scheduler::Wait,
    store::{CheckpointRow, JobRow, Report, Result, StoreError},
};
use lockstep_protocol::{
    JobId,
    agent::{AttemptEvent, AttemptRef},
    reason::{Facts, Reason, ReasonCode},
};
use std::{collections::HashSet, fs, io, path::Path};

pub(crate) use crate::job_log::{log, log_once};

fn name_of(row: &CheckpointRow) -> String {
    format!("{}-{}", row.info.epoch, row.info.step)
}

/// Whether this server has a checkpoint: on its disk, or in its object store.
fn is_kept(app: &App, row: &CheckpointRow) -> bool {
    app.checkpoint_dir(row).exists()
        || app.artifact_store.as_ref().is_some_and(|store| store.has_whole(&row.id))
}

/// Whether the object store has a checkpoint; none where there is no store, or the checkpoint is nowhere, or damaged on the disk.
pub(crate) fn stored_state(app: &App, row: &CheckpointRow) -> Option<StoredState> {
    let store = app.artifact_store.as_ref()?;
    // It is on the disk, and nobody has looked at it yet.
    let is_new = || !store.is_refused(&row.id) && app.checkpoint_dir(row).exists();
    store.state(&row.id).or_else(|| is_new().then_some(StoredState::Uploading))
}

/// The agents that have a checkpoint which is not on the server's disk yet, the one that uploads it first; none where it is there.
pub(crate) fn on_its_way(app: &App, row: &CheckpointRow) -> Vec<Holder> {
    if is_kept(app, row) {
        return Vec::new();
    }
    let mut holders = Holder::all(&app.job_dir(&row.job), row.attempt, &name_of(row));
    if holders.len() > 1 {
        let online = in_touch(app);
        holders.sort_by_key(|holder| !online.contains(&holder.agent_id));
    }
    holders
}

/// The agents that are online, as far as is known: a machine that is gone hangs up on nobody.
fn in_touch(app: &App) -> HashSet<String> {
    let online = app.agents.online().into_iter().map(|online| online.row.id.clone());
    online.filter(|id| !app.leases.is_cut_off(id)).collect()
}

/// Who has a checkpoint, as far as it was noted before.
struct Noted {
    /// The agent of rank 0.
    first: Option<Holder>,
    /// The agent that tells of it, where it has another one's disk.
    other: Option<Holder>,
    is_listed: bool,
}

/// Work on files off the threads that serve others.
async fn on_files<T: Send + 'static>(
    what: &'static str,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await.map_err(io::Error::other).flatten();
    done.map_err(|error| StoreError::Unavailable(format!("{what}: {error}")))
}

/// Who has the checkpoints that a report tells of, where that is not the attempt's holder alone. `earlier`: reports that are stored with it,
/// before it.
///
/// # Errors
/// The database, or the disk.
pub(crate) async fn note_holders(app: &App, report: &Report, earlier: &[Report]) -> Result<()> {
    let AttemptRef { job, attempt, fencing_token } = report.attempt.clone();
    for event in &report.events {
        let AttemptEvent::Checkpoint(info) = event else { continue };
        let (job_dir, name) = (app.job_dir(&job), format!("{}-{}", info.epoch, info.step));
        let (dir, of, agent_id) = (job_dir.clone(), name.clone(), report.agent_id.clone());
        let read = move || {
            Ok(Noted {
                first: Holder::of(&dir, attempt),
                other: Holder::of_agent(&dir, attempt, &agent_id)
                    .filter(|other| other.fencing_token == fencing_token),
                is_listed: Holder::is_listed(&dir, attempt, &of),
            })
        };
        let Noted { first, other, is_listed } = on_files("the notes of its holders", read).await?;
        // The one that continues most likely comes first.
        let holders = if first.as_ref().is_some_and(|first| first.agent_id == report.agent_id) {
            first.filter(|_| is_listed).map(|first| (first, true)).into_iter().collect()
        } else if let Some(other) = other {
            let tells =
                |event: &AttemptEvent| matches!(event, AttemptEvent::Checkpoint(of) if of.step == info.step);
            let in_batch = |first: &Holder| {
                earlier.iter().any(|e| {
                    e.agent_id == first.agent_id && e.attempt == report.attempt && e.events.iter().any(tells)
                })
            };
            let row = app.store.checkpoint(&format!("{job}-{name}")).await?;
            // Nobody else has told of one that is stored and has no list.
            let is_stored = row.is_some_and(|row| row.attempt == attempt) && !is_listed;
            let has_it = first.filter(|first| in_batch(first) || is_stored);
            has_it.map(|first| (first, true)).into_iter().chain([(other, false)]).collect()
        } else {
            Vec::new()
        };
        let list = move || {
            let mut each = holders.into_iter();
            each.try_for_each(|(holder, in_front)| holder.list(&job_dir, attempt, &name, in_front))
        };
        on_files("the list of its holders", list).await?;
    }
    Ok(())
}

impl Availability {
    fn wait(self) -> Option<Wait> {
        let (why, is_kept) = match self {
            // A check takes no longer than reading the checkpoint: the job's slots are worth keeping.
            Self::Checking(why) => (why.into(), true),
            Self::Fetching(why) => (why.into(), false),
            Self::Here | Self::Lost => return None,
        };
        Some(Wait { why, is_kept })
    }
}

/// Why a job is not started yet on `agent`: a checkpoint newer than those that are here is on its way from another agent, which is
/// online, or its newest one is fetched from the object store, or checked. `patience`: how long this may wait for checks.
///
/// # Errors
/// The database.
pub(crate) async fn wait_for_newer(
    app: &App,
    of: &JobRow,
    agent: &str,
    patience: &mut CheckWait,
) -> Result<Option<Wait>> {
    let job = &of.job;
    // What it begins from is another job's.
    if let (Some(store), Some(given)) = (&app.artifact_store, &job.spec.model.pretrained)
        && store.has(given)
        && let Some(row) = app.store.checkpoint(given).await?
        && let Some(wait) = fetch_if_missing(app, &row, job, patience).await.wait()
    {
        return Ok(Some(wait));
    }
    // One that has never run, and continues nobody's run, has no checkpoint.
    if job.attempt == 0 && !of.is_fork() {
        return Ok(None);
    }
    let online = in_touch(app);
    let (mut checkpoints, mut agents, mut is_coming) = (Vec::new(), Vec::new(), false);
    for row in app.store.checkpoints(&job.id).await? {
        // The newest comes first.
        let holders = on_its_way(app, &row);
        if holders.is_empty() {
            match fetch_if_missing(app, &row, job, patience).await {
                Availability::Here => break,
                Availability::Lost => continue,
                waits => return Ok(waits.wait()),
            }
        }
        is_coming = true;
        if holders.iter().any(|holder| holder.agent_id == agent) {
            break;
        }
        if let Some(holder) = holders.into_iter().find(|holder| online.contains(&holder.agent_id)) {
            checkpoints.push(row.id);
            agents.push(holder.agent);
        }
    }
    if !is_coming {
        app.checkpoint_waits.forget(&job.id);
    }
    let awaited = app.checkpoint_waits.awaited(&job.id, &checkpoints, app.config.checkpoint_wait);
    Ok(awaited.map(|n| {
        let (holder, checkpoint) = (agents.swap_remove(n), checkpoints.swap_remove(n));
        let facts = Facts { agent: Some(holder), checkpoint: Some(checkpoint), ..Facts::default() };
        Wait { why: Reason::new(ReasonCode::WaitingForCheckpoint, facts).into(), is_kept: false }
    }))
}

/// A machine with a disk of its own removes old checkpoints there. Those that the server has are the server's to keep ([`tidy`]): perhaps
/// they are all there is, because newer ones have not come yet. Ranks on the server's disk remove old ones and damaged ones: of the damaged
/// ones, those that the object store has whole stay.
///
/// # Errors
/// The disk, or the database.
pub(crate) async fn keep_uploaded(app: &App, report: &mut Report) -> Result<()> {
    if !report.events.iter().any(|event| matches!(event, AttemptEvent::CheckpointRemoved { .. })) {
        return Ok(());
    }
    let (job, attempt, mut events) =
        (report.attempt.job.clone(), report.attempt.attempt, report.events.clone());
    // One that is not seen to be old yet, since the newest is new, goes when that one is stored.
    let old = match &app.artifact_store {
        Some(_) => old_ones(app, &job).await?.map(|(_, old)| old).unwrap_or_default(),
        None => Vec::new(),
    };
    let (job_dir, app) = (app.job_dir(&job), app.clone());
    let kept = move || {
        for event in &mut events {
            let AttemptEvent::CheckpointRemoved { epoch, step } = event else { continue };
            let name = format!("{epoch}-{step}");
            let is_stored = |store: &ArtifactStore| store.has_whole(&format!("{job}-{name}"));
            let is_stored = app.artifact_store.as_ref().is_some_and(is_stored);
            let is_here = is_stored || job_dir.join("checkpoints").join(&name).exists();
            let is_wanted = is_stored && !old.contains(&(*epoch, *step));
            if is_wanted || is_here && Holder::of(&job_dir, attempt).is_some() {
                *event = AttemptEvent::Unknown;
            }
        }
        Ok(events)
    };
    report.events = on_files("the checkpoints that are here", kept).await?;
    Ok(())
}

/// After an upload: removes what the job no longer keeps. The machine that trains knows only the checkpoints on its own disk; those of the
/// machines before it are here alone.
///
/// # Errors
/// The database.
pub(crate) async fn tidy(app: &App, attempt: &AttemptRef) -> Result<()> {
    // Somebody else trains now, perhaps on this disk.
    if app.leases.attempt_of(&attempt.job).is_some_and(|live| live != *attempt) {
        return Ok(());
    }
    let Some((rows, old)) = old_ones(app, &attempt.job).await? else { return Ok(()) };
    let kept: HashSet<String> = rows
        .iter()
        .map(|row| (row.info.epoch, row.info.step))
        .filter(|row| !old.contains(row))
        .map(|(epoch, step)| format!("{epoch}-{step}"))
        .collect();
    remove(app, &attempt.job, old).await?;
    let job_dir = app.job_dir(&attempt.job);
    let swept = tokio::task::spawn_blocking(move || sweep(&job_dir, &kept)).await;
    if let Err(error) = swept.map_err(io::Error::other).flatten() {
        tracing::warn!(%error, job = %attempt.job, "old checkpoints stay for now");
    }
    Ok(())
}

/// A job's checkpoints, and epoch and step of those of them that it does not keep: more than it should, and not the best.
async fn old_ones(app: &App, job: &JobId) -> Result<Option<(Vec<CheckpointRow>, Vec<(u32, u64)>)>> {
    let Some(job) = app.store.job(job).await? else { return Ok(None) };
    let keep = (job.job.spec.checkpoint.keep as usize).max(2);
    let rows = app.store.checkpoints(&job.job.id).await?;
    // Only what the server has counts: newer ones may never come.
    let here = rows.iter().filter(|row| is_kept(app, row));
    let old = here.skip(keep).filter(|r| !r.info.best).map(|r| (r.info.epoch, r.info.step)).collect();
    Ok(Some((rows, old)))
}

/// Removes the rows of checkpoints.
async fn remove(app: &App, job: &JobId, gone: Vec<(u32, u64)>) -> Result<()> {
    if gone.is_empty() {
        return Ok(());
    }
    let removed = move |row: &mut JobRow| {
        let events = gone.iter().map(|(epoch, step)| {
            let event = AttemptEvent::CheckpointRemoved { epoch: *epoch, step: *step };
            lifecycle::report(row, event, None, crate::now())
        });
        Ok(events.collect::<std::result::Result<Vec<_>, _>>()?.concat())
    };
    let changed = app.store.change_job(job, Box::new(removed)).await?;
    app.announce(&changed);
    Ok(())
}

/// Removes what a job no longer keeps and is in the object store alone: ranks remove what they find on the disk, and would never remove
/// that.
///
/// # Errors
/// The database.
pub(crate) async fn forget_old(app: &App, job: &JobId) -> Result<()> {
    let Some((rows, old)) = old_ones(app, job).await? else { return Ok(()) };
    let on_disk = |(epoch, step): &(u32, u64)| {
        let row = rows.iter().find(|row| (row.info.epoch, row.info.step) == (*epoch, *step));
        row.is_some_and(|row| app.checkpoint_dir(row).exists())
    };
    let gone = old.into_iter().filter(|old| !on_disk(old)).collect();
    remove(app, job, gone).await
}

/// Removes folders of checkpoints, and what has come of them, that are not in `kept`.
fn sweep(job_dir: &Path, kept: &HashSet<String>) -> io::Result<()> {
    for all in ["checkpoints", "uploads"] {
        let entries = match fs::read_dir(job_dir.join(all)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let is_checkpoint = name
                .split_once('-')
                .is_some_and(|(epoch, step)| epoch.parse::<u32>().is_ok() && step.parse::<u64>().is_ok());
            if is_checkpoint && !kept.contains(&name) {
                // First its name, so that no half of it is ever seen.
                let hidden = job_dir.join(all).join(format!(".tmp-gone-{name}"));
                fs::rename(entry.path(), &hidden)?;
                fs::remove_dir_all(&hidden)?;
            }
        }
    }
    Ok(())
}
