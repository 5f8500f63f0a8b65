//! Lists objects, then watches changes that follow the listed version.

use super::cluster::{Cluster, Kind, RETRY, is_retryable, plain};
use futures_util::StreamExt as _;
use kube::{
    Error,
    api::{DynamicObject, ListParams, WatchEvent, WatchParams},
};
use serde_json::Value;
use std::{
    pin::pin,
    time::{Duration, Instant},
};
use tokio::{sync::mpsc::Sender, time::sleep};

/// Time after which the API server ends a watch. The watch is then continued.
const WATCH_SECS: u32 = 240;
/// Time without data after which a connection counts as lost.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(WATCH_SECS as u64 + 30);
/// A watch that ends before this time and without a change counts as refused.
const MIN_WATCH_TIME: Duration = Duration::from_secs(1);
/// Status of the API server if it no longer has the version from which a watch continues (Gone).
const STATUS_GONE: u16 = 410;

/// A message about the observed objects.
#[derive(Debug)]
pub(super) enum Seen {
    /// All objects.
    All(Vec<Value>),
    Changed(Value),
    Gone(Value),
}

/// Sends the objects and then their changes, until the receiver is dropped.
///
/// # Errors
/// Kubernetes refuses access to the objects.
pub(super) async fn observe(
    cluster: &Cluster,
    kind: Kind,
    labels: Option<String>,
    fields: Option<String>,
    to: Sender<(Kind, Seen)>,
) -> anyhow::Result<()> {
    let api = cluster.api(kind);
    let wanted = ListParams { label_selector: labels, field_selector: fields, ..ListParams::default() };
    let mut backoff = RETRY;
    loop {
        let list = match cluster.with_time_limit(api.list(&wanted)).await {
            Ok(list) => list,
            Err(error) if is_retryable(&error) => {
                cluster.report_lost(&error);
                sleep(backoff.pause()).await;
                continue;
            }
            Err(error) => return Err(cluster.explain(&format!("listing {kind:?}s"), &error)),
        };
        cluster.report_restored();
        let mut version = list.metadata.resource_version.unwrap_or_default();
        if to.send((kind, Seen::All(list.items.into_iter().map(plain).collect()))).await.is_err() {
            return Ok(());
        }
        let follow = WatchParams {
            label_selector: wanted.label_selector.clone(),
            field_selector: wanted.field_selector.clone(),
            timeout: Some(WATCH_SECS),
            bookmarks: true,
            ..WatchParams::default()
        };
        loop {
            let is_lost = match api.watch(&follow, &version).await {
                Ok(events) => {
                    cluster.report_restored();
                    let (before, began) = (version.clone(), Instant::now());
                    let is_lost = forward_events(kind, events, &mut version, &to).await;
                    if to.is_closed() {
                        return Ok(());
                    }
                    if before == version && began.elapsed() < MIN_WATCH_TIME {
                        // Pauses only after a server that ends each watch at once. A watch without changes ends at its time limit and
                        // continues without a pause.
                        sleep(backoff.pause()).await;
                    } else {
                        backoff = RETRY;
                    }
                    is_lost
                }
                Err(Error::Api(status)) if status.code == STATUS_GONE => {
                    // The API server no longer has the version that it just listed, which happens under load.
                    sleep(backoff.pause()).await;
                    true
                }
                Err(error) if is_retryable(&error) => {
                    cluster.report_lost(&error);
                    sleep(backoff.pause()).await;
                    false
                }
                Err(error) => return Err(cluster.explain(&format!("watching {kind:?}s"), &error)),
            };
            if is_lost {
                break;
            }
        }
    }
}

fn seen_version(version: &mut String, object: &DynamicObject) {
    if let Some(seen) = &object.metadata.resource_version {
        version.clone_from(seen);
    }
}

/// Forwards the events of one watch until the watch ends. Returns whether changes since the last version are lost, so that the objects must
/// be listed again. Otherwise the watch can continue from the last version.
async fn forward_events(
    kind: Kind,
    events: impl futures_util::Stream<Item = Result<WatchEvent<DynamicObject>, Error>>,
    version: &mut String,
    to: &Sender<(Kind, Seen)>,
) -> bool {
    let mut events = pin!(events);
    loop {
        let next = tokio::select! {
            next = tokio::time::timeout(SILENCE_TIMEOUT, events.next()) => next,
            () = to.closed() => return false,
        };
        let seen = match next {
            Ok(Some(Ok(WatchEvent::Bookmark(mark)))) => {
                *version = mark.metadata.resource_version;
                continue;
            }
            Ok(Some(Ok(WatchEvent::Added(object) | WatchEvent::Modified(object)))) => {
                seen_version(version, &object);
                Seen::Changed(plain(object))
            }
            Ok(Some(Ok(WatchEvent::Deleted(object)))) => {
                seen_version(version, &object);
                Seen::Gone(plain(object))
            }
            // Usually status 410. Listing the objects again also handles other errors.
            Ok(Some(Ok(WatchEvent::Error(_)))) => return true,
            Ok(Some(Err(Error::Api(status)))) if status.code == STATUS_GONE => return true,
            Ok(Some(Err(_)) | None) | Err(_) => return false,
        };
        if to.send((kind, seen)).await.is_err() {
            return false;
        }
    }
}
