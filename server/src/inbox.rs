//! The queue of reports that wait to be stored (`ingest.rs`), with back-pressure by their size in bytes.

use crate::store::Report;
use std::{sync::Arc, time::Duration};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

/// Bytes of encoded reports that may wait. Beyond that, agents keep records on disk.
const QUEUE_BYTES: usize = 64 << 20;
/// Bytes per permit of the semaphore. Its number of permits is a `u32`, so one per byte could not hold the largest message.
const PERMIT_BYTES: usize = 1 << 10;
/// How long the reports between two heartbeats may wait for space, together. Heartbeats wait behind them, so this is much less
/// than a lease.
pub(crate) const ROOM_WITHIN: Duration = Duration::from_secs(4);

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
    /// Its sender is notified when everything before it is stored.
    Flush(oneshot::Sender<()>),
}

/// Where connections put their reports.
#[derive(Debug, Clone)]
pub(crate) struct Inbox {
    to: mpsc::UnboundedSender<Work>,
    room: Arc<Semaphore>,
}

pub(crate) type Queue = mpsc::UnboundedReceiver<Work>;

/// A report's place among those that wait.
#[derive(Debug)]
pub(crate) struct Room {
    pub(crate) bytes: usize,
    _permit: OwnedSemaphorePermit,
}

impl Inbox {
    pub(crate) fn new() -> (Self, Queue) {
        let (to, queue) = mpsc::unbounded_channel();
        (Self { to, room: Arc::new(Semaphore::new(QUEUE_BYTES / PERMIT_BYTES)) }, queue)
    }

    /// Room for a report that came as so many bytes, when there is some. While it is waited for nothing more is read from
    /// its agent, whose spool takes the rest. None when the database is so far behind that it should come again later.
    pub(crate) async fn room(&self, bytes: usize, patience: Duration) -> Option<Room> {
        let permits = bytes.div_ceil(PERMIT_BYTES).clamp(1, QUEUE_BYTES / PERMIT_BYTES);
        let permit = self.room.clone().acquire_many_owned(u32::try_from(permits).ok()?);
        let permit = tokio::time::timeout(patience, permit).await.ok()?.ok()?;
        Some(Room { bytes, _permit: permit })
    }

    /// Nothing is lost while the server runs: every report that is queued has a permit.
    pub(crate) fn put(&self, work: Work) {
        let _ = self.to.send(work);
    }

    /// Returns when everything that was put before this call is stored.
    pub(crate) async fn flush(&self) {
        let (to, done) = oneshot::channel();
        if self.to.send(Work::Flush(to)).is_ok() {
            let _ = done.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn reports_wait_for_room_but_not_for_ever() {
        let (inbox, _queue) = Inbox::new();
        let first = inbox.room(QUEUE_BYTES - PERMIT_BYTES, ROOM_WITHIN).await.unwrap();
        let second =
            inbox.room(PERMIT_BYTES, ROOM_WITHIN).await.expect("there is space for the last kibibyte");
        assert!(inbox.room(1, Duration::from_millis(1)).await.is_none(), "and for nothing more");
        let (third, ()) = tokio::join!(inbox.room(PERMIT_BYTES, ROOM_WITHIN), async { drop(second) });
        assert!(third.is_some(), "it waits until what is before it is stored");
        drop((first, third));
        assert!(
            inbox.room(usize::MAX, ROOM_WITHIN).await.is_some(),
            "the largest message fits once it is alone"
        );
    }
}
