//! Reports of agents: stored, then published, then acknowledged, in that order. Whatever waits when a
//! transaction begins goes into it, so a busy server makes larger transactions, not a longer queue.

use crate::{
    app::App,
    store::{Changed, EventRow, Ingested, Report, Result},
};
use lockstep_protocol::{
    agent::{AttemptEvent, ToAgent},
    job::JobId,
};
use std::{
    collections::HashSet,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

/// Of reports that wait, as they came; agents hold back what is more, on disk.
const QUEUE_BYTES: usize = 64 << 20;
/// Permits are for so much, so that an agent's largest message has room in their number.
const PERMIT_BYTES: usize = 1 << 10;
/// How long a report waits for room. Its agent's heartbeats wait behind it: much less than a lease.
const ROOM_WITHIN: Duration = Duration::from_secs(4);
/// The most of one transaction, so that no reader waits long for the first of them.
const BATCH_BYTES: usize = 4 << 20;

/// What waits to be stored.
#[derive(Debug)]
pub(crate) enum Work {
    Report {
        /// To be acknowledged to this agent ...
        agent: String,
        /// ... whose connection is cut (by dropping this) when it must begin again at what is stored.
        connection: mpsc::Sender<()>,
        report: Box<Report>,
        room: Room,
    },
    /// Answered when everything before it is stored.
    Barrier(oneshot::Sender<()>),
}

/// Where connections put their reports.
#[derive(Debug, Clone)]
pub(crate) struct Ingest {
    to: mpsc::UnboundedSender<Work>,
    room: Arc<Semaphore>,
}

pub(crate) type Queue = mpsc::UnboundedReceiver<Work>;

/// A report's place among those that wait.
#[derive(Debug)]
pub(crate) struct Room {
    bytes: usize,
    _permit: OwnedSemaphorePermit,
}

impl Ingest {
    pub(crate) fn new() -> (Self, Queue) {
        let (to, queue) = mpsc::unbounded_channel();
        (Self { to, room: Arc::new(Semaphore::new(QUEUE_BYTES / PERMIT_BYTES)) }, queue)
    }

    /// Room for a report that came as so many bytes, when there is some. While it is waited for nothing more is read from
    /// its agent, whose spool takes the rest. None when the database is so far behind that it should come again later.
    pub(crate) async fn room(&self, bytes: usize) -> Option<Room> {
        self.room_within(bytes, ROOM_WITHIN).await
    }

    async fn room_within(&self, bytes: usize, patience: Duration) -> Option<Room> {
        let permits = bytes.div_ceil(PERMIT_BYTES).clamp(1, QUEUE_BYTES / PERMIT_BYTES);
        let permit = self.room.clone().acquire_many_owned(u32::try_from(permits).ok()?);
        let permit = tokio::time::timeout(patience, permit).await.ok()?.ok()?;
        Some(Room { bytes, _permit: permit })
    }

    /// Nothing is lost while the server runs: what is put has its room.
    pub(crate) fn put(&self, work: Work) {
        let _ = self.to.send(work);
    }

    /// Returns when all that was put before is stored.
    pub(crate) async fn drained(&self) {
        let (to, done) = oneshot::channel();
        if self.to.send(Work::Barrier(to)).is_ok() {
            let _ = done.await;
        }
    }
}

/// Stores reports until `app` stops.
pub(crate) async fn run(app: App, mut queue: Queue) {
    while let Some(first) = queue.recv().await {
        let mut batch = vec![first];
        let size = |w: &Work| if let Work::Report { room, .. } = w { room.bytes } else { 0 };
        let mut bytes = size(&batch[0]);
        while bytes < BATCH_BYTES
            && let Ok(more) = queue.try_recv()
        {
            bytes += size(&more);
            batch.push(more);
        }
        store(&app, batch).await;
    }
}

async fn store(app: &App, batch: Vec<Work>) {
    let mut reports = Vec::with_capacity(batch.len());
    let mut from = Vec::with_capacity(batch.len());
    let mut barriers = Vec::new();
    // Let go when all is stored.
    let mut rooms = Vec::with_capacity(batch.len());
    for work in batch {
        match work {
            Work::Report { agent, connection, report, room } => {
                from.push((agent, connection, report.attempt.clone()));
                rooms.push(room);
                reports.push(*report);
            }
            Work::Barrier(done) => barriers.push(done),
        }
    }
    let answers = if reports.is_empty() { Some((Vec::new(), false)) } else { store_all(app, reports).await };
    let Some((answers, tried_again)) = answers else { return };
    if tried_again {
        catch_up(app, from.iter().map(|(_, _, attempt)| &attempt.job).collect()).await;
    }
    for ((agent, connection, attempt), answer) in from.into_iter().zip(answers) {
        match answer {
            Ingested::Stored { mut acknowledged, changed } => {
                if let Some(changed) = changed {
                    let events = changed.events.iter().map(EventRow::count).sum();
                    app.events_stored.fetch_add(events, Ordering::Relaxed);
                    app.announce(&changed);
                }
                acknowledged.watched = app.hub.is_watched(&attempt.job);
                app.agents.tell(&agent, ToAgent::Ack(acknowledged));
            }
            Ingested::Stale => {
                let reason = "another attempt has taken its place, or the job is over".into();
                app.agents.tell(&agent, ToAgent::Stop { attempt, reason, patient: false });
            }
            Ingested::Gap { stored } => {
                tracing::warn!(agent, job = %attempt.job, stored, "records are missing before a report: it must begin again");
                let _ = connection.try_send(());
            }
        }
    }
    for done in barriers {
        let _ = done.send(());
    }
}

/// Tries until it is stored or never will be: a full disk or a busy database passes, and agents keep what is not
/// acknowledged. True: not at once. `None` when the server stops.
async fn store_patiently(app: &App, reports: &[Report]) -> Option<(Result<Vec<Ingested>>, bool)> {
    let mut wait = Duration::from_millis(100);
    let mut tried_again = false;
    loop {
        match app.store.ingest(reports).await {
            Err(error) if error.may_pass() => {
                tracing::error!(%error, "reports cannot be stored; trying again");
                tokio::select! {
                    () = tokio::time::sleep(wait) => {}
                    () = app.stopping.cancelled() => return None,
                }
                wait = (wait * 2).min(Duration::from_secs(2));
                tried_again = true;
            }
            done => return Some((done, tried_again)),
        }
    }
}

/// Stores reports, one answer for each. Of a batch that can never be stored each report is stored apart, and of such a
/// report each record, so that only what the database refuses is lost; the log says what that was.
async fn store_all(app: &App, reports: Vec<Report>) -> Option<(Vec<Ingested>, bool)> {
    let (done, mut tried_again) = store_patiently(app, &reports).await?;
    let error = match done {
        Ok(answers) => return Some((answers, tried_again)),
        Err(error) => error,
    };
    tracing::error!(%error, "a batch of reports can never be stored as it is; each is stored apart");
    let mut answers = Vec::with_capacity(reports.len());
    for report in reports {
        let (done, again) = store_patiently(app, std::slice::from_ref(&report)).await?;
        tried_again |= again;
        answers.push(match done.map(|mut answers| answers.pop()) {
            Ok(Some(answer)) => answer,
            _ => record_by_record(app, report).await?,
        });
    }
    Some((answers, tried_again))
}

async fn record_by_record(app: &App, report: Report) -> Option<Ingested> {
    let mut all: Option<Changed> = None;
    let mut answer = Ingested::Stale;
    for (number, event) in (report.first..).zip(report.events.clone()) {
        let apart = |event| Report { first: number, events: vec![event], ..report.clone() };
        let (mut done, _) = store_patiently(app, &[apart(event)]).await?;
        if let Err(error) = &done {
            let Report { attempt, source, .. } = &report;
            tracing::error!(
                %error, job = %attempt.job, attempt = attempt.attempt, ?source, number,
                "a record is passed over: the database refuses it"
            );
            // Acknowledged like any other, or it would come again for ever.
            (done, _) = store_patiently(app, &[apart(AttemptEvent::Unknown)]).await?;
        }
        answer = match done.map(|mut answers| answers.pop()) {
            Ok(Some(answer)) => answer,
            // Not even its number is taken: of this job nothing can be stored, and its ranks are told to stop.
            _ => Ingested::Stale,
        };
        match &mut answer {
            Ingested::Stored { changed, .. } => {
                if let Some(changed) = changed.take() {
                    let all = all.get_or_insert_with(|| Changed { events: Vec::new(), ..(*changed).clone() });
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

/// A transaction whose end the database could not tell us may have been done: its records are known then, and
/// nobody was told of its events.
async fn catch_up(app: &App, jobs: HashSet<&JobId>) {
    for id in jobs {
        match app.store.job(id).await {
            Ok(Some(row)) => {
                app.hub.catch_up(&row.job);
                app.announce(&Changed { job: row.job, events: Vec::new() });
            }
            Ok(None) => {}
            Err(error) => tracing::warn!(%error, "readers of a job wait for its next event"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn reports_wait_for_room_but_not_for_ever() {
        let (ingest, _queue) = Ingest::new();
        let first = ingest.room(QUEUE_BYTES - PERMIT_BYTES).await.unwrap();
        let second = ingest.room(PERMIT_BYTES).await.expect("there is room for the last kibibyte");
        assert!(ingest.room_within(1, Duration::from_millis(1)).await.is_none(), "and for nothing more");
        let (third, ()) = tokio::join!(ingest.room(PERMIT_BYTES), async { drop(second) });
        assert!(third.is_some(), "it waits until what is before it is stored");
        drop((first, third));
        assert!(ingest.room(usize::MAX).await.is_some(), "the largest message has room once it is alone");
    }
}
