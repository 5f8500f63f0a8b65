//! The queue of the audit log. Requests do not wait until what they did is written down; `audit_log.rs` writes many entries at once.

use crate::store::AuditEntry;
use tokio::sync::{mpsc, oneshot};

/// Entries that may wait. When the database is away for so long that more come, they are in the server's log alone.
const WAITING: usize = 10_000;

/// What waits to be written.
#[derive(Debug)]
pub(crate) enum Entry {
    Done(AuditEntry),
    /// Its sender is notified when everything before it is written.
    Flush(oneshot::Sender<()>),
}

pub(crate) type Queue = mpsc::Receiver<Entry>;

/// Where requests put what they did.
#[derive(Debug, Clone)]
pub(crate) struct Audit(mpsc::Sender<Entry>);

impl Audit {
    pub(crate) fn new() -> (Self, Queue) {
        let (to, queue) = mpsc::channel(WAITING);
        (Self(to), queue)
    }

    /// Writes something down, soon.
    pub(crate) fn put(&self, entry: AuditEntry) {
        let AuditEntry { who, action, object, status, .. } = &entry;
        tracing::info!(who, action, object, status, "done");
        if let Err(error) = self.0.try_send(Entry::Done(entry)) {
            tracing::error!(%error, "this is missing in the audit log");
        }
    }

    /// Returns when everything that was put before is written, or cannot be.
    pub(crate) async fn flush(&self) {
        let (to, done) = oneshot::channel();
        if self.0.send(Entry::Flush(to)).await.is_ok() {
            let _ = done.await;
        }
    }
}
