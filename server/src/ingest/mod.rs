//! Ingest: reports of agents are stored, then published, then acknowledged, in that order. A transaction takes everything that
//! waits when it begins, so under load transactions get larger and the queue does not get longer.

pub(crate) mod run_files;
pub(crate) mod runs;

use crate::{
    agents::{
        Agents,
        inbox::{Queue, Work},
    },
    checkpoints::{Checkpoints, artifact_mover},
    events::Events,
    scheduler::{Scheduler, dispatch},
    store::{Changed, EventRow, Ingested, Report, Result, Store},
    util::failing::Failing,
};
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

/// Bytes of reports per transaction, at most: the first report of a batch is published only when all are stored.
const BATCH_BYTES: usize = 4 << 20;

/// Stores reports, publishes what was stored, and acknowledges it to the agents.
pub(crate) struct Ingest {
    store: Arc<dyn Store>,
    events: Arc<Events>,
    agents: Arc<Agents>,
    checkpoints: Arc<Checkpoints>,
    scheduler: Arc<Scheduler>,
}

impl Ingest {
    pub(crate) fn new(scheduler: Arc<Scheduler>) -> Self {
        Self {
            store: Arc::clone(&scheduler.store),
            events: Arc::clone(&scheduler.events),
            agents: Arc::clone(&scheduler.agents),
            checkpoints: Arc::clone(&scheduler.checkpoints),
            scheduler,
        }
    }

    /// Stores reports until dropped.
    pub(crate) async fn run(&self, mut queue: Queue) {
        while let Some(first) = queue.recv().await {
            let mut batch = vec![first];
            let size =
                |w: &Work| if let Work::Report { reservation, .. } = w { reservation.bytes } else { 0 };
            let mut bytes = size(&batch[0]);
            while bytes < BATCH_BYTES
                && let Ok(more) = queue.try_recv()
            {
                bytes += size(&more);
                batch.push(more);
            }
            self.store_batch(batch).await;
        }
    }

    async fn store_batch(&self, batch: Vec<Work>) {
        let mut reports = Vec::with_capacity(batch.len());
        let mut from = Vec::with_capacity(batch.len());
        let mut flushes = Vec::new();
        // Dropped when all is stored.
        let mut reservations = Vec::with_capacity(batch.len());
        for work in batch {
            match work {
                Work::Report { agent, connection, mut report, reservation } => {
                    if connection.is_incomplete(&report.attempt) {
                        continue;
                    }
                    if let Err(error) = self.checkpoints.keep_uploaded(&mut report).await {
                        let job = &report.attempt.job;
                        let why = format!(
                            "which checkpoints of job {job} the server keeps cannot be read: {error}"
                        );
                        self.agents.refusals.note_cut_off(&agent, &why);
                        connection.cut(&report.attempt);
                        continue;
                    }
                    from.push((agent, connection, report.attempt.clone(), Ends::of(&report)));
                    reservations.push(reservation);
                    reports.push(*report);
                }
                Work::Flush(done) => flushes.push(done),
            }
        }
        let answers =
            if reports.is_empty() { Some((Vec::new(), false)) } else { self.store_all(reports).await };
        let Some((answers, tried_again)) = answers else { return };
        if tried_again {
            self.catch_up(from.iter().map(|(_, _, attempt, _)| &attempt.job).collect()).await;
        }
        for ((agent, connection, attempt, ends), answer) in from.into_iter().zip(answers) {
            if ends.ending.is_some() && !matches!(answer, Ingested::Gap { .. }) {
                self.agents.leases.is_gone(&agent, &attempt);
            }
            match answer {
                Ingested::Stored { mut acknowledged, changed } => {
                    if let Some(changed) = changed {
                        let events = changed.events.iter().map(EventRow::count).sum();
                        self.events.stored.fetch_add(events, Ordering::Relaxed);
                        self.events.publish(&changed);
                    }
                    if !ends.unreachable.is_empty() {
                        self.agents.leases.mark_unreachable(&attempt, &ends.unreachable);
                    }
                    if let Some(ending) = &ends.ending {
                        dispatch::ended_at(&self.scheduler, &attempt, &agent, ending);
                    }
                    acknowledged.watched = self.events.hub.is_watched(&attempt.job);
                    self.agents.send(&agent, ToAgent::Ack(acknowledged));
                }
                Ingested::Stale => {
                    let reason = "another attempt has taken its place, or the job is over".into();
                    self.agents.send(&agent, ToAgent::Stop { attempt, reason, patient: false });
                }
                Ingested::Gap { stored } => {
                    tracing::warn!(agent, job = %attempt.job, stored, "records are missing before a report: it must begin again");
                    connection.cut(&attempt);
                }
            }
        }
        for done in flushes {
            let _ = done.send(());
        }
    }

    /// Stores reports, and retries transient errors (a full disk, a busy database) until they are stored or refused for good. Agents keep what
    /// is not acknowledged. The flag says whether it took more than one try. `None` when the server stops.
    async fn store_patiently(&self, reports: &[Report]) -> Option<(Result<Vec<Ingested>>, bool)> {
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(2));
        let mut failing = Failing::default();
        loop {
            match self.store.ingest(reports).await {
                Err(error) if error.may_pass() => {
                    if failing.is_new(&error) {
                        tracing::error!(%error, "reports cannot be stored; trying again");
                    }
                    tokio::select! {
                        () = tokio::time::sleep(backoff.pause()) => {}
                        () = self.scheduler.tasks.stopping.cancelled() => return None,
                    }
                }
                done => {
                    let tries = failing.ended();
                    if let Some(failures) = tries.filter(|_| done.is_ok()) {
                        tracing::info!(failures, "storing reports works again");
                    }
                    return Some((done, tries.is_some()));
                }
            }
        }
    }

    /// Stores reports and returns one result for each. When a batch is refused for good, each report is stored separately, and of a
    /// refused report each record, so that only the records that the database refuses are lost. The log names them.
    async fn store_all(&self, reports: Vec<Report>) -> Option<(Vec<Ingested>, bool)> {
        let (done, mut tried_again) = self.store_patiently(&reports).await?;
        let error = match done {
            Ok(answers) => return Some((answers, tried_again)),
            Err(error) => error,
        };
        tracing::error!(%error, "a batch of reports can never be stored as it is; each is stored by itself");
        let mut answers = Vec::with_capacity(reports.len());
        for report in reports {
            let (done, again) = self.store_patiently(std::slice::from_ref(&report)).await?;
            tried_again |= again;
            answers.push(match done.map(|mut answers| answers.pop()) {
                Ok(Some(answer)) => answer,
                _ => self.record_by_record(report).await?,
            });
        }
        Some((answers, tried_again))
    }

    async fn record_by_record(&self, report: Report) -> Option<Ingested> {
        let mut all: Option<Changed> = None;
        let mut answer = Ingested::Stale;
        for (number, event) in (report.first..).zip(report.events.clone()) {
            let alone = |event| Report { first: number, events: vec![event], ..report.clone() };
            let (mut done, _) = self.store_patiently(&[alone(event)]).await?;
            if let Err(error) = &done {
                let Report { attempt, source, .. } = &report;
                tracing::error!(
                    %error, job = %attempt.job, attempt = attempt.attempt, ?source, number,
                    "a record is passed over: the database refuses it"
                );
                // Acknowledged like any other record, or the agent would send it for ever.
                (done, _) = self.store_patiently(&[alone(AttemptEvent::Unknown)]).await?;
            }
            answer = match done.map(|mut answers| answers.pop()) {
                Ok(Some(answer)) => answer,
                // Its number cannot be stored either, so nothing of this job can: its ranks are asked to stop.
                _ => Ingested::Stale,
            };
            match &mut answer {
                Ingested::Stored { changed, .. } => {
                    if let Some(changed) = changed.take() {
                        let all =
                            all.get_or_insert_with(|| Changed { events: Vec::new(), ..(*changed).clone() });
                        all.events.extend(changed.events);
                        all.job = changed.job;
                    }
                }
                Ingested::Stale | Ingested::Gap { .. } => break,
            }
        }
        if let (Ingested::Stored { changed, .. }, Some(all)) = (&mut answer, all) {
            *changed = Some(Box::new(all));
        }
        Some(answer)
    }

    /// Publishes events that may have been stored without being published: if the connection broke at the end of a transaction, the retry
    /// finds its records stored and returns no events.
    async fn catch_up(&self, jobs: HashSet<&JobId>) {
        for id in jobs {
            match self.store.job(id).await {
                Ok(Some(row)) => {
                    self.events.hub.catch_up(&row.job);
                    self.events.publish(&Changed { job: row.job, events: Vec::new() });
                    if let Err(error) = artifact_mover::catch_up(&self.checkpoints, id).await {
                        tracing::warn!(%error, job = %id, "a checkpoint may wait for the next start to be uploaded");
                    }
                }
                Ok(None) => {}
                Err(error) => tracing::warn!(%error, "readers of a job wait for its next event"),
            }
        }
    }
}

/// The parts of a report about the end of its attempt, for dispatch.
struct Ends {
    /// How it ended on this agent.
    ending: Option<Ending>,
    /// Ranks whose machines do not answer.
    unreachable: Vec<u32>,
}

impl Ends {
    fn of(report: &Report) -> Self {
        let mut this = Self { ending: None, unreachable: Vec::new() };
        for event in &report.events {
            match event {
                AttemptEvent::Ended(ending) => this.ending = Some(ending.clone()),
                AttemptEvent::RankFailed { unreachable, .. } => this.unreachable.extend(unreachable),
                _ => {}
            }
        }
        this
    }
}
