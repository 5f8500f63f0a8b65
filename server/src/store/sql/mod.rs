//! The queries, shared by all databases. `sqlite.rs` and `postgres.rs` each compile this folder and define the differences in their module
//! `dialect` (the driver's types, how transactions begin), so each query is written once. Both databases support `$1`, `ON CONFLICT`,
//! `RETURNING`, `FROM (VALUES ...)` with the columns `column1` and so on, and 64-bit integers for integers and booleans. sqlx's `Any` would
//! hide the types, and generic code over sqlx's traits needs a page of bounds.

mod access;
mod agents;
mod annotations;
mod attempts;
mod audit;
mod batch;
mod checkpoint_copies;
mod chunks;
pub(in crate::store) mod copy;
mod datasets;
mod edits;
mod events;
mod history;
mod ingest;
mod job_list;
mod jobs;
mod layers;
mod machines;
mod models;
mod pages;
mod panels;
mod people;
mod purge;
mod queue;
mod reads;
mod sweeps;
mod webhooks;

use super::dialect::{
    BEGIN_SNAPSHOT, BEGIN_WRITE, BY_LOG, BY_METRICS, Connection, DATABASE_BYTES, Db, DbRow, LIKE, Lock,
    SOME_METRIC_CHUNKS,
};
use crate::config::FairShare;
use crate::store::{
    AgentRow, Annotation, AnnotationPage, Appended, ArtifactMarker, AttemptRow, AuditEntry, Change, Changed,
    CheckpointRow, Claim, Claimed, Copies, Counts, Created, Delivery, EventRow, GivenPlace, GroupBy,
    GroupRow, HistogramFilter, HistogramIndex, HistogramRow, HistoryRows, Ingested, JobFilter, JobRow,
    LogFilter, LogPage, MetricChunk, MetricFilter, MetricPage, MinuteRow, NewJob, NewVersion, Occupant,
    Owned, Page, PanelsOf, PersonRow, Place, ProjectRow, QueuePlace, RecordsChange, Report, Result,
    RunRecords, SessionRow, SortBy, Store, StoredCheckpoint, SweepRow, TokenRow, VersionRow, WaitingVersion,
    WebhookRow,
};
use async_trait::async_trait;
use attempts::YIELDS;
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
    sweep::SweepState,
};
use sqlx::{Pool, Transaction};
use std::{collections::HashMap, sync::Arc};

/// A database. One connection writes, so writers queue for it and never conflict in the database. A pool of other connections reads
/// concurrently.
#[derive(Debug, Clone)]
pub struct SqlStore {
    pub(in crate::store) writer: Pool<Db>,
    pub(in crate::store) reader: Pool<Db>,
    /// Locked while the store exists, if the database's lock is a file.
    pub(in crate::store) lock: Arc<Lock>,
}

impl SqlStore {
    /// Begins a transaction that has the write lock from the start.
    async fn begin(&self) -> Result<Transaction<'static, Db>> {
        match self.writer.begin_with(BEGIN_WRITE).await {
            // The database itself ended the previous transaction (as SQLite does on a full disk), but the driver still considers the
            // transaction open. A new connection does not have this state.
            Err(sqlx::Error::InvalidSavePointStatement) => {
                self.writer.acquire().await?.close().await?;
                Ok(self.writer.begin_with(BEGIN_WRITE).await?)
            }
            other => Ok(other?),
        }
    }
}

#[async_trait]
impl Store for SqlStore {
    async fn create_job(&self, new: NewJob) -> Result<Created> {
        self.insert_job(new).await
    }
    async fn job_made_by(&self, key: &(String, String)) -> Result<Option<Job>> {
        self.read_made_before(key).await
    }
    async fn job(&self, id: &JobId) -> Result<Option<JobRow>> {
        self.read_job(id).await
    }
    async fn jobs_of(&self, ids: &[JobId]) -> Result<Vec<JobRow>> {
        self.read_jobs(ids).await
    }
    async fn settled(&self) -> Result<()> {
        Ok(self.begin().await?.rollback().await?)
    }
    async fn jobs(&self, filter: &JobFilter) -> Result<Page> {
        self.list_jobs(filter).await
    }
    async fn jobs_counted(&self, filter: &JobFilter) -> Result<u64> {
        self.count_jobs(filter).await
    }
    async fn job_groups(
        &self,
        filter: &JobFilter,
        by: &[GroupBy],
        metrics: &[SortBy],
        max_groups: usize,
    ) -> Result<Option<Vec<GroupRow>>> {
        self.group_jobs(filter, by, metrics, max_groups).await
    }
    async fn attempts(&self, job: &JobId) -> Result<Vec<Attempt>> {
        self.list_attempts(job).await
    }
    async fn places(&self, job: &JobId, attempt: u32) -> Result<Vec<Place>> {
        self.places_of(job, attempt).await
    }
    async fn history(&self, job: &Job, with_requests: bool) -> Result<HistoryRows> {
        self.read_history(job, with_requests).await
    }
    async fn waiting(&self, from: &QueuePlace) -> Result<(Vec<JobRow>, Option<QueuePlace>)> {
        self.list_waiting(from).await
    }
    async fn waiting_versions(&self) -> Result<HashMap<JobId, WaitingVersion>> {
        self.list_waiting_versions().await
    }
    async fn slots_of_shares(&self, by: FairShare) -> Result<HashMap<String, u64>> {
        self.sum_shares(by).await
    }
    async fn unfinished(&self) -> Result<Vec<Job>> {
        self.list_unfinished().await
    }
    async fn change_job(&self, id: &JobId, change: Change) -> Result<Changed> {
        self.edit_job(id, change).await
    }
    async fn change_jobs(&self, changes: &[(JobId, Change)]) -> Result<Vec<Option<Changed>>> {
        self.edit_jobs(changes).await
    }
    async fn delete_job(&self, id: &JobId) -> Result<()> {
        self.remove_job(id).await
    }
    async fn oldest_deleted(&self) -> Result<Option<JobId>> {
        self.find_deleted().await
    }
    async fn purge_deleted(&self, id: &JobId) -> Result<()> {
        self.purge_some(id).await
    }
    async fn claim_all(&self, claims: &[Claim]) -> Result<Vec<Option<Claimed>>> {
        self.make_attempts(claims).await
    }
    async fn given_place(&self, attempt: &AttemptRef, agent_id: &str) -> Result<Option<GivenPlace>> {
        self.read_given_place(attempt, agent_id).await
    }
    async fn note_own_disk(&self, attempt: &AttemptRef, agent_id: &str) -> Result<()> {
        self.write_own_disk(attempt, agent_id).await
    }
    async fn live_attempts(&self) -> Result<Vec<AttemptRow>> {
        self.list_live().await
    }
    async fn occupants(&self) -> Result<Vec<Occupant>> {
        self.list_occupants("TRUE").await
    }
    async fn yielding(&self) -> Result<Vec<Occupant>> {
        self.list_occupants(YIELDS).await
    }
    async fn acknowledged(&self, attempt: &AttemptRef, agent_id: &str) -> Result<Vec<Acknowledged>> {
        self.read_acknowledged(attempt, agent_id).await
    }
    async fn ingest(&self, reports: &[Report]) -> Result<Vec<Ingested>> {
        self.store_reports(reports).await
    }
    async fn append_records(&self, records: &RunRecords, change: RecordsChange) -> Result<Appended> {
        self.store_records(records, change).await
    }
    async fn events(&self, job: &JobId, after: u64, limit: u32) -> Result<Vec<EventRow>> {
        self.read_events(job, after, limit).await
    }
    async fn first_seq(&self, job: &JobId) -> Result<u64> {
        self.read_first_seq(job).await
    }
    async fn oldest_with_points(&self, before: Timestamp, behind: Option<&JobId>) -> Result<Option<JobId>> {
        self.find_with_points(before, behind).await
    }
    async fn remove_points(&self, job: &JobId) -> Result<bool> {
        self.remove_some_points(job).await
    }
    async fn metrics(&self, job: &JobId, filter: &MetricFilter) -> Result<MetricPage> {
        self.read_metrics(job, filter).await
    }
    async fn metric_extent(&self, job: &JobId, filter: &MetricFilter) -> Result<(u64, Option<(u64, u64)>)> {
        self.read_metric_extent(job, filter).await
    }
    async fn metric_chunks(
        &self,
        job: &JobId,
        level: u32,
        filter: &MetricFilter,
    ) -> Result<(u64, Vec<MetricChunk>)> {
        self.read_metric_chunks(job, level, filter).await
    }
    async fn newest_metric_chunks(&self, job: &JobId) -> Result<(u64, Vec<MetricChunk>)> {
        self.read_newest_metric_chunks(job).await
    }
    async fn put_metric_chunks(
        &self,
        job: &JobId,
        after: u64,
        until: u64,
        chunks: &[MetricChunk],
    ) -> Result<bool> {
        self.write_metric_chunks(job, after, until, chunks).await
    }
    async fn logs(&self, job: &JobId, filter: &LogFilter) -> Result<LogPage> {
        self.read_logs(job, filter).await
    }
    async fn rank_reports(&self, job: &JobId, attempt: u32) -> Result<Vec<(u32, RankReport)>> {
        self.read_rank_reports(job, attempt).await
    }
    async fn checkpoints(&self, job: &JobId) -> Result<Vec<CheckpointRow>> {
        self.read_checkpoints(job).await
    }
    async fn checkpoint(&self, id: &str) -> Result<Option<CheckpointRow>> {
        self.read_checkpoint(id).await
    }
    async fn checkpoints_behind(&self, id: &str, limit: u32) -> Result<Vec<CheckpointRow>> {
        self.read_checkpoints_behind(id, limit).await
    }
    async fn copies(&self, job: &JobId, object_store: &str) -> Result<HashMap<String, Copies>> {
        self.read_copies(job, object_store).await
    }
    async fn mark_damaged(&self, location: &str, id: &str) -> Result<bool> {
        self.write_damaged(location, id).await
    }
    async fn forget_damaged(&self, store: &str) -> Result<()> {
        self.forget_damage(store).await
    }
    async fn stored_checkpoint(&self, store: &str, id: &str) -> Result<Option<StoredCheckpoint>> {
        self.read_stored(store, id).await
    }
    async fn uploaded_checkpoints(&self, store: &str, limit: u32) -> Result<Vec<String>> {
        self.list_uploaded(store, limit).await
    }
    async fn abandoned_checkpoints(&self, store: &str, behind: &str, limit: u32) -> Result<Vec<String>> {
        self.list_abandoned(store, behind, limit).await
    }
    async fn put_stored_checkpoint(&self, store: &str, stored: &StoredCheckpoint) -> Result<bool> {
        self.upsert_stored(store, stored).await
    }
    async fn artifact_marker(&self, store: &str) -> Result<Option<ArtifactMarker>> {
        self.read_artifact_marker(store).await
    }
    async fn is_marker_restored(&self, marker: &str) -> Result<Option<bool>> {
        self.find_marker(marker).await
    }
    async fn replace_restored_marker(&self, restored: &str, own: &str) -> Result<()> {
        self.write_own_marker(restored, own).await
    }
    async fn put_artifact_marker(&self, store: &str, marker: &str) -> Result<()> {
        self.upsert_artifact_marker(store, marker).await
    }
    async fn forget_stored_checkpoint(&self, store: &str, id: &str) -> Result<()> {
        self.delete_stored(store, id).await
    }
    async fn datasets(&self) -> Result<Vec<Dataset>> {
        self.list_datasets().await
    }
    async fn dataset(&self, name: &str) -> Result<Option<Dataset>> {
        self.read_dataset(name).await
    }
    async fn add_dataset(&self, dataset: &Dataset) -> Result<()> {
        self.insert_dataset(dataset).await
    }
    async fn update_dataset(&self, dataset: &Dataset) -> Result<()> {
        self.replace_dataset_info(dataset).await
    }
    async fn remove_dataset(&self, name: &str) -> Result<()> {
        self.delete_dataset(name).await
    }
    async fn add_model_version(&self, new: &NewVersion) -> Result<u32> {
        self.insert_version(new).await
    }
    async fn model_versions(&self, model: Option<&str>) -> Result<Vec<VersionRow>> {
        self.list_versions(model).await
    }
    async fn registered_checkpoints(&self, job: &JobId) -> Result<Vec<String>> {
        self.list_registered(job).await
    }
    async fn set_model_alias(&self, model: &str, alias: &str, version: Option<u32>) -> Result<()> {
        self.write_alias(model, alias, version).await
    }
    async fn remove_model_version(&self, model: &str, version: u32) -> Result<()> {
        self.delete_version(model, version).await
    }
    async fn put_agents(&self, agents: &[AgentRow]) -> Result<()> {
        self.upsert_agents(agents).await
    }
    async fn remove_agent(&self, id: &str) -> Result<()> {
        self.delete_agent(id).await
    }
    async fn agents(&self) -> Result<Vec<AgentRow>> {
        self.list_agents().await
    }
    async fn agents_called(&self, name: &str, id: &str) -> Result<Vec<AgentRow>> {
        self.find_agents(name, id).await
    }
    async fn annotations(&self, seen_by: Option<&str>, behind: &str, limit: u32) -> Result<AnnotationPage> {
        self.read_annotations(seen_by, behind, limit).await
    }
    async fn count_annotations(&self, seen_by: Option<&str>) -> Result<u64> {
        self.number_of_annotations(seen_by).await
    }
    async fn annotate(
        &self,
        job: &JobId,
        notes: Option<&str>,
        tags: Option<&[String]>,
    ) -> Result<Annotation> {
        self.write_annotation(job, notes, tags).await
    }
    async fn set_priority(&self, job: &JobId, priority: i32) -> Result<()> {
        self.write_priority(job, priority).await
    }
    async fn set_project(&self, job: &JobId, project: &str) -> Result<()> {
        self.write_project(job, project).await
    }
    async fn projects(&self, seen_by: Option<&str>) -> Result<Vec<ProjectRow>> {
        self.list_projects(seen_by).await
    }
    async fn panels(&self, of: PanelsOf<'_>) -> Result<Option<Vec<Panel>>> {
        self.read_panels(of).await
    }
    async fn put_panels(&self, of: PanelsOf<'_>, panels: Option<&[Panel]>) -> Result<()> {
        self.write_panels(of, panels).await
    }
    async fn histogram_index(&self, job: &JobId) -> Result<HistogramIndex> {
        self.read_histogram_index(job).await
    }
    async fn histograms(&self, job: &JobId, filter: &HistogramFilter) -> Result<Vec<HistogramRow>> {
        self.read_histograms(job, filter).await
    }
    async fn network(&self, job: &JobId) -> Result<Option<NetworkDescription>> {
        self.read_network(job).await
    }
    async fn draining(&self) -> Result<Vec<String>> {
        self.read_draining().await
    }
    async fn set_draining(&self, agent: &str, draining: bool) -> Result<()> {
        self.write_draining(agent, draining).await
    }
    async fn add_machine_minutes(&self, minutes: &[MinuteRow]) -> Result<()> {
        self.insert_machine_minutes(minutes).await
    }
    async fn machine_minutes(&self, agent: &str, from: i64) -> Result<Vec<MinuteRow>> {
        self.read_machine_minutes(agent, from).await
    }
    async fn purge_machine_minutes(&self, before: i64) -> Result<()> {
        self.remove_machine_minutes(before).await
    }
    async fn people(&self) -> Result<Vec<PersonRow>> {
        self.list_people().await
    }
    async fn refused_identities(&self) -> Result<Vec<Identity>> {
        self.list_refused().await
    }
    async fn put_person(&self, person: &PersonRow) -> Result<()> {
        self.upsert_person(person).await
    }
    async fn remove_person(&self, person: &PersonRow, at: Timestamp) -> Result<()> {
        self.delete_person(person, at).await
    }
    async fn owned_job(&self, id: &JobId) -> Result<Option<Owned>> {
        self.read_owned_job(id).await
    }
    async fn jobs_hidden_from(&self, owner: &str) -> Result<Vec<JobId>> {
        self.list_hidden_from(owner).await
    }
    async fn owned_dataset(&self, name: &str) -> Result<Option<Owned>> {
        self.read_owned_dataset(name).await
    }
    async fn tokens(&self) -> Result<Vec<TokenRow>> {
        self.list_tokens().await
    }
    async fn put_token(&self, token: &TokenRow) -> Result<()> {
        self.upsert_token(token).await
    }
    async fn note_token_use(&self, used: &[(String, Timestamp)]) -> Result<()> {
        self.write_token_use(used).await
    }
    async fn sessions(&self, now: Timestamp) -> Result<Vec<SessionRow>> {
        self.list_sessions(now).await
    }
    async fn add_session(&self, session: &SessionRow) -> Result<()> {
        self.insert_session(session).await
    }
    async fn remove_session(&self, hash: &str) -> Result<()> {
        self.delete_session(hash).await
    }
    async fn purge_access(&self, now: Timestamp, before: Timestamp) -> Result<()> {
        self.remove_old_access(now, before).await
    }
    async fn add_audit(&self, entries: &[AuditEntry]) -> Result<()> {
        self.insert_audit(entries).await
    }
    async fn audit(
        &self,
        before: Option<&str>,
        who: &str,
        text: &str,
        limit: u32,
    ) -> Result<Vec<AuditEntry>> {
        self.read_audit(before, who, text, limit).await
    }
    async fn purge_audit(&self, before: Timestamp, keep: u32) -> Result<bool> {
        self.remove_old_audit(before, keep).await
    }
    async fn webhooks(&self) -> Result<Vec<WebhookRow>> {
        self.list_webhooks().await
    }
    async fn put_webhook(&self, row: &WebhookRow) -> Result<()> {
        self.upsert_webhook(row).await
    }
    async fn remove_webhook(&self, id: &str) -> Result<()> {
        self.delete_webhook(id).await
    }
    async fn deliveries(&self, webhook: &str, limit: u32) -> Result<Vec<Delivery>> {
        self.list_deliveries(webhook, limit).await
    }
    async fn next_deliveries(&self) -> Result<Vec<(WebhookRow, Delivery)>> {
        self.list_next_deliveries().await
    }
    async fn add_delivery(&self, delivery: &Delivery) -> Result<()> {
        self.insert_delivery(delivery).await
    }
    async fn note_attempt(&self, delivery: &Delivery, is_gone: bool) -> Result<()> {
        self.write_attempt(delivery, is_gone).await
    }
    async fn purge_deliveries(&self, before: Timestamp) -> Result<()> {
        self.remove_old_deliveries(before).await
    }
    async fn add_sweep(&self, row: &SweepRow, specs: &[JobSpec]) -> Result<bool> {
        self.insert_sweep(row, specs).await
    }
    async fn sweeps(&self) -> Result<Vec<SweepRow>> {
        self.list_sweeps().await
    }
    async fn unfinished_sweeps(&self) -> Result<Vec<SweepRow>> {
        self.list_unfinished_sweeps().await
    }
    async fn sweep(&self, id: &str) -> Result<Option<SweepRow>> {
        self.read_sweep(id).await
    }
    async fn sweep_specs(&self, id: &str) -> Result<Vec<JobSpec>> {
        self.read_sweep_specs(id).await
    }
    async fn set_sweep_state(
        &self,
        id: &str,
        state: SweepState,
        reason: Option<&str>,
        finished_at: Option<Timestamp>,
    ) -> Result<bool> {
        self.write_sweep_state(id, state, reason, finished_at).await
    }
    async fn delete_sweep(&self, id: &str) -> Result<bool> {
        self.remove_sweep(id).await
    }
    async fn trials(&self, sweep: &str) -> Result<Vec<JobRow>> {
        self.list_trials(sweep).await
    }
    async fn counts(&self) -> Result<Counts> {
        self.count().await
    }
    async fn ready(&self) -> Result<()> {
        // Only a committed write proves that the database can be written. This write leaves no row.
        let mut db = self.begin().await?;
        for statement in
            ["INSERT INTO draining (agent_id) VALUES ('')", "DELETE FROM draining WHERE agent_id = ''"]
        {
            sqlx::query(statement).execute(&mut *db).await?;
        }
        Ok(db.commit().await?)
    }
    async fn close(&self) {
        self.lock.closes();
        self.reader.close().await;
        self.writer.close().await;
    }
}
