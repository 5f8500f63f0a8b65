//! The database, behind one trait. SQLite and Postgres implement it and pass the same tests.
//!
//! `crate::lifecycle` decides how a report or a request changes a [`JobRow`]. A store reads the row, applies that function,
//! and writes row and events in one transaction.

pub mod backup;
mod backup_file;
mod cells;
pub(crate) mod error;
mod location;
mod migrations;
mod open;
mod points;
pub mod postgres;
pub(crate) mod purge;
pub(crate) mod quarantine;
mod rows;
pub mod sqlite;
mod values;

pub use error::{Result, StoreError};
pub use location::Location;

pub(crate) use rows::principal;
pub use rows::{
    AgentRow, Annotation, AnnotationPage, Appended, ArtifactMarker, AttemptRow, AuditEntry, Changed,
    CheckpointRow, Claim, Claimed, Comparison, Condition, Copies, CopyState, Counts, Created, Cursor,
    Delivery, DeliveryAttempt, EventRow, GivenPlace, GroupBy, GroupRow, GroupValue, HistogramFilter,
    HistogramIndex, HistogramRow, HistoryRows, Holder, Ingested, JobFilter, JobSort, LogFilter, LogPage,
    MetricChunk, MetricFilter, MetricPage, MinuteRow, NewJob, NewTrial, NewVersion, Occupant, Owned, Page,
    PanelsOf, PersonRow, Place, ProjectRow, QueuePlace, Report, RunRecords, SessionRow, SettingKind,
    SettingValue, SortBy, SortValue, Spread, Stored, StoredCheckpoint, SweepRow, TokenRow, VersionRow,
    WaitingVersion, Webhook, WebhookEvent, WebhookForm, WebhookRow,
};

pub use crate::lifecycle::JobRow;

use crate::{
    config::{FairShare, serve_error::ServeError},
    lifecycle::Refused,
};
use async_trait::async_trait;
use jiff::Timestamp;
use lockstep_protocol::{
    JobSpec,
    agent::{Acknowledged, AttemptRef, RankReport},
    attempt::Attempt,
    dataset::Dataset,
    job::{Job, JobId},
    network::NetworkDescription,
    panels::Panel,
    people::Identity,
    stream::EventBody,
    sweep::SweepState,
};
use sqlx::migrate::{MigrateError, Migrator};
use std::collections::HashMap;

/// Size limit of a page, over the columns of unbounded length (specifications, notes, log lines). A page ends there before its limit
/// of rows.
pub(crate) const PAGE_BYTES: usize = 4 << 20;

/// What kept a database's tables from being brought up to date.
fn migration_error(path: &str, known: &Migrator, error: MigrateError) -> ServeError {
    let path = path.to_owned();
    let known = known.iter().map(|m| m.version).max().unwrap_or(0);
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

/// A change of one job: edits the row and returns the events to store. It may be called more than once.
pub type Change = Box<dyn Fn(&mut JobRow) -> std::result::Result<Vec<EventBody>, Refused> + Send + Sync>;

/// A change of a run from elsewhere by records, of which so many were stored before.
pub type RecordsChange =
    Box<dyn Fn(&mut JobRow, u64) -> std::result::Result<Vec<EventBody>, Refused> + Send + Sync>;

/// Everything that outlives the server. Each method is one transaction; when it has returned, what it wrote is on disk.
///
/// # Errors
/// Every method may fail with [`StoreError::Unavailable`] (the database is full, busy or away; again later may help),
/// [`StoreError::Rejected`] (it never takes a value) and [`StoreError::Corrupt`] (a row is not as this version writes it). A method
/// that has failed has written nothing, unless the connection broke during the commit. What else one may fail with, its own section
/// says.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// Stores a new job as `queued` with its first event, if its dataset is registered. The same idempotency key and request give the job
    /// that was made then.
    ///
    /// # Errors
    /// [`StoreError::NoDataset`]; [`StoreError::KeyReused`]: the idempotency key came with another request before.
    async fn create_job(&self, new: NewJob) -> Result<Created>;
    /// The job that a request with this idempotency key and hash has made, if any.
    ///
    /// # Errors
    /// [`StoreError::KeyReused`]: the key came with another request.
    async fn job_made_by(&self, key: &(String, String)) -> Result<Option<Job>>;
    /// A job with what only the server knows about it; `None` when there is none or it was deleted.
    async fn job(&self, id: &JobId) -> Result<Option<JobRow>>;
    /// Those of these jobs that are there and can be read, in no order; without their notes.
    async fn jobs_of(&self, ids: &[JobId]) -> Result<Vec<JobRow>>;
    /// Waits until the writer's connection answers. A transaction whose connection broke while it was committed has been carried out or
    /// undone then: its session has given the write lock back.
    async fn settled(&self) -> Result<()>;
    /// In the order of the filter, after its cursor.
    ///
    /// # Errors
    /// [`StoreError::Cursor`]: the cursor is none of this list.
    async fn jobs(&self, filter: &JobFilter) -> Result<Page>;
    /// How many jobs a filter finds, whatever its limit and cursor are.
    async fn jobs_counted(&self, filter: &JobFilter) -> Result<u64>;
    /// The groups of all jobs that a filter finds, whatever its limit and cursor are, in no order; none when there are more than `most`.
    async fn job_groups(
        &self,
        filter: &JobFilter,
        by: &[GroupBy],
        metrics: &[SortBy],
        most: usize,
    ) -> Result<Option<Vec<GroupRow>>>;
    /// A job's attempts, in order.
    async fn attempts(&self, job: &JobId) -> Result<Vec<Attempt>>;
    /// Where the ranks of an attempt are, or were; empty when there is no such attempt.
    async fn places(&self, job: &JobId, attempt: u32) -> Result<Vec<Place>>;
    /// What a job's history is made of, next to its attempts; `with_requests`: also who asked for what.
    async fn history(&self, job: &Job, with_requests: bool) -> Result<HistoryRows>;
    /// A page of the jobs that wait for slots: those of the highest priority first, of equal ones the oldest. With where the next page
    /// begins; none after the last.
    async fn waiting(&self, from: &QueuePlace) -> Result<(Vec<JobRow>, Option<QueuePlace>)>;
    /// The version of every job that waits for slots.
    async fn waiting_versions(&self) -> Result<HashMap<JobId, WaitingVersion>>;
    /// How many slots the jobs of each owner or project have whose attempts may write.
    async fn slots_of_shares(&self, by: FairShare) -> Result<HashMap<String, u64>>;
    /// Jobs that are not over.
    async fn unfinished(&self) -> Result<Vec<Job>>;
    /// Changes a job by `change`, which is refused or done as a whole.
    ///
    /// # Errors
    /// [`StoreError::NotFound`]; [`StoreError::Refused`]: what `change` refuses; [`StoreError::NoDataset`], of a job that was over and is
    /// no longer, and [`StoreError::Refused`], where that job has registered versions.
    async fn change_job(&self, id: &JobId, change: Change) -> Result<Changed>;
    /// As [`Store::change_job`], of several jobs in one transaction: one commit for all. `None` of a job that is not there.
    ///
    /// # Errors
    /// The first job that is refused: nothing is changed then.
    async fn change_jobs(&self, changes: &[(JobId, Change)]) -> Result<Vec<Option<Changed>>>;
    /// Deletes a job that is over. It is not found from then on; its rows are removed in small steps by
    /// [`Store::purge_deleted`].
    ///
    /// # Errors
    /// [`StoreError::NotFound`]; [`StoreError::Refused`]: the job is not over, or has registered versions.
    async fn delete_job(&self, id: &JobId) -> Result<()>;
    /// The job that was deleted first, among those that still have rows.
    async fn oldest_deleted(&self) -> Result<Option<JobId>>;
    /// Removes some rows of a deleted job, in a transaction so short that other writers hardly wait.
    async fn purge_deleted(&self, id: &JobId) -> Result<()>;

    /// Claims a job: makes its next attempt, with a new fencing token. `None` when the job does not wait any more, or another
    /// claim was first.
    ///
    /// # Errors
    /// [`StoreError::NotFound`]: the job was deleted meanwhile.
    async fn claim(&self, claim: Claim) -> Result<Option<Claimed>> {
        Ok(self.claim_all(std::slice::from_ref(&claim)).await?.pop().flatten())
    }
    /// As [`Store::claim`], of several jobs in one transaction: one commit for all.
    async fn claim_all(&self, claims: &[Claim]) -> Result<Vec<Option<Claimed>>>;
    /// What an agent has of an attempt, also when that is over. `None`: an attempt with this fencing token was not given to it.
    async fn given_place(&self, attempt: &AttemptRef, agent_id: &str) -> Result<Option<GivenPlace>>;
    /// Stores that an agent keeps an attempt's checkpoints on a disk of its own.
    async fn note_own_disk(&self, attempt: &AttemptRef, agent_id: &str) -> Result<()>;
    /// The attempts that may write, on any agent.
    async fn live_attempts(&self) -> Result<Vec<AttemptRow>>;
    /// Jobs that have an attempt which may write: those of the lowest priority first, of equal ones the newest.
    async fn occupants(&self) -> Result<Vec<Occupant>>;
    /// As [`Store::occupants`], those alone whose slots somebody may count on: they end already, or may be preempted.
    async fn yielding(&self) -> Result<Vec<Occupant>>;
    /// How many records of each source of an attempt are stored, as one of its agents names them; empty when the fencing token is
    /// not the attempt's, or it was given to others.
    async fn acknowledged(&self, attempt: &AttemptRef, agent_id: &str) -> Result<Vec<Acknowledged>>;
    /// Stores reports in one transaction: events, what is acknowledged and the jobs' rows. Records stored
    /// before are skipped; one answer for each report, in order.
    async fn ingest(&self, reports: &[Report]) -> Result<Vec<Ingested>>;

    /// Stores records of a run from elsewhere: the change, and how many there are now.
    ///
    /// # Errors
    /// [`StoreError::NotFound`]; [`StoreError::Refused`]: what `change` refuses.
    async fn append_records(&self, records: &RunRecords, change: RecordsChange) -> Result<Appended>;

    /// Rows of a job's events that end after `after`, in order, at most `limit`: of the first one some events may be known.
    async fn events(&self, job: &JobId, after: u64, limit: u32) -> Result<Vec<EventRow>>;
    /// The sequence number at which a job's stream begins. Points of earlier events are in chunks alone.
    async fn first_seq(&self, job: &JobId) -> Result<u64>;
    /// A job that was over at `before` and has points among its events.
    async fn oldest_with_points(&self, before: Timestamp, behind: Option<&JobId>) -> Result<Option<JobId>>;
    /// Removes some of the points that are in chunks from a job's events, in a transaction so short that others hardly
    /// wait for it. False when there was none left.
    async fn remove_points(&self, job: &JobId) -> Result<bool>;
    /// Columns of metrics in order of their events.
    ///
    /// # Errors
    /// [`StoreError::NotFound`].
    async fn metrics(&self, job: &JobId, filter: &MetricFilter) -> Result<MetricPage>;
    /// The watermark, and the first and last step of the chunks that match.
    async fn metric_extent(&self, job: &JobId, filter: &MetricFilter) -> Result<(u64, Option<(u64, u64)>)>;
    /// The watermark, and the chunks of a level that match, by series and step; both from one snapshot. Chunks may also hold
    /// steps outside the filter's range.
    async fn metric_chunks(
        &self,
        job: &JobId,
        level: u32,
        filter: &MetricFilter,
    ) -> Result<(u64, Vec<MetricChunk>)>;
    /// The watermark, and the newest chunk of each series and level, which may still grow.
    async fn newest_metric_chunks(&self, job: &JobId) -> Result<(u64, Vec<MetricChunk>)>;
    /// Stores chunks, those that have grown in place of what they were; metric events up to `until` are in chunks then. False, and nothing is stored, when not exactly those up to `after` are now.
    ///
    /// # Errors
    /// [`StoreError::NotFound`].
    async fn put_metric_chunks(
        &self,
        job: &JobId,
        after: u64,
        until: u64,
        chunks: &[MetricChunk],
    ) -> Result<bool>;
    /// Events of kind `log` that match, in order, at most `limit`.
    async fn logs(&self, job: &JobId, filter: &LogFilter) -> Result<LogPage>;
    /// The newest report of each rank of an attempt.
    async fn rank_reports(&self, job: &JobId, attempt: u32) -> Result<Vec<(u32, RankReport)>>;

    /// A job's checkpoints, newest first.
    async fn checkpoints(&self, job: &JobId) -> Result<Vec<CheckpointRow>>;
    /// One checkpoint.
    async fn checkpoint(&self, id: &str) -> Result<Option<CheckpointRow>>;
    /// Checkpoints of all jobs behind this id, by id: at most `limit`.
    async fn checkpoints_behind(&self, id: &str, limit: u32) -> Result<Vec<CheckpointRow>>;
    /// The copies of a job's checkpoints, by the checkpoint's id; of object stores, those in the one of this address.
    async fn copies(&self, job: &JobId, object_store: &str) -> Result<HashMap<String, Copies>>;
    /// Stores that a copy of a checkpoint is damaged: in the object store of this address, or on the server's disk (`Copies::SERVER`). False when
    /// that is known, or there is no such checkpoint (any more).
    async fn mark_damaged(&self, location: &str, id: &str) -> Result<bool>;
    /// Forgets which copies in an object store were damaged: they may have been mended.
    async fn forget_damaged(&self, store: &str) -> Result<()>;
    /// What of a checkpoint is in the object store of this address.
    async fn stored_checkpoint(&self, store: &str, id: &str) -> Result<Option<StoredCheckpoint>>;
    /// Ids of checkpoints that were uploaded whole to the object store of this address: at most `limit`.
    async fn uploaded_checkpoints(&self, store: &str, limit: u32) -> Result<Vec<String>>;
    /// Ids of deleted checkpoints of which the object store of this address has objects, behind this id, by id: at most `limit`.
    async fn abandoned_checkpoints(&self, store: &str, behind: &str, limit: u32) -> Result<Vec<String>>;
    /// Stores what is in an object store, in place of what is known of it. False, and nothing is stored, when there is no such
    /// checkpoint (any more).
    async fn put_stored_checkpoint(&self, store: &str, stored: &StoredCheckpoint) -> Result<bool>;
    /// By what the object store of this address is known again; none of one that is not known.
    async fn artifact_marker(&self, store: &str) -> Result<Option<ArtifactMarker>>;
    /// Whether this marker, of any address, came with a backup. `None`: the database does not know the marker.
    async fn is_marker_restored(&self, marker: &str) -> Result<Option<bool>>;
    /// In the place of a marker that came with a backup, this database's own.
    async fn replace_restored_marker(&self, restored: &str, own: &str) -> Result<()>;
    /// Stores by what an object store is known again. One of another address that had this marker is the same store: what was there is
    /// at this address now.
    async fn put_artifact_marker(&self, store: &str, marker: &str) -> Result<()>;
    /// Forgets what was in an object store.
    async fn forget_stored_checkpoint(&self, store: &str, id: &str) -> Result<()>;

    /// By name.
    async fn datasets(&self) -> Result<Vec<Dataset>>;
    /// One dataset.
    async fn dataset(&self, name: &str) -> Result<Option<Dataset>>;
    /// Registers a dataset; refuses a name that is taken.
    ///
    /// # Errors
    /// [`StoreError::NameTaken`].
    async fn add_dataset(&self, dataset: &Dataset) -> Result<()>;
    /// Stores what a dataset's files are now.
    ///
    /// # Errors
    /// [`StoreError::NotFound`]: it was removed, or another one has its name.
    async fn update_dataset(&self, dataset: &Dataset) -> Result<()>;
    /// Removes a dataset that no job needs which is not over; its files stay.
    ///
    /// # Errors
    /// [`StoreError::NotFound`]; [`StoreError::DatasetInUse`].
    async fn remove_dataset(&self, name: &str) -> Result<()>;

    /// Registers a checkpoint as the next version of a model; the version's number.
    ///
    /// # Errors
    /// [`StoreError::NotFound`]; [`StoreError::Refused`]: the checkpoint's job is not over.
    async fn add_model_version(&self, new: &NewVersion) -> Result<u32>;
    /// The versions of a model, or of all models, by name and number.
    async fn model_versions(&self, model: Option<&str>) -> Result<Vec<VersionRow>>;
    /// Ids of a job's checkpoints that versions name.
    async fn registered_checkpoints(&self, job: &JobId) -> Result<Vec<String>>;
    /// Moves an alias of a model to a version, or removes it with `None`.
    ///
    /// # Errors
    /// [`StoreError::NotFound`]: the version, or the alias that is to be removed.
    async fn set_model_alias(&self, model: &str, alias: &str, version: Option<u32>) -> Result<()>;
    /// Removes a version; its number is not given again.
    ///
    /// # Errors
    /// [`StoreError::NotFound`], also where an alias is at the version.
    async fn remove_model_version(&self, model: &str, version: u32) -> Result<()>;

    /// Stores agents as they introduced themselves, or when they were last seen, in one transaction.
    async fn put_agents(&self, agents: &[AgentRow]) -> Result<()>;
    /// Removes an agent with what it has measured; nothing happens when there is none.
    async fn remove_agent(&self, id: &str) -> Result<()>;
    /// By name.
    async fn agents(&self) -> Result<Vec<AgentRow>>;
    /// Agents that have this name, and the one with this id.
    async fn agents_called(&self, name: &str, id: &str) -> Result<Vec<AgentRow>>;

    /// Notes and tags of jobs that have any: at most `limit` behind this id, of jobs that this person or token sees (`None` sees all).
    async fn annotations(&self, seen_by: Option<&str>, behind: &str, limit: u32) -> Result<AnnotationPage>;
    /// How many jobs have notes or tags, as somebody sees them.
    async fn count_annotations(&self, seen_by: Option<&str>) -> Result<u64>;
    /// Replaces a job's notes, its tags or both; what is `None` stays. Returns what it has now.
    async fn annotate(&self, job: &JobId, notes: Option<&str>, tags: Option<&[String]>)
    -> Result<Annotation>;
    /// Changes a job's priority, in its specification too.
    ///
    /// # Errors
    /// [`StoreError::NotFound`].
    async fn set_priority(&self, job: &JobId, priority: i32) -> Result<()>;
    /// Moves a job to another project, in its specification too.
    ///
    /// # Errors
    /// [`StoreError::NotFound`].
    async fn set_project(&self, job: &JobId, project: &str) -> Result<()>;
    /// Every project, with how many of its jobs are in each state; by name.
    async fn projects(&self, seen_by: Option<&str>) -> Result<Vec<ProjectRow>>;
    /// Panels, where there are any.
    async fn panels(&self, of: PanelsOf<'_>) -> Result<Option<Vec<Panel>>>;
    /// Stores panels in place of those that are there; with `None` there are none of its own any more.
    async fn put_panels(&self, of: PanelsOf<'_>, panels: Option<&[Panel]>) -> Result<()>;
    /// Of which layers and steps of a job there are histograms.
    async fn histogram_index(&self, job: &JobId) -> Result<HistogramIndex>;
    /// Histograms of a job by step, then in the network's order.
    async fn histograms(&self, job: &JobId, filter: &HistogramFilter) -> Result<Vec<HistogramRow>>;
    /// The layers of a job's network, where a rank has reported them.
    async fn network(&self, job: &JobId) -> Result<Option<NetworkDescription>>;
    /// Ids of drained agents: they take no new work.
    async fn draining(&self) -> Result<Vec<String>>;
    /// Drains an agent, or takes that back.
    async fn set_draining(&self, agent: &str, draining: bool) -> Result<()>;

    /// Stores means of minutes of machines, in place of those that are there.
    async fn add_machine_minutes(&self, minutes: &[MinuteRow]) -> Result<()>;
    /// A machine's minutes from this one on (counted since 1970), in order.
    async fn machine_minutes(&self, agent: &str, from: i64) -> Result<Vec<MinuteRow>>;
    /// Removes minutes before this one, of all machines.
    async fn purge_machine_minutes(&self, before: i64) -> Result<()>;

    /// Every person, by name.
    async fn people(&self) -> Result<Vec<PersonRow>>;
    /// Accounts at OpenID providers whose person was removed.
    async fn refused_identities(&self) -> Result<Vec<Identity>>;
    /// Stores a person, in place of the one with this name, and removes the person's sessions. Its account at an OpenID provider is
    /// bound to it, in place of the one that was.
    async fn put_person(&self, person: &PersonRow) -> Result<()>;
    /// Removes a person and the person's sessions, notes that its account at an OpenID provider is refused, and revokes the person's tokens.
    async fn remove_person(&self, person: &PersonRow, at: Timestamp) -> Result<()>;
    /// Whose a job is; `None` when there is none or it was deleted.
    async fn owned_job(&self, id: &JobId) -> Result<Option<Owned>>;
    /// Jobs that are private to others than this person or token.
    async fn jobs_hidden_from(&self, owner: &str) -> Result<Vec<JobId>>;
    /// Whose a dataset is.
    async fn owned_dataset(&self, name: &str) -> Result<Option<Owned>>;

    /// Every token, also those that are no longer valid, in the order in which they were made.
    async fn tokens(&self) -> Result<Vec<TokenRow>>;
    /// Stores a token, in place of the one with its id.
    async fn put_token(&self, token: &TokenRow) -> Result<()>;
    /// Stores when tokens were last used.
    async fn note_token_use(&self, used: &[(String, Timestamp)]) -> Result<()>;
    /// Every session that has not expired, the oldest first.
    async fn sessions(&self, now: Timestamp) -> Result<Vec<SessionRow>>;
    /// Stores a session.
    async fn add_session(&self, session: &SessionRow) -> Result<()>;
    /// Removes a session.
    async fn remove_session(&self, hash: &str) -> Result<()>;
    /// Removes sessions that have expired, and tokens that have not been valid since `before`; some at a time.
    async fn purge_access(&self, now: Timestamp, before: Timestamp) -> Result<()>;
    /// Adds to the audit log.
    async fn add_audit(&self, entries: &[AuditEntry]) -> Result<()>;
    /// Entries of the audit log before the entry `before`, newest first: of this person and their tokens, and with this text in what was
    /// done or in its address. An empty text means all.
    async fn audit(&self, before: Option<&str>, who: &str, text: &str, limit: u32)
    -> Result<Vec<AuditEntry>>;
    /// Removes some entries that are older than `before` or beyond the newest `keep`; false when there was none left.
    async fn purge_audit(&self, before: Timestamp, keep: u32) -> Result<bool>;

    /// Every webhook, the first made first.
    async fn webhooks(&self) -> Result<Vec<WebhookRow>>;
    /// Stores a webhook, in place of the one with its id.
    async fn put_webhook(&self, row: &WebhookRow) -> Result<()>;
    /// Removes a webhook with its messages; nothing happens when there is none.
    async fn remove_webhook(&self, id: &str) -> Result<()>;
    /// The newest messages of a webhook, newest first: at most `limit`.
    async fn deliveries(&self, webhook: &str, limit: u32) -> Result<Vec<Delivery>>;
    /// Of each enabled webhook, the message whose next attempt is due first.
    async fn next_deliveries(&self) -> Result<Vec<(WebhookRow, Delivery)>>;
    /// Stores a message that belongs to no job. Messages about jobs are stored with the moves of the jobs.
    async fn add_delivery(&self, delivery: &Delivery) -> Result<()>;
    /// Stores the attempts of a message and when the next one is due, and disables its webhook where the receiver is gone. Of the
    /// webhook's messages without a next attempt, the newest stay. Nothing happens to a message that was removed.
    async fn note_attempt(&self, delivery: &Delivery, is_gone: bool) -> Result<()>;
    /// Removes messages that were made before this time.
    async fn purge_deliveries(&self, before: Timestamp) -> Result<()>;

    /// Stores a new sweep, of which no trial has started, with the checked specifications of its trials.
    async fn add_sweep(&self, row: &SweepRow, specs: &[JobSpec]) -> Result<()>;
    /// Every sweep, newest first.
    async fn sweeps(&self) -> Result<Vec<SweepRow>>;
    /// Sweeps that are not over, oldest first.
    async fn unfinished_sweeps(&self) -> Result<Vec<SweepRow>>;
    /// One sweep.
    async fn sweep(&self, id: &str) -> Result<Option<SweepRow>>;
    /// The specifications of a sweep's trials, in the order in which they start; none if there is no such sweep.
    async fn sweep_specs(&self, id: &str) -> Result<Vec<JobSpec>>;
    /// Stores a sweep's state, why the server chose it, and when it was over if it is. False, and nothing is stored, when there is no
    /// such sweep, it is over, or it is being cancelled and this is another state.
    async fn set_sweep_state(
        &self,
        id: &str,
        state: SweepState,
        reason: Option<&str>,
        finished_at: Option<Timestamp>,
    ) -> Result<bool>;
    /// The jobs of a sweep that are there, by their numbers; without their notes.
    async fn trials(&self, sweep: &str) -> Result<Vec<JobRow>>;

    /// Numbers for `/metrics`.
    async fn counts(&self) -> Result<Counts>;
    /// Whether the database can be written now.
    async fn ready(&self) -> Result<()>;
    /// Writes out what is left and closes.
    async fn close(&self);
}
