//! The queue of reports that wait to be stored (`ingest/`), with back-pressure by their size in bytes.

use crate::{store::Report, util::lock};
use lockstep_protocol::agent::{AttemptEvent, AttemptRef};
use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

/// Maximum size, in bytes, of the encoded reports that wait. Further reports stay in the agents' spools.
const MAX_QUEUE_BYTES: usize = 64 << 20;
/// Bytes of space for each permit of the semaphore.
const PERMIT_BYTES: usize = 1 << 10;
/// Total time for which the reports between two heartbeats may wait for space. A heartbeat waits behind these reports, so the time is much
/// shorter than a lease (15 s).
pub(crate) const RESERVE_TIMEOUT: Duration = Duration::from_secs(4);

#[derive(Debug)]
pub(crate) enum QueueItem {
    Report {
        /// The agent that gets the acknowledgement.
        agent: String,
        /// The connection on which the report came.
        connection: ReportConnection,
        report: Box<Report>,
        reservation: Reservation,
    },
    /// Tells the caller of [`Inbox::flush`] that all items before this item are stored.
    Flush(oneshot::Sender<()>),
}

/// An agent's connection, which is closed when the agent must resend from the last stored record.
#[derive(Debug, Clone)]
pub(crate) struct ReportConnection {
    close: mpsc::Sender<()>,
    /// Attempts of which records are missing.
    incomplete: Arc<Mutex<HashSet<AttemptRef>>>,
}

impl ReportConnection {
    /// The receiver gets a message when the connection must be closed.
    pub(crate) fn new() -> (Self, mpsc::Receiver<()>) {
        let (close, must_close) = mpsc::channel(1);
        (Self { close, incomplete: Arc::default() }, must_close)
    }

    /// Closes the connection, because a report of this attempt was not stored.
    pub(crate) fn close_for(&self, attempt: &AttemptRef) {
        lock(&self.incomplete).insert(attempt.clone());
        let _ = self.close.try_send(());
    }

    /// Whether records of this attempt are missing. Later records must then not be stored, in particular the attempt's end.
    pub(crate) fn lacks_records_of(&self, attempt: &AttemptRef) -> bool {
        lock(&self.incomplete).contains(attempt)
    }
}

/// The sending half of the queue, which connections use.
#[derive(Debug, Clone)]
pub(crate) struct Inbox {
    sender: mpsc::UnboundedSender<QueueItem>,
    permits: Arc<Semaphore>,
    /// Number of ends of attempts that wait to be stored.
    waiting_ends: Arc<AtomicUsize>,
}

pub(crate) type Queue = mpsc::UnboundedReceiver<QueueItem>;

/// Space for one report in the queue. Dropping this frees the space.
#[derive(Debug)]
pub(crate) struct Reservation {
    pub(crate) bytes: usize,
    _permit: OwnedSemaphorePermit,
    end: Option<CountedEnd>,
}

/// An attempt's end, which is counted in [`Inbox::waiting_ends`] until it is stored.
#[derive(Debug)]
struct CountedEnd(Arc<AtomicUsize>);

impl Drop for CountedEnd {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Inbox {
    pub(crate) fn new() -> (Self, Queue) {
        let (sender, queue) = mpsc::unbounded_channel();
        (
            Self {
                sender,
                permits: Arc::new(Semaphore::new(MAX_QUEUE_BYTES / PERMIT_BYTES)),
                waiting_ends: Arc::default(),
            },
            queue,
        )
    }

    /// Waits for space for a report of `bytes` encoded bytes. Meanwhile nothing more is read from the agent, whose spool keeps later
    /// records. `None` after `timeout`: the database is so slow that the agent should send the report again later.
    pub(crate) async fn reserve(&self, bytes: usize, timeout: Duration) -> Option<Reservation> {
        let permits = bytes.div_ceil(PERMIT_BYTES).clamp(1, MAX_QUEUE_BYTES / PERMIT_BYTES);
        let permit = self.permits.clone().acquire_many_owned(u32::try_from(permits).ok()?);
        let permit = tokio::time::timeout(timeout, permit).await.ok()?.ok()?;
        Some(Reservation { bytes, _permit: permit, end: None })
    }

    /// Queues a report. The queue itself is unbounded, because the reservation limits it.
    pub(crate) fn put(&self, mut item: QueueItem) {
        if let QueueItem::Report { report, reservation, .. } = &mut item
            && report.events.iter().any(|event| matches!(event, AttemptEvent::Ended(_)))
        {
            self.waiting_ends.fetch_add(1, Ordering::Relaxed);
            reservation.end = Some(CountedEnd(Arc::clone(&self.waiting_ends)));
        }
        let _ = self.sender.send(item);
    }

    /// Whether the end of an attempt has arrived and is not stored yet. The attempt's slots become free soon.
    pub(crate) fn has_waiting_ends(&self) -> bool {
        self.waiting_ends.load(Ordering::Relaxed) > 0
    }

    /// Returns when everything that was queued before this call is stored.
    pub(crate) async fn flush(&self) {
        let (done, is_stored) = oneshot::channel();
        if self.sender.send(QueueItem::Flush(done)).is_ok() {
            let _ = is_stored.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn reports_wait_for_space_for_a_limited_time() {
        let (inbox, _queue) = Inbox::new();
        let first = inbox.reserve(MAX_QUEUE_BYTES - PERMIT_BYTES, RESERVE_TIMEOUT).await.unwrap();
        let second =
            inbox.reserve(PERMIT_BYTES, RESERVE_TIMEOUT).await.expect("there is space for the last kibibyte");
        assert!(inbox.reserve(1, Duration::from_millis(1)).await.is_none(), "there is no more space");
        let (third, ()) = tokio::join!(inbox.reserve(PERMIT_BYTES, RESERVE_TIMEOUT), async { drop(second) });
        assert!(third.is_some(), "it waits until earlier reports are stored");
        drop((first, third));
        // The largest message fits once the queue is empty.
        assert!(inbox.reserve(usize::MAX, RESERVE_TIMEOUT).await.is_some());
    }
}
