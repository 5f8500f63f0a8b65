//! The audit log. Requests queue entries and do not wait until the entries are written. A task writes many entries at a time, and removes
//! old entries.

use crate::{store::Store, util::failure_log::FailureLog};
use lockstep_protocol::{access::AuditEntry, backoff::Backoff};
use std::{sync::Arc, time::Duration};
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;

/// Maximum number of entries that wait. If the database is unreachable for long, further entries are only written to the server's log.
const MAX_WAITING: usize = 10_000;

/// Maximum number of entries in a transaction.
const MAX_BATCH: usize = 500;
/// Maximum age of an entry. The number of entries is also limited (`ServeConfig::max_audit_entries`).
const ENTRY_LIFE: Duration = Duration::from_secs(365 * 24 * 3600);
const PURGE_INTERVAL: Duration = Duration::from_secs(3600);
/// A purge begins early after this many new entries, or after half of the maximum number of entries if that is less.
const PURGE_AFTER: usize = 1000;
/// Pause between two steps of a purge.
const PURGE_PAUSE: Duration = Duration::from_millis(50);
/// Pauses before a write is retried.
const RETRY: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(2));

#[derive(Debug)]
enum Item {
    Entry(AuditEntry),
    /// Somebody waits until all earlier entries are written, and is then notified through this channel.
    Flush(oneshot::Sender<()>),
}

/// The sending half of the queue, which requests use.
#[derive(Debug, Clone)]
pub(crate) struct Audit(mpsc::Sender<Item>);

impl Audit {
    /// `max_entries`: maximum number of entries in the database.
    pub(crate) fn new(
        store: Arc<dyn Store>,
        max_entries: u32,
        stopping: CancellationToken,
    ) -> (Self, AuditWriter) {
        let (sender, queue) = mpsc::channel(MAX_WAITING);
        (Self(sender), AuditWriter { queue, store, max_entries, stopping })
    }

    /// Queues an entry.
    pub(crate) fn put(&self, entry: AuditEntry) {
        let AuditEntry { who, action, object, status, .. } = &entry;
        tracing::info!(who, action, object, status, "a request was answered");
        if let Err(error) = self.0.try_send(Item::Entry(entry)) {
            tracing::error!(%error, "this entry is missing in the audit log");
        }
    }

    /// Returns when all earlier entries are written, or their write has failed.
    pub(crate) async fn flush(&self) {
        let (sender, done) = oneshot::channel();
        if self.0.send(Item::Flush(sender)).await.is_ok() {
            let _ = done.await;
        }
    }
}

pub(crate) struct AuditWriter {
    queue: mpsc::Receiver<Item>,
    store: Arc<dyn Store>,
    max_entries: u32,
    stopping: CancellationToken,
}

impl AuditWriter {
    /// Writes entries until the server stops, and then the entries that still wait.
    pub(crate) async fn run(mut self) {
        let mut purged_at = None;
        let mut new_entries = 0;
        loop {
            let mut batch = Vec::new();
            tokio::select! {
                _ = self.queue.recv_many(&mut batch, MAX_BATCH) => {}
                () = sleep(PURGE_INTERVAL) => {}
                () = self.stopping.cancelled() => {
                    // Requests in progress end a moment later.
                    let last = self.queue.recv_many(&mut batch, MAX_BATCH);
                    if !timeout(Duration::from_millis(200), last).await.is_ok_and(|count| count > 0) {
                        return;
                    }
                }
            }
            new_entries += batch.len();
            self.write(batch).await;
            let is_due = purged_at.is_none_or(|at: Instant| at.elapsed() >= PURGE_INTERVAL);
            if (is_due || new_entries >= PURGE_AFTER.min(self.max_entries as usize / 2 + 1))
                && !self.stopping.is_cancelled()
            {
                self.purge().await;
                (purged_at, new_entries) = (Some(Instant::now()), 0);
            }
        }
    }

    async fn write(&self, batch: Vec<Item>) {
        let mut entries: Vec<AuditEntry> = Vec::with_capacity(batch.len());
        let mut flushes = Vec::new();
        for item in batch {
            match item {
                Item::Entry(entry) => entries.push(entry),
                Item::Flush(done) => flushes.push(done),
            }
        }
        let (mut backoff, mut failure_log) = (RETRY, FailureLog::default());
        while !entries.is_empty() {
            let written = self.store.add_audit_entries(&entries).await;
            if let Err(error) = &written
                && (!error.is_temporary() || self.stopping.is_cancelled())
            {
                tracing::error!(%error, entries = entries.len(), "these entries are missing in the audit log");
                break;
            }
            failure_log.log(
                &written,
                "the audit log cannot be written",
                "the audit log can be written again",
            );
            if written.is_ok() {
                break;
            }
            // Flushes do not wait for the retry, because the entries are in the server's log.
            flushes.clear();
            sleep(backoff.next_pause()).await;
        }
        for done in flushes {
            let _ = done.send(());
        }
    }

    /// Removes old entries in small steps, because reports need the database's only writer.
    async fn purge(&self) {
        let before = crate::now() - ENTRY_LIFE;
        loop {
            match self.store.purge_audit_entries(before, self.max_entries).await {
                Ok(true) => sleep(PURGE_PAUSE).await,
                Ok(false) => return,
                Err(error) => {
                    return tracing::warn!(%error, "old entries of the audit log could not be removed");
                }
            }
            if self.stopping.is_cancelled() {
                return;
            }
        }
    }
}
