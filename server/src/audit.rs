//! The queue of the audit log. Requests do not wait until their entry is written; `audit_log.rs` writes many entries at a time.

use crate::store::AuditEntry;
use tokio::sync::{mpsc, oneshot};

/// Entries that may wait. Beyond that, when the database is unreachable for long, entries go to the server's log alone.
const WAITING: usize = 10_000;

/// What waits to be written.
#[derive(Debug)]
pub(crate) enum Entry {
    Done(AuditEntry),
    /// A flush: its sender is notified when everything before it is written.
    Flush(oneshot::Sender<()>),
}

pub(crate) type Queue = mpsc::Receiver<Entry>;

/// The sending half, which requests use.
#[derive(Debug, Clone)]
pub(crate) struct Audit(mpsc::Sender<Entry>);

impl Audit {
    pub(crate) fn new() -> (Self, Queue) {
        let (to, queue) = mpsc::channel(WAITING);
        (Self(to), queue)
    }

    /// Queues an entry.
    pub(crate) fn put(&self, entry: AuditEntry) {
        let AuditEntry { who, action, object, status, .. } = &entry;
        tracing::info!(who, action, object, status, "done");
        if let Err(error) = self.0.try_send(Entry::Done(entry)) {
            tracing::error!(%error, "this is missing in the audit log");
        }
    }

    /// Flush: returns when all earlier entries are written, or have failed.
    pub(crate) async fn flush(&self) {
        let (to, done) = oneshot::channel();
        if self.0.send(Entry::Flush(to)).await.is_ok() {
            let _ = done.await;
        }
    }
}
