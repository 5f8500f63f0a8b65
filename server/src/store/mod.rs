//! The database, behind the trait [`Store`]. The implementations for SQLite and Postgres pass the same tests.
//!
//! `crate::lifecycle` decides how a report or a request changes a [`JobRow`]. A store reads the row, applies that function,
//! and writes row and events in one transaction.

pub mod backup;
mod backup_file;
mod cells;
pub(crate) mod error;
mod location;
mod migrations;
mod points;
pub mod postgres;
pub(crate) mod purge;
mod rows;
pub mod sqlite;
pub(crate) mod unreadable;
mod values;

pub use crate::lifecycle::JobRow;
pub use error::{Result, StoreError};
pub use location::Location;
pub use rows::*;

use crate::{
    config::{FairShare, serve_error::ServeError},
    lifecycle::ChangeResult,
};
use async_trait::async_trait;
use jiff::Timestamp;
use lockstep_protocol::{
    JobSpec,
    access::AuditEntry,
    agent::{Acknowledged, AttemptRef, RankReport},
    attempt::Attempt,
    dataset::Dataset,
    job::{Job, JobId},
    network::NetworkDescription,
    panels::Panel,
    people::Identity,
    sweep::SweepState,
};
use sqlx::migrate::{MigrateError, Migrator};
use std::collections::HashMap;

/// Size limit of a page in bytes, over the columns of unbounded length (specifications, notes, log lines). A page that reaches this size
/// ends before its limit of rows.
pub(crate) const PAGE_BYTES: usize = 4 << 20;

/// Converts an error of a migration.
fn migration_error(path: &str, known: &Migrator, error: MigrateError) -> ServeError {
    let path = path.to_owned();
    let known = migrations::newest(known);
    match error {
        MigrateError::VersionMissing(found) if found > known => {
            ServeError::DatabaseTooNew { path, found, known }
        }
        MigrateError::Dirty(version) => ServeError::DatabaseHalfMigrated { path, version },
        MigrateError::VersionMismatch(version) | MigrateError::VersionMissing(version) => {
            ServeError::DatabaseOfAnotherBuild { path, version }
        }
        other => ServeError::Database { path, detail: other.to_string() },
    }
}

/// A change of one job: edits the row and returns the events to store. The store may call the function more than once.
pub type Change = Box<dyn Fn(&mut JobRow) -> ChangeResult + Send + Sync>;

/// A change of a run from elsewhere by records. The second argument is the number of these records that are already stored.
pub type RecordsChange = Box<dyn Fn(&mut JobRow, u64) -> ChangeResult + Send + Sync>;

/// Declares the trait. Each database implements each method by its own method of the same name (`sql/`).
macro_rules! store {
    (
        $(#[$about:meta])*
        pub trait Store {
            $(
                $(#[$doc:meta])*
                async fn $name:ident(&self $(, $arg:ident: $type:ty)* $(,)?) $(-> $result:ty)?;
            )*
        }
    ) => {
        $(#[$about])*
        #[async_trait]
        pub trait Store: Send + Sync + 'static {
            $(
                $(#[$doc])*
                async fn $name(&self $(, $arg: $type)*) $(-> $result)?;
            )*
        }

        #[async_trait]
        impl Store for sqlite::SqliteStore {
            $(async fn $name(&self $(, $arg: $type)*) $(-> $result)? {
                sqlite::SqliteStore::$name(self $(, $arg)*).await
            })*
        }

        #[async_trait]
        impl Store for postgres::PostgresStore {
            $(async fn $name(&self $(, $arg: $type)*) $(-> $result)? {
                postgres::PostgresStore::$name(self $(, $arg)*).await
            })*
        }
    };
}

store! {
/// Everything that outlives the server. Each method is one transaction, whose writes are on disk when the method returns.
///
/// # Errors
/// Every method may fail with [`StoreError::Unavailable`] (the database is full, busy or unreachable; a later attempt may succeed),
/// [`StoreError::Rejected`] (the database never accepts a value) and [`StoreError::Corrupt`] (this version of Lockstep cannot read a stored value). A method
/// that fails has written nothing, unless the connection broke during the commit. Further errors are listed at each method.
pub trait Store {
    /// Stores a new job as `queued` with its first event, if its dataset is registered. If the same request was made with the same
    /// idempotency key before, returns that request's job.
    ///
    /// # Errors
    /// [`StoreError::DatasetRemoved`]; [`StoreError::KeyReused`]: the idempotency key was used with another request before.
    async fn create_job(&self, new: NewJob) -> Result<CreateResult>;
    /// The job that a request with this idempotency key and hash has made.
    ///
    /// # Errors
    /// [`StoreError::KeyReused`]: the key was used with another request.
    async fn job_by_idempotency_key(&self, key: &(String, String)) -> Result<Option<Job>>;
    /// A job, including the fields that only the server sees; `None` if it does not exist or was deleted.
    async fn job(&self, id: &JobId) -> Result<Option<JobRow>>;
    /// The given jobs without their notes. Jobs that do not exist or cannot be read are left out.
    async fn jobs_by_id(&self, ids: &[JobId]) -> Result<HashMap<JobId, JobRow>>;
    /// Waits until the writer's connection responds. Earlier transactions whose connection broke during the commit have then been committed
    /// or rolled back, because their sessions have released the write lock.
    async fn wait_for_writer(&self) -> Result<()>;
    /// A page of the jobs that match a filter, in its order, after its cursor.
    ///
    /// # Errors
    /// [`StoreError::Cursor`]: the cursor does not belong to this list.
    async fn jobs(&self, filter: &JobFilter) -> Result<Page>;
    /// The number of jobs that match a filter, regardless of its limit and cursor.
    async fn count_jobs(&self, filter: &JobFilter) -> Result<u64>;
    /// The groups of all jobs that match a filter, regardless of its limit and cursor, in no order; `None` if there are more than
    /// `max_groups`.
    async fn job_groups(
        &self,
        filter: &JobFilter,
        criteria: &[GroupBy],
        metrics: &[SortBy],
        max_groups: usize,
    ) -> Result<Option<Vec<GroupRow>>>;
    /// A job's attempts, the oldest first.
    async fn attempts(&self, job: &JobId) -> Result<Vec<Attempt>>;
    /// The places of an attempt's ranks; empty if there is no such attempt.
    async fn places(&self, job: &JobId, attempt: u32) -> Result<Vec<Place>>;
    /// A job's changes of state, alerts and forks. `with_requests`: including requests about the job from the audit log.
    async fn history(&self, job: &Job, with_requests: bool) -> Result<HistoryRows>;
    /// The fingerprint of every job that waits for slots, by job.
    async fn waiting_fingerprints(&self) -> Result<HashMap<JobId, WaitingFingerprint>>;
    /// The use of slots by each owner or project: the slots of jobs with an attempt that may write, and the newest of the last 100 attempts.
    async fn slots_of_shares(&self, fair_share: FairShare) -> Result<HashMap<String, ShareUse>>;
    /// All unfinished jobs.
    async fn unfinished_jobs(&self) -> Result<Vec<Job>>;
    /// Applies changes to jobs in order, all or none. Several changes may be for one job. Returns `None` for a job that does not exist.
    ///
    /// # Errors
    /// [`StoreError::Refused`]: a change refuses. If a change resumes a job that had ended: [`StoreError::DatasetRemoved`], and
    /// [`StoreError::Refused`] if the job has registered versions.
    async fn change_jobs(&self, changes: &[(JobId, Change)]) -> Result<Vec<Option<ChangedJob>>>;
    /// Deletes a job that has ended. The job is no longer found; [`Store::purge_some_rows`] removes its rows in small steps.
    ///
    /// # Errors
    /// [`StoreError::NotFound`]; [`StoreError::Refused`]: the job has not ended, has registered versions, or is a trial of an unfinished
    /// sweep.
    async fn delete_job(&self, id: &JobId) -> Result<()>;
    /// The job that was deleted first among the deleted jobs that still have rows.
    async fn oldest_deleted_job(&self) -> Result<Option<JobId>>;
    /// Removes some rows of a deleted job in a short transaction, so that other writers hardly wait. The last call removes the job's row,
    /// and [`Store::oldest_deleted_job`] then returns another job.
    async fn purge_some_rows(&self, id: &JobId) -> Result<()>;

    /// Claims jobs in one transaction: creates each job's next attempt, with a new fencing token. Returns `None` for a job that no longer
    /// waits, or that an earlier claim has taken.
    ///
    /// # Errors
    /// [`StoreError::NotFound`]: a job was deleted meanwhile.
    async fn claim_jobs(&self, claims: &[Claim]) -> Result<Vec<Option<ClaimedAttempt>>>;
    /// An agent's part of an attempt, which may have ended. `None`: the agent was not given an attempt with this fencing token.
    async fn agent_place(&self, attempt: &AttemptRef, agent_id: &str) -> Result<Option<AgentPlace>>;
    /// Records that an agent keeps an attempt's checkpoints on its own disk, not the server's.
    async fn note_own_disk(&self, attempt: &AttemptRef, agent_id: &str) -> Result<()>;
    /// All attempts that may write.
    async fn live_attempts(&self) -> Result<Vec<AttemptRow>>;
    /// Jobs with an attempt that may write whose slots may become free for other jobs, because the jobs are ending or may be preempted. By
    /// ascending priority, then the newest first.
    async fn yielding_jobs(&self) -> Result<Vec<Occupant>>;
    /// For each source of an attempt, the number of stored records. The sources are named from the view of the agent: `Source::Agent` is
    /// this agent. Empty if the fencing token is not the attempt's, or the agent has no rank of the attempt.
    async fn acknowledged_records(&self, attempt: &AttemptRef, agent_id: &str) -> Result<Vec<Acknowledged>>;
    /// Stores reports in one transaction: their events, the numbers of acknowledged records, and the jobs' rows. Records that were stored
    /// before are skipped. Returns one result for each report, in order.
    async fn ingest(&self, reports: &[Report]) -> Result<Vec<IngestResult>>;

    /// Stores records of a run from elsewhere by applying `change`.
    ///
    /// # Errors
    /// [`StoreError::NotFound`]; [`StoreError::Refused`]: `change` refuses.
    async fn append_records(&self, records: &RunRecords, change: RecordsChange) -> Result<AppendResult>;

    /// At most `limit` rows of a job's events after number `after`, in order. The first row may also contain earlier events.
    async fn events(&self, job: &JobId, after: u64, limit: u32) -> Result<Vec<EventRow>>;
    /// The sequence number at which a job's stream begins. Points of earlier events are only in chunks.
    async fn first_seq(&self, job: &JobId) -> Result<u64>;
    /// The oldest job that had ended by the time `ended_before`, has points among its events, and was submitted after the job `after_job`.
    async fn oldest_job_with_points(
        &self,
        ended_before: Timestamp,
        after_job: Option<&JobId>,
    ) -> Result<Option<JobId>>;
    /// Removes some points that are in chunks from a job's events, in a short transaction, so that other writers hardly wait. Returns
    /// false if none were left.
    async fn remove_points(&self, job: &JobId) -> Result<bool>;
    /// Columns of metrics, in the order of their events.
    ///
    /// # Errors
    /// [`StoreError::NotFound`].
    async fn metrics(&self, job: &JobId, filter: &MetricFilter) -> Result<MetricPage>;
    /// The watermark, and the first and last step of the matching chunks.
    async fn step_range_of_chunks(&self, job: &JobId, filter: &MetricFilter) -> Result<(u64, Option<(u64, u64)>)>;
    /// The watermark, and the matching chunks of a level, by series and step; both from one snapshot. Chunks may also contain
    /// steps outside the filter's range.
    async fn metric_chunks(
        &self,
        job: &JobId,
        level: u32,
        filter: &MetricFilter,
    ) -> Result<(u64, Vec<MetricChunk>)>;
    /// The watermark, and the newest chunk of each series and level, to which points may be added.
    async fn newest_metric_chunks(&self, job: &JobId) -> Result<(u64, Vec<MetricChunk>)>;
    /// Stores chunks and changes the watermark. Grown chunks replace their earlier content. Returns false and stores nothing if the
    /// watermark is not `old_watermark`.
    ///
    /// # Errors
    /// [`StoreError::NotFound`].
    async fn put_metric_chunks(
        &self,
        job: &JobId,
        old_watermark: u64,
        new_watermark: u64,
        chunks: &[MetricChunk],
    ) -> Result<bool>;
    /// At most `limit` matching events of kind `log`, in order.
    async fn logs(&self, job: &JobId, filter: &LogFilter) -> Result<LogPage>;
    /// For those of the jobs that were validated on training pictures of their initial weights: the sentence of their log that says so.
    async fn trained_validation(&self, jobs: &[JobId]) -> Result<HashMap<JobId, String>>;
    /// The newest report of each rank of an attempt.
    async fn rank_reports(&self, job: &JobId, attempt: u32) -> Result<Vec<(u32, RankReport)>>;

    /// A job's checkpoints, newest first.
    async fn checkpoints(&self, job: &JobId) -> Result<Vec<CheckpointRow>>;
    async fn checkpoint(&self, id: &str) -> Result<Option<CheckpointRow>>;
    /// At most `limit` checkpoints of all jobs after this id, by id.
    async fn checkpoints_after(&self, id: &str, limit: u32) -> Result<Vec<CheckpointRow>>;
    /// The copies of a job's checkpoints, by checkpoint id. Only the object store at the address `object_store` is considered.
    async fn copies(&self, job: &JobId, object_store: &str) -> Result<HashMap<String, Copies>>;
    /// Records that a copy of a checkpoint is damaged. `location` is the address of an object store, or `Copies::SERVER` for the server's
    /// disk. Returns false if the damage was already recorded or the checkpoint does not exist.
    async fn mark_damaged(&self, location: &str, id: &str) -> Result<bool>;
    /// Removes the damage marks of all copies in an object store, because the copies may have been repaired.
    async fn clear_damage_marks(&self, object_store: &str) -> Result<()>;
    /// The record of a checkpoint in the object store at this address.
    async fn stored_checkpoint(&self, object_store: &str, id: &str) -> Result<Option<StoredCheckpoint>>;
    /// Ids of at most `limit` checkpoints that were completely uploaded to the object store at this address.
    async fn uploaded_checkpoints(&self, object_store: &str, limit: u32) -> Result<Vec<String>>;
    /// Ids of at most `limit` deleted checkpoints that still have objects in the object store at this address, in order. Only ids greater
    /// than `after`.
    async fn abandoned_checkpoints(
        &self,
        object_store: &str,
        after: &str,
        limit: u32,
    ) -> Result<Vec<String>>;
    /// Stores or replaces the record of a checkpoint in an object store. Returns false and stores nothing if the checkpoint does not
    /// exist.
    async fn put_stored_checkpoint(&self, object_store: &str, stored: &StoredCheckpoint) -> Result<bool>;
    /// The marker of the object store at this address; `None` if the store is unknown.
    async fn object_store_marker(&self, object_store: &str) -> Result<Option<ObjectStoreMarker>>;
    /// Whether this marker, at any address, was restored from a backup. `None`: the marker is unknown.
    async fn is_marker_restored(&self, marker: &str) -> Result<Option<bool>>;
    /// Replaces the marker `restored`, which was restored from a backup, with the new marker `own` of this database.
    async fn replace_restored_marker(&self, restored: &str, own: &str) -> Result<()>;
    /// Stores the marker of an object store. If another address has the same marker, the store has moved, and its copies are assigned to
    /// the new address.
    async fn put_object_store_marker(&self, object_store: &str, marker: &str) -> Result<()>;
    /// Deletes the record of a copy of a checkpoint. For `Copies::SERVER`, which only has records of damaged copies, this removes the damage
    /// mark.
    async fn forget_copy(&self, location: &str, id: &str) -> Result<()>;

    /// All datasets, by name.
    async fn datasets(&self) -> Result<Vec<Dataset>>;
    async fn dataset(&self, name: &str) -> Result<Option<Dataset>>;
    /// Registers a dataset.
    ///
    /// # Errors
    /// [`StoreError::NameTaken`].
    async fn add_dataset(&self, dataset: &Dataset) -> Result<()>;
    /// Replaces the stored information about a dataset's files.
    ///
    /// # Errors
    /// [`StoreError::NotFound`]: the dataset was removed, or another dataset has taken its name.
    async fn update_dataset(&self, dataset: &Dataset) -> Result<()>;
    /// Removes a dataset that no unfinished job needs. The dataset's files remain.
    ///
    /// # Errors
    /// [`StoreError::NotFound`]; [`StoreError::DatasetInUse`].
    async fn remove_dataset(&self, name: &str) -> Result<()>;

    /// Registers a checkpoint as the next version of a model. Returns the version's number.
    ///
    /// # Errors
    /// [`StoreError::NotFound`]; [`StoreError::Refused`]: the checkpoint's job has not ended, or the maximum number of versions is reached.
    async fn add_model_version(&self, new: &NewVersion) -> Result<u32>;
    /// The versions of a model, or of all models, by name and number.
    async fn model_versions(&self, model: Option<&str>) -> Result<Vec<VersionRow>>;
    /// Ids of a job's checkpoints that are registered as versions.
    async fn registered_checkpoints(&self, job: &JobId) -> Result<Vec<String>>;
    /// Moves an alias of a model to a version, or removes it with `None`.
    ///
    /// # Errors
    /// [`StoreError::NotFound`]: there is no such version, or no such alias to remove.
    async fn set_model_alias(&self, model: &str, alias: &str, version: Option<u32>) -> Result<()>;
    /// Removes a version. Its number is not reused.
    ///
    /// # Errors
    /// [`StoreError::NotFound`]: there is no such version, or an alias points to it.
    async fn remove_model_version(&self, model: &str, version: u32) -> Result<()>;

    /// Stores or replaces agents, in one transaction.
    async fn put_agents(&self, agents: &[AgentRow]) -> Result<()>;
    /// Removes an agent and its measurements. Does nothing if there is no such agent.
    async fn remove_agent(&self, id: &str) -> Result<()>;
    /// All agents, by name.
    async fn agents(&self) -> Result<Vec<AgentRow>>;
    /// The agents with this name, and the agent with this id.
    async fn agents_by_name_or_id(&self, name: &str, id: &str) -> Result<Vec<AgentRow>>;

    /// Notes and tags of at most `limit` annotated jobs after the id `after`. Only jobs that the person or token `seen_by` sees (`None`:
    /// all).
    async fn annotations(&self, seen_by: Option<&str>, after: &str, limit: u32) -> Result<AnnotationPage>;
    /// The number of annotated jobs that the person or token `seen_by` sees (`None`: all).
    async fn count_annotations(&self, seen_by: Option<&str>) -> Result<u64>;
    /// Replaces a job's notes, tags or both; `None` leaves them unchanged. Returns the new notes and tags.
    async fn annotate(&self, job: &JobId, notes: Option<&str>, tags: Option<&[String]>)
    -> Result<Annotation>;
    /// Changes a job's priority, also in its specification.
    ///
    /// # Errors
    /// [`StoreError::NotFound`].
    async fn set_priority(&self, job: &JobId, priority: i32) -> Result<()>;
    /// Moves a job to another project, also in its specification.
    ///
    /// # Errors
    /// [`StoreError::NotFound`].
    async fn set_project(&self, job: &JobId, project: &str) -> Result<()>;
    /// All projects with the numbers of their jobs in each state, by name. Only jobs that the person or token `seen_by` sees (`None`: all).
    async fn projects(&self, seen_by: Option<&str>) -> Result<Vec<Project>>;
    /// The panels of a job or project; `None` if none are stored.
    async fn panels(&self, of: PanelsOf<'_>) -> Result<Option<Vec<Panel>>>;
    /// Replaces the panels of a job or project, or removes them with `None`.
    async fn put_panels(&self, of: PanelsOf<'_>, panels: Option<&[Panel]>) -> Result<()>;
    /// The layers and steps of a job that have histograms.
    async fn histogram_index(&self, job: &JobId) -> Result<HistogramIndex>;
    /// Matching histograms of a job, by step, then in the network's order.
    async fn histograms(&self, job: &JobId, filter: &HistogramFilter) -> Result<Vec<Histogram>>;
    /// The layers of a job's network; `None` if no rank has reported them.
    async fn network(&self, job: &JobId) -> Result<Option<NetworkDescription>>;
    /// Ids of drained agents, which get no new work.
    async fn draining_agents(&self) -> Result<Vec<String>>;
    /// Drains an agent, or undrains it.
    async fn set_draining(&self, agent: &str, draining: bool) -> Result<()>;

    /// Stores or replaces machines' means of minutes.
    async fn add_machine_minutes(&self, minutes: &[MinuteRow]) -> Result<()>;
    /// A machine's means of minutes from the minute `from` on (since 1970), in order.
    async fn machine_minutes(&self, agent: &str, from: i64) -> Result<Vec<MinuteRow>>;
    /// Removes the means of minutes before the minute `before` (since 1970), for all machines.
    async fn purge_machine_minutes(&self, before: i64) -> Result<()>;

    /// All people, by name.
    async fn people(&self) -> Result<Vec<PersonRow>>;
    /// Accounts at OpenID providers whose person was removed.
    async fn refused_identities(&self) -> Result<Vec<Identity>>;
    /// Stores or replaces a person, and removes the person's sessions. The binding to an account at an OpenID provider is replaced too.
    async fn put_person(&self, person: &PersonRow) -> Result<()>;
    /// Removes a person and the person's sessions, marks the person's account at an OpenID provider as refused, and revokes the person's
    /// tokens.
    async fn remove_person(&self, person: &PersonRow, at: Timestamp) -> Result<()>;
    /// The owner of a job; `None` if it does not exist or was deleted.
    async fn job_ownership(&self, id: &JobId) -> Result<Option<Ownership>>;
    /// Private jobs of everybody except this person or token.
    async fn jobs_hidden_from(&self, owner: &str) -> Result<Vec<JobId>>;
    /// The owner of a dataset; `None` if it does not exist.
    async fn dataset_ownership(&self, name: &str) -> Result<Option<Ownership>>;

    /// All tokens, including invalid tokens, the oldest first.
    async fn tokens(&self) -> Result<Vec<TokenRow>>;
    /// Stores or replaces a token.
    async fn put_token(&self, token: &TokenRow) -> Result<()>;
    /// Stores the times at which tokens were last used.
    async fn note_token_use(&self, used: &[(String, Timestamp)]) -> Result<()>;
    /// All sessions that have not expired, the oldest first.
    async fn sessions(&self, now: Timestamp) -> Result<Vec<SessionRow>>;
    async fn add_session(&self, session: &SessionRow) -> Result<()>;
    async fn remove_session(&self, hash: &str) -> Result<()>;
    /// Removes some sessions that have expired by `now`, and some tokens that became invalid before `tokens_before`.
    async fn purge_sessions_and_tokens(&self, now: Timestamp, tokens_before: Timestamp) -> Result<()>;
    /// Adds entries to the audit log.
    async fn add_audit_entries(&self, entries: &[AuditEntry]) -> Result<()>;
    /// At most `limit` entries of the audit log before the entry `before`, newest first. `who`: only entries of this person and the
    /// person's tokens. `text`: only entries whose action or object contains this text. An empty string matches all.
    async fn audit_entries(&self, before: Option<&str>, who: &str, text: &str, limit: u32)
    -> Result<Vec<AuditEntry>>;
    /// Whether the audit log has a request with this action and object that succeeded.
    async fn has_audit_entry(&self, action: &str, object: &str) -> Result<bool>;
    /// Removes some entries that are older than `before` or not among the newest `keep`. Returns false if none were left.
    async fn purge_audit_entries(&self, before: Timestamp, keep: u32) -> Result<bool>;

    /// All webhooks, the oldest first.
    async fn webhooks(&self) -> Result<Vec<WebhookRow>>;
    /// Stores or replaces a webhook.
    async fn put_webhook(&self, row: &WebhookRow) -> Result<()>;
    /// Removes a webhook and its messages. Does nothing if there is no such webhook.
    async fn remove_webhook(&self, id: &str) -> Result<()>;
    /// At most `limit` messages of a webhook, newest first.
    async fn deliveries(&self, webhook: &str, limit: u32) -> Result<Vec<Delivery>>;
    /// For each enabled webhook, the message whose next attempt is due first.
    async fn next_deliveries(&self) -> Result<Vec<(WebhookRow, Delivery)>>;
    /// Stores a message that belongs to no job. Messages about a job are stored when its state changes.
    async fn add_delivery(&self, delivery: &Delivery) -> Result<()>;
    /// Stores the attempts of a message and the time of its next attempt. `is_gone`: also disables the webhook. Of the webhook's messages
    /// without a next attempt, only the newest are kept. Has no effect on a message that was removed.
    async fn note_delivery_attempt(&self, delivery: &Delivery, is_gone: bool) -> Result<()>;
    /// Removes messages that were created before this time.
    async fn purge_deliveries(&self, before: Timestamp) -> Result<()>;

    /// Stores a new sweep, of which no trial has started, with the checked specifications of its trials. Returns false, and changes
    /// nothing, if a sweep with the same id exists.
    async fn add_sweep(&self, row: &SweepRow, specs: &[JobSpec]) -> Result<bool>;
    /// All sweeps, newest first.
    async fn sweeps(&self) -> Result<Vec<SweepRow>>;
    /// Unfinished sweeps, oldest first.
    async fn unfinished_sweeps(&self) -> Result<Vec<SweepRow>>;
    /// The names of the sweeps whose waiting trials must not start, by id: paused sweeps, and cancelled sweeps until their trials have ended.
    async fn paused_sweeps(&self) -> Result<HashMap<String, String>>;
    async fn sweep(&self, id: &str) -> Result<Option<SweepRow>>;
    /// The specifications of a sweep's trials, in the order in which they start; none if there is no such sweep.
    async fn sweep_specs(&self, id: &str) -> Result<Vec<JobSpec>>;
    /// Stores a sweep's state, the reason, and the time of its end if it has ended. Returns false and stores nothing if there is no
    /// such sweep, the sweep has ended, or the sweep is being cancelled and `state` is another state.
    async fn set_sweep_state(
        &self,
        id: &str,
        state: SweepState,
        reason: Option<&str>,
        finished_at: Option<Timestamp>,
    ) -> Result<bool>;
    /// Deletes a sweep that has ended. Its jobs stay, without a sweep. Returns false and changes nothing if there is no such sweep, or if
    /// it has not ended.
    async fn delete_sweep(&self, id: &str) -> Result<bool>;
    /// The jobs of a sweep that exist, without their notes, by their trials' numbers.
    async fn trials(&self, sweep: &str) -> Result<Vec<JobRow>>;

    /// Counts for `/metrics`.
    async fn counts(&self) -> Result<Counts>;
    /// Checks that the database can be written.
    async fn check_writable(&self) -> Result<()>;
    /// Closes all connections to the database.
    async fn close(&self);
}
}

impl dyn Store + '_ {
    /// Like [`Store::change_jobs`], for one job.
    ///
    /// # Errors
    /// Errors of [`Store::change_jobs`]; [`StoreError::NotFound`].
    pub async fn change_job(&self, id: &JobId, change: Change) -> Result<ChangedJob> {
        let changed = self.change_jobs(&[(id.clone(), change)]).await?.pop().flatten();
        changed.ok_or(StoreError::NotFound("job"))
    }

    /// Like [`Store::claim_jobs`], for one job.
    pub async fn claim(&self, claim: Claim) -> Result<Option<ClaimedAttempt>> {
        Ok(self.claim_jobs(std::slice::from_ref(&claim)).await?.pop().flatten())
    }
}
