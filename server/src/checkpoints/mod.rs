//! Checkpoints: their copies on the server's disk and in the object store, uploads from agents, and the removal of old checkpoints.

pub(crate) mod disk_checks;
pub(crate) mod manifest;
pub(crate) mod object_storage;
pub(crate) mod object_store_fetches;
pub(crate) mod object_store_state;
pub(crate) mod object_store_sync;
pub(crate) mod unreported;
pub(crate) mod uploads;
pub(crate) mod verified_files;
mod waits;

pub(crate) use waits::Wait;

use crate::{
    agents::{Agents, shared_requests::SharedRequests},
    config::ServeConfig,
    events::Events,
    lifecycle,
    store::{CheckpointRow, Copies, CopyState, Holder, JobRow, Report, Result, Store},
    util::{blocking, if_exists, tasks::Tasks},
};
use lockstep_protocol::{
    JobId,
    agent::{AttemptEvent, AttemptRef},
    checkpoint::{Checkpoint, StoredState},
    checkpoint_files::{folder_name, parse_folder_name},
    reason::{Reason, ReasonKind},
};
use object_store_fetches::{Availability, find_availability};
use object_store_state::ObjectStoreState;
use std::{
    collections::{HashMap, HashSet},
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};
use verified_files::VerifiedFiles;
use waits::CheckpointWaits;

fn folder_name_of(row: &CheckpointRow) -> String {
    folder_name(row.info.epoch, row.info.step)
}

/// The checkpoints of all jobs: on the server's disk, in its object store, and on disks of agents.
pub(crate) struct Checkpoints {
    pub(crate) config: Arc<ServeConfig>,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) events: Arc<Events>,
    pub(crate) agents: Arc<Agents>,
    /// The object store for copies of checkpoints, if there is one.
    pub(crate) object_store: Option<Arc<ObjectStoreState>>,
    tasks: Tasks,
    /// The times for which jobs have waited for checkpoints that other machines upload.
    pub(crate) waits: CheckpointWaits,
    /// Files of checkpoints whose checksum was found correct.
    pub(crate) verified_files: VerifiedFiles,
    /// Running evaluations, by the file of their result.
    pub(crate) evaluations: Arc<SharedRequests<PathBuf, ()>>,
    /// Held while old checkpoints are removed, and while a checkpoint is registered as a model version, which must not be removed.
    pub(crate) removal_lock: tokio::sync::Mutex<()>,
}

impl Checkpoints {
    pub(crate) fn new(
        config: Arc<ServeConfig>,
        store: Arc<dyn Store>,
        events: Arc<Events>,
        agents: Arc<Agents>,
        object_store: Option<Arc<ObjectStoreState>>,
        tasks: Tasks,
    ) -> Self {
        Self {
            config,
            store,
            events,
            agents,
            object_store,
            evaluations: SharedRequests::new(tasks.clone(), Duration::ZERO),
            tasks,
            waits: CheckpointWaits::default(),
            verified_files: VerifiedFiles::default(),
            removal_lock: tokio::sync::Mutex::default(),
        }
    }

    /// The folder of a checkpoint on the server's disk.
    pub(crate) fn folder(&self, row: &CheckpointRow) -> PathBuf {
        self.config.job_dir(&row.job).join("checkpoints").join(folder_name_of(row))
    }

    /// The copies of a job's checkpoints.
    pub(crate) async fn copies(&self, job: &JobId) -> Result<JobCopies> {
        let object_store = self.object_store.as_deref().map_or("", |store| store.storage.url());
        Ok(JobCopies(self.store.copies(job, object_store).await?))
    }

    pub(crate) async fn copies_of(&self, row: &CheckpointRow) -> Result<Copies> {
        Ok(self.copies(&row.job).await?.0.remove(&row.id).unwrap_or_default())
    }

    /// Whether this server has a checkpoint: on its disk, or in its object store.
    pub(crate) fn has_copy(&self, row: &CheckpointRow, copies: &Copies) -> bool {
        self.folder(row).exists() || copies.is_stored()
    }

    /// A checkpoint as clients see it.
    pub(crate) fn describe(&self, row: CheckpointRow, copies: &Copies) -> Checkpoint {
        let uploading_from =
            self.holders_unless_on_server(&row, copies).into_iter().next().map(|holder| holder.agent);
        let missing = uploading_from.is_none() && !self.has_copy(&row, copies);
        let stored = self.stored_state(&row, copies);
        let CheckpointRow { id, attempt, info, created_at, .. } = row;
        Checkpoint { id, attempt, info, created_at, uploading_from, missing, stored }
    }

    /// Whether a checkpoint is in the object store or on its way there. `None` if there is no object store, or if neither the store nor the
    /// disk has an undamaged copy.
    fn stored_state(&self, row: &CheckpointRow, copies: &Copies) -> Option<StoredState> {
        let store = self.object_store.as_deref()?;
        let is_damaged_on_server = copies.is_damaged_on_server;
        let is_uploading = match copies.object_store {
            _ if store.is_uploading(&row.id) => true,
            Some(CopyState::Complete) => return Some(StoredState::Stored),
            Some(CopyState::Copying) => !is_damaged_on_server,
            // The checkpoint is on the disk, but not queued for the upload yet.
            None => !is_damaged_on_server && self.folder(row).exists(),
            Some(CopyState::Damaged) => false,
        };
        is_uploading.then_some(StoredState::Uploading)
    }

    /// The agents that have a checkpoint, online agents first. Empty if the server has the checkpoint.
    pub(crate) fn holders_unless_on_server(&self, row: &CheckpointRow, copies: &Copies) -> Vec<Holder> {
        if self.has_copy(row, copies) {
            return Vec::new();
        }
        let mut holders = copies.holders.clone();
        if holders.len() > 1 {
            let online = self.reachable_agents();
            holders.sort_by_key(|holder| !online.contains(&holder.agent_id));
        }
        holders
    }

    /// The agents that are online and were not given up. A machine that disappears does not close its connection.
    fn reachable_agents(&self) -> HashSet<String> {
        let online = self.agents.online().into_iter().map(|online| online.row.id.clone());
        online.filter(|id| !self.agents.leases.is_given_up(id)).collect()
    }

    /// Why a job must not start on an agent yet: another agent, which is online, is uploading a newer checkpoint than the server has, or
    /// the newest checkpoint is being fetched from the object store or checked. This call waits for checks until `check_deadline`.
    pub(crate) async fn find_wait(
        self: &Arc<Self>,
        job_row: &JobRow,
        agent_id: &str,
        check_deadline: Instant,
    ) -> Result<Option<Wait>> {
        let job = &job_row.job;
        // Pretrained weights may be a checkpoint of another job.
        if self.object_store.is_some()
            && let Some(pretrained) = &job.spec.model.pretrained
            && let Some(row) = self.store.checkpoint(pretrained).await?
            && let copies = self.copies_of(&row).await?
            && copies.may_be_fetched()
            && let Availability::Waits(wait) =
                find_availability(self, &row, &copies, job, check_deadline).await?
        {
            return Ok(Some(wait));
        }
        // A job that has never run and is no fork has no checkpoint.
        if job.attempt == 0 && !job_row.is_fork() {
            return Ok(None);
        }
        let online = self.reachable_agents();
        let copies = self.copies(&job.id).await?;
        // Checkpoints that online agents upload, and the names of these agents.
        let (mut checkpoints, mut agents) = (Vec::new(), Vec::new());
        let mut is_newest_elsewhere = false;
        for row in self.store.checkpoints(&job.id).await? {
            // The newest checkpoint comes first.
            let copies = copies.of(&row.id);
            let holders = self.holders_unless_on_server(&row, copies);
            if holders.is_empty() {
                match find_availability(self, &row, copies, job, check_deadline).await? {
                    Availability::Here => break,
                    Availability::Lost => continue,
                    Availability::Waits(wait) => return Ok(Some(wait)),
                }
            }
            is_newest_elsewhere = true;
            // This agent has the checkpoint on its own disk.
            if holders.iter().any(|holder| holder.agent_id == agent_id) {
                break;
            }
            if let Some(holder) = holders.into_iter().find(|holder| online.contains(&holder.agent_id)) {
                checkpoints.push(row.id);
                agents.push(holder.agent);
            }
        }
        if !is_newest_elsewhere {
            self.waits.forget(&job.id);
        }
        let awaited = self.waits.first_awaited(&job.id, &checkpoints, self.config.checkpoint_wait);
        Ok(awaited.map(|index| {
            let (holder, checkpoint) = (agents.swap_remove(index), checkpoints.swap_remove(index));
            let (checkpoint, agent) = (checkpoint.into(), Some(holder.into()));
            let why = ReasonKind::WaitingForCheckpoint { checkpoint, agent, detail: None };
            Wait { why: Reason::from(why).into(), keeps_slots: false }
        }))
    }

    /// Ignores reported removals of checkpoints that the server still has. A machine with its own disk removes old checkpoints there, but
    /// the server's copies may be the only ones until newer checkpoints arrive; [`Checkpoints::remove_old_after_upload`] removes them.
    /// Ranks on the server's disk remove old and damaged checkpoints. A damaged checkpoint stays if the object store has an undamaged copy.
    pub(crate) async fn ignore_removals_of_kept_checkpoints(&self, report: &mut Report) -> Result<()> {
        if !report.events.iter().any(|event| matches!(event, AttemptEvent::CheckpointRemoved { .. })) {
            return Ok(());
        }
        let job = &report.attempt.job;
        // A checkpoint that is not old yet is removed later, when the newest checkpoint is stored.
        let (copies, old) = if self.object_store.is_some() {
            let (_, old) = self.kept_and_old(job).await?.unwrap_or_default();
            (self.copies(job).await?, old)
        } else {
            Default::default()
        };
        let place = self.store.agent_place(&report.attempt, &report.agent_id).await?;
        let has_own_disk = place.is_some_and(|place| place.has_own_disk);
        for event in &mut report.events {
            let AttemptEvent::CheckpointRemoved { epoch, step } = event else { continue };
            let name = folder_name(*epoch, *step);
            let id = format!("{job}-{name}");
            let is_stored = copies.of(&id).is_stored();
            let is_here = is_stored || self.config.job_dir(job).join("checkpoints").join(&name).exists();
            let is_needed = is_stored && old.iter().all(|row| row.id != id);
            if is_needed || is_here && has_own_disk {
                *event = AttemptEvent::Unknown;
            }
        }
        Ok(())
    }

    /// Removes checkpoints that the job no longer keeps, after an upload. The machine that trains knows only the checkpoints on its own
    /// disk, but the server also has checkpoints of earlier machines.
    pub(crate) async fn remove_old_after_upload(&self, attempt: &AttemptRef) -> Result<()> {
        // Another attempt is training, possibly on this disk.
        if self.agents.leases.attempt_of(&attempt.job).is_some_and(|live| live != *attempt) {
            return Ok(());
        }
        let _guard = self.removal_lock.lock().await;
        let Some((kept, old)) = self.kept_and_old(&attempt.job).await? else { return Ok(()) };
        self.change_rows(&attempt.job, epochs_and_steps(&old), Vec::new()).await?;
        let kept_names: HashSet<String> = kept.iter().map(folder_name_of).collect();
        let job_dir = self.config.job_dir(&attempt.job);
        if let Err(error) = blocking(move || remove_others(&job_dir, &kept_names)).await {
            tracing::warn!(%error, job = %attempt.job, "old checkpoints cannot be removed now");
        }
        Ok(())
    }

    /// The checkpoints that a job keeps, and its old checkpoints. A checkpoint is old if it is older than the newest `checkpoint.keep`, is
    /// not the best, and is not a version of a model. `None` if the job does not exist.
    async fn kept_and_old(&self, job: &JobId) -> Result<Option<(Vec<CheckpointRow>, Vec<CheckpointRow>)>> {
        let Some(row) = self.store.job(job).await? else { return Ok(None) };
        // Ranks, too, keep at least two checkpoints, because if the newest is damaged, the job continues from the previous checkpoint.
        let keep = (row.job.spec.checkpoint.keep as usize).max(2);
        let rows = self.store.checkpoints(job).await?;
        let registered = self.store.registered_checkpoints(job).await?;
        let copies = self.copies(job).await?;
        let mut count_here = 0;
        let is_kept = |row: &CheckpointRow| {
            // Only checkpoints that the server has are counted, because newer checkpoints may never arrive.
            let is_here = self.has_copy(row, copies.of(&row.id));
            count_here += usize::from(is_here);
            !is_here || count_here <= keep || row.info.best || registered.contains(&row.id)
        };
        Ok(Some(rows.into_iter().partition(is_kept)))
    }

    /// Removes the rows of the checkpoints `removed`, each given by epoch and step, and applies the records `added`.
    pub(crate) async fn change_rows(
        &self,
        job: &JobId,
        removed: Vec<(u32, u64)>,
        added: Vec<AttemptEvent>,
    ) -> Result<()> {
        if removed.is_empty() && added.is_empty() {
            return Ok(());
        }
        let change = move |row: &mut JobRow| {
            let removed = removed
                .iter()
                .map(|(epoch, step)| AttemptEvent::CheckpointRemoved { epoch: *epoch, step: *step });
            let mut events = Vec::new();
            for event in removed.chain(added.iter().cloned()) {
                events.extend(lifecycle::report(row, event, None, crate::now())?);
            }
            Ok(events)
        };
        self.events.change_job(job, Box::new(change)).await.map(drop)
    }

    /// Removes checkpoints that a job no longer keeps and that only the object store has. Ranks only remove checkpoints on the disk.
    pub(crate) async fn remove_old_in_object_store(&self, job: &JobId) -> Result<()> {
        let _guard = self.removal_lock.lock().await;
        let Some((_, mut old)) = self.kept_and_old(job).await? else { return Ok(()) };
        old.retain(|row| !self.folder(row).exists());
        self.change_rows(job, epochs_and_steps(&old), Vec::new()).await
    }
}

/// The copies of a job's checkpoints, by the checkpoint's id.
#[derive(Default)]
pub(crate) struct JobCopies(HashMap<String, Copies>);

impl JobCopies {
    pub(crate) fn of(&self, checkpoint: &str) -> &Copies {
        static NONE: Copies = Copies { holders: Vec::new(), object_store: None, is_damaged_on_server: false };
        self.0.get(checkpoint).unwrap_or(&NONE)
    }
}

fn epochs_and_steps(rows: &[CheckpointRow]) -> Vec<(u32, u64)> {
    rows.iter().map(|row| (row.info.epoch, row.info.step)).collect()
}

/// Removes folders of checkpoints and of uploads whose names are not in `kept_names`.
fn remove_others(job_dir: &Path, kept_names: &HashSet<String>) -> io::Result<()> {
    for parent in ["checkpoints", "uploads"] {
        for entry in if_exists(fs::read_dir(job_dir.join(parent)))?.into_iter().flatten() {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if parse_folder_name(&name).is_some() && !kept_names.contains(&name) {
                // Renamed first, so that a partly removed checkpoint is never visible.
                let hidden = job_dir.join(parent).join(format!(".tmp-gone-{name}"));
                fs::rename(entry.path(), &hidden)?;
                fs::remove_dir_all(&hidden)?;
            }
        }
    }
    Ok(())
}
