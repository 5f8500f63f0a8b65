//! Ingest: reports of agents are stored, then published, then acknowledged. A transaction stores all reports that wait when it begins, so
//! under load, transactions get larger, but the queue does not get longer.

pub(crate) mod run_files;
pub(crate) mod runs;

use crate::{
    agents::inbox::{Queue, QueueItem},
    checkpoints::object_store_sync,
    scheduler::{Scheduler, dispatch},
    store::{ChangedJob, EventRow, IngestResult, Report, Result},
    util::{failure_log::FailureLog, lock},
};
use jiff::Timestamp;
use lockstep_protocol::{
    agent::{AttemptEvent, Ending, ToAgent},
    backoff::Backoff,
    job::JobId,
};
use std::{
    collections::HashSet,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

/// Size of a batch, in bytes, from which on no report is added. Reports are published only after the whole batch is stored.
const MAX_BATCH_BYTES: usize = 4 << 20;

/// Stores reports, publishes the stored changes, and acknowledges the reports to agents. Runs until dropped.
pub(crate) async fn run(scheduler: Arc<Scheduler>, mut queue: Queue) {
    while let Some(first) = queue.recv().await {
        let mut batch = vec![first];
        let size = |item: &QueueItem| match item {
            QueueItem::Report { reservation, .. } => reservation.bytes,
            QueueItem::Flush(_) => 0,
        };
        let mut bytes = size(&batch[0]);
        while bytes < MAX_BATCH_BYTES
            && let Ok(item) = queue.try_recv()
        {
            bytes += size(&item);
            batch.push(item);
        }
        store_batch(&scheduler, batch).await;
    }
}

async fn store_batch(scheduler: &Scheduler, batch: Vec<QueueItem>) {
    let Scheduler { events, agents, checkpoints, .. } = scheduler;
    let mut reports = Vec::with_capacity(batch.len());
    let mut senders = Vec::with_capacity(batch.len());
    let mut flushes = Vec::new();
    // Dropped, which frees the queue's space, when all reports are stored.
    let mut reservations = Vec::with_capacity(batch.len());
    for item in batch {
        match item {
            QueueItem::Report { agent, connection, mut report, reservation } => {
                if connection.lacks_records_of(&report.attempt) {
                    continue;
                }
                if let Err(error) = checkpoints.ignore_removals_of_kept_checkpoints(&mut report).await {
                    let job = &report.attempt.job;
                    let why = format!("the list of the checkpoints of job {job} cannot be read: {error}");
                    agents.refusals.note_disconnection(&agent, &why);
                    connection.close_for(&report.attempt);
                    continue;
                }
                senders.push((agent, connection, report.attempt.clone(), ReportSummary::of(&report)));
                reservations.push(reservation);
                reports.push(*report);
            }
            QueueItem::Flush(done) => flushes.push(done),
        }
    }
    let answers =
        if reports.is_empty() { Some((Vec::new(), false)) } else { store_all(scheduler, reports).await };
    let Some((answers, has_retried)) = answers else { return };
    if has_retried {
        catch_up(scheduler, senders.iter().map(|(_, _, attempt, _)| &attempt.job).collect()).await;
    }
    for ((agent, connection, attempt, summary), answer) in senders.into_iter().zip(answers) {
        if summary.ending.is_some() && !matches!(answer, IngestResult::Gap { .. }) {
            agents.leases.note_ranks_ended(&agent, &attempt);
        }
        match answer {
            IngestResult::Stored { mut acknowledged, changed } => {
                if let Some(changed) = changed {
                    let count = changed.events.iter().map(EventRow::count).sum();
                    events.stored_events.fetch_add(count, Ordering::Relaxed);
                    events.reported_steps.fetch_add(summary.steps, Ordering::Relaxed);
                    if let Some(at) = summary.first_line_at {
                        let lag = crate::now().duration_since(at);
                        // Negative if the clock of the rank's machine is ahead.
                        events.ingest_lag.observe(Duration::try_from(lag).unwrap_or_default());
                    }
                    events.publish(&changed);
                }
                if !summary.unreachable.is_empty() {
                    agents.leases.mark_unreachable(&attempt, &summary.unreachable);
                }
                if let Some(ending) = &summary.ending {
                    dispatch::note_ranks_ended(scheduler, &attempt, &agent, ending);
                }
                acknowledged.watched = events.hub.is_watched(&attempt.job);
                agents.send(&agent, ToAgent::Ack(acknowledged));
            }
            IngestResult::Stale => {
                let reason = "another attempt has taken its place, or the job is over".into();
                agents.send(&agent, ToAgent::Stop { attempt, reason, patient: false });
            }
            IngestResult::Gap { stored } => {
                tracing::warn!(agent, job = %attempt.job, stored, "records are missing before a report; the agent sends them again");
                connection.close_for(&attempt);
            }
        }
    }
    for done in flushes {
        let _ = done.send(());
    }
}

/// Stores reports. Retries after transient errors (a full disk, a busy database) until the reports are stored or permanently refused.
/// Agents keep records that are not acknowledged. The flag is true if more than one try was needed. Returns `None` if the server stops.
async fn store_with_retries(
    scheduler: &Scheduler,
    reports: &[Report],
) -> Option<(Result<Vec<IngestResult>>, bool)> {
    let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(2));
    let mut failure_log = FailureLog::default();
    loop {
        match scheduler.store.ingest(reports).await {
            Err(error) if error.is_temporary() => {
                if failure_log.note_failure(&error) {
                    tracing::error!(%error, "reports cannot be stored; trying again");
                    *lock(&scheduler.events.store_failure) = Some(error.to_string());
                }
                tokio::select! {
                    () = tokio::time::sleep(backoff.next_pause()) => {}
                    () = scheduler.tasks.stopping.cancelled() => return None,
                }
            }
            done => {
                let failures = failure_log.note_success();
                if failures.is_some() {
                    *lock(&scheduler.events.store_failure) = None;
                }
                if let Some(failures) = failures.filter(|_| done.is_ok()) {
                    tracing::info!(failures, "storing reports works again");
                }
                return Some((done, failures.is_some()));
            }
        }
    }
}

/// Stores reports and returns a result for each. If a batch is permanently refused, each report is stored separately. If a report is
/// refused, each of its records is stored separately, so that only records that the database refuses are lost. Lost records
/// are logged. The flag is true if a transaction was retried. Returns `None` if the server stops.
async fn store_all(scheduler: &Scheduler, reports: Vec<Report>) -> Option<(Vec<IngestResult>, bool)> {
    let (done, mut has_retried) = store_with_retries(scheduler, &reports).await?;
    let error = match done {
        Ok(answers) => return Some((answers, has_retried)),
        Err(error) => error,
    };
    tracing::error!(%error, "a batch of reports cannot be stored; each report is stored separately");
    let mut answers = Vec::with_capacity(reports.len());
    for report in reports {
        let (done, was_retried) = store_with_retries(scheduler, std::slice::from_ref(&report)).await?;
        has_retried |= was_retried;
        answers.push(match done.map(|mut answers| answers.pop()) {
            Ok(Some(answer)) => answer,
            _ => store_records_separately(scheduler, report).await?,
        });
    }
    Some((answers, has_retried))
}

async fn store_records_separately(scheduler: &Scheduler, report: Report) -> Option<IngestResult> {
    let mut combined: Option<ChangedJob> = None;
    let mut answer = IngestResult::Stale;
    for (number, event) in (report.first..).zip(report.events.clone()) {
        let single = |event| Report { first: number, events: vec![event], ..report.clone() };
        let (mut done, _) = store_with_retries(scheduler, &[single(event)]).await?;
        if let Err(error) = &done {
            let Report { attempt, source, .. } = &report;
            tracing::error!(
                %error, job = %attempt.job, attempt = attempt.attempt, ?source, number,
                "a record is skipped: the database refuses it"
            );
            // An empty record is stored instead and acknowledged. Otherwise the agent would send the record forever.
            (done, _) = store_with_retries(scheduler, &[single(AttemptEvent::Unknown)]).await?;
        }
        answer = match done.map(|mut answers| answers.pop()) {
            Ok(Some(answer)) => answer,
            // Not even the record's number can be stored, so no report of this job can be stored. The job's ranks are asked to stop.
            _ => IngestResult::Stale,
        };
        match &mut answer {
            IngestResult::Stored { changed, .. } => {
                if let Some(changed) = changed.take() {
                    let combined = combined
                        .get_or_insert_with(|| ChangedJob { events: Vec::new(), ..(*changed).clone() });
                    combined.events.extend(changed.events);
                    combined.job = changed.job;
                }
            }
            IngestResult::Stale | IngestResult::Gap { .. } => break,
        }
    }
    if let (IngestResult::Stored { changed, .. }, Some(combined)) = (&mut answer, combined) {
        *changed = Some(Box::new(combined));
    }
    Some(answer)
}

/// Publishes events that may have been stored without being published: if the connection to the database broke at the end of a transaction,
/// the retry finds that the records are stored, and returns no events.
async fn catch_up(scheduler: &Scheduler, jobs: HashSet<&JobId>) {
    let Scheduler { store, events, checkpoints, .. } = scheduler;
    for id in jobs {
        match store.job(id).await {
            Ok(Some(row)) => {
                events.hub.catch_up(&row.job);
                events.publish(&ChangedJob { job: row.job, events: Vec::new() });
                if let Err(error) = object_store_sync::catch_up(checkpoints, id).await {
                    tracing::warn!(%error, job = %id, "the upload of a checkpoint may be delayed until the server's next start");
                }
            }
            Ok(None) => {}
            Err(error) => tracing::warn!(%error, "readers of a job get new events late"),
        }
    }
}

/// The parts of a report that are needed after it is stored.
struct ReportSummary {
    /// How the attempt ended on this agent.
    ending: Option<Ending>,
    /// Ranks whose machines do not respond.
    unreachable: Vec<u32>,
    /// Steps that rank 0 has finished.
    steps: u64,
    /// When the first log line was written, by the clock of its rank.
    first_line_at: Option<Timestamp>,
}

impl ReportSummary {
    fn of(report: &Report) -> Self {
        let mut summary = Self { ending: None, unreachable: Vec::new(), steps: 0, first_line_at: None };
        for event in &report.events {
            match event {
                AttemptEvent::Ended(ending) => summary.ending = Some(ending.clone()),
                AttemptEvent::RankFailed { unreachable, .. } => summary.unreachable.extend(unreachable),
                AttemptEvent::Metrics { rank: 0, columns } => {
                    let times = columns.iter().filter(|column| column.name == "step_ms");
                    summary.steps += times.map(|column| column.steps.len() as u64).sum::<u64>();
                }
                AttemptEvent::Log { lines, .. } => {
                    summary.first_line_at =
                        summary.first_line_at.or_else(|| lines.first().map(|line| line.at));
                }
                _ => {}
            }
        }
        summary
    }
}
