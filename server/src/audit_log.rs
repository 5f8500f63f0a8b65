//! Writes the audit log, and removes what is too old.

use crate::{
    app::App,
    audit::{Entry, Queue},
    failing::Failing,
    store::AuditEntry,
};
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Entries of one transaction.
const TOGETHER: usize = 500;
/// How long an entry is kept, within the number that is kept (`ServeConfig::audit_entries`).
const KEPT: Duration = Duration::from_secs(365 * 24 * 3600);
const PURGE_EVERY: Duration = Duration::from_secs(3600);
/// A purge begins early when so many entries have come since the last.
const PURGE_AFTER: usize = 1000;
/// Between two steps of a purge.
const BREATH: Duration = Duration::from_millis(50);
/// Before a write is tried again: first, and at most.
const RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

/// Writes until `app` stops, and then what still waits.
pub(crate) async fn run(app: App, mut queue: Queue) {
    let mut purged = None;
    let mut since = 0;
    loop {
        let first = tokio::select! {
            first = queue.recv() => first,
            () = sleep(PURGE_EVERY) => None,
            () = app.stopping.cancelled() => {
                // Requests under way end a moment later.
                let last = tokio::time::timeout(Duration::from_millis(200), queue.recv()).await;
                let Ok(Some(last)) = last else { return };
                Some(last)
            }
        };
        let mut batch: Vec<Entry> = first.into_iter().collect();
        while batch.len() < TOGETHER
            && let Ok(more) = queue.try_recv()
        {
            batch.push(more);
        }
        since += batch.len();
        write(&app, batch).await;
        let is_due = purged.is_none_or(|at: Instant| at.elapsed() >= PURGE_EVERY);
        if (is_due || since >= PURGE_AFTER.min(app.config.audit_entries as usize / 2 + 1))
            && !app.stopping.is_cancelled()
        {
            purge(&app).await;
            (purged, since) = (Some(Instant::now()), 0);
        }
    }
}

async fn write(app: &App, batch: Vec<Entry>) {
    let mut entries: Vec<AuditEntry> = Vec::with_capacity(batch.len());
    let mut flushes = Vec::new();
    for entry in batch {
        match entry {
            Entry::Done(entry) => entries.push(entry),
            Entry::Flush(done) => flushes.push(done),
        }
    }
    let (mut wait, mut failing) = (RETRY.0, Failing::default());
    while !entries.is_empty() {
        match app.store.add_audit(&entries).await {
            Ok(()) => {
                if let Some(failures) = failing.ended() {
                    tracing::info!(failures, "writing the audit log works again");
                }
                break;
            }
            Err(error) if error.may_pass() && !app.stopping.is_cancelled() => {
                // The log says what there is.
                flushes.clear();
                if failing.is_new(&error) {
                    tracing::warn!(%error, "the audit log cannot be written; trying again");
                }
                sleep(wait).await;
                wait = (wait * 2).min(RETRY.1);
            }
            Err(error) => {
                tracing::error!(%error, entries = entries.len(), "these are missing in the audit log");
                break;
            }
        }
    }
    for done in flushes {
        let _ = done.send(());
    }
}

/// In small steps: the one writer is for reports first.
async fn purge(app: &App) {
    let before = crate::now() - KEPT;
    loop {
        match app.store.purge_audit(before, app.config.audit_entries).await {
            Ok(true) => sleep(BREATH).await,
            Ok(false) => return,
            Err(error) => return tracing::warn!(%error, "old entries of the audit log could not be removed"),
        }
        if app.stopping.is_cancelled() {
            return;
        }
    }
}
