//! Lists objects, then watches changes that follow the listed version.

use super::cluster::{Cluster, Kind, RETRY, is_retryable, to_json};
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
pub(super) enum Observation {
    /// All objects that exist.
    Listed(Vec<Value>),
    Changed(Value),
    Deleted(Value),
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
    sender: Sender<(Kind, Observation)>,
) -> anyhow::Result<()> {
    let api = cluster.api(kind);
    let list_params = ListParams { label_selector: labels, field_selector: fields, ..ListParams::default() };
    let mut backoff = RETRY;
    loop {
        let list = match cluster.with_time_limit(api.list(&list_params)).await {
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
        let objects = list.items.into_iter().map(to_json).collect();
        if sender.send((kind, Observation::Listed(objects))).await.is_err() {
            return Ok(());
        }
        let watch_params = WatchParams {
            label_selector: list_params.label_selector.clone(),
            field_selector: list_params.field_selector.clone(),
            timeout: Some(WATCH_SECS),
            bookmarks: true,
            ..WatchParams::default()
        };
        loop {
            let must_list_again = match api.watch(&watch_params, &version).await {
                Ok(events) => {
                    cluster.report_restored();
                    let (before, began) = (version.clone(), Instant::now());
                    let must_list_again = forward_events(kind, events, &mut version, &sender).await;
                    if sender.is_closed() {
                        return Ok(());
                    }
                    if before == version && began.elapsed() < MIN_WATCH_TIME {
                        // Pauses only after a server that ends each watch at once. A watch without changes ends at its time limit and
                        // continues without a pause.
                        sleep(backoff.pause()).await;
                    } else {
                        backoff = RETRY;
                    }
                    must_list_again
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
            if must_list_again {
                break;
            }
        }
    }
}

fn update_version(version: &mut String, object: &DynamicObject) {
    if let Some(newest) = &object.metadata.resource_version {
        version.clone_from(newest);
    }
}

/// Forwards the events of one watch until the watch ends. Returns whether changes since the last version are lost, so that the objects must
/// be listed again. Otherwise the watch can continue from the last version.
async fn forward_events(
    kind: Kind,
    events: impl futures_util::Stream<Item = Result<WatchEvent<DynamicObject>, Error>>,
    version: &mut String,
    sender: &Sender<(Kind, Observation)>,
) -> bool {
    let mut events = pin!(events);
    loop {
        let next = tokio::select! {
            next = tokio::time::timeout(SILENCE_TIMEOUT, events.next()) => next,
            () = sender.closed() => return false,
        };
        let observation = match next {
            Ok(Some(Ok(WatchEvent::Bookmark(mark)))) => {
                *version = mark.metadata.resource_version;
                continue;
            }
            Ok(Some(Ok(WatchEvent::Added(object) | WatchEvent::Modified(object)))) => {
                update_version(version, &object);
                Observation::Changed(to_json(object))
            }
            Ok(Some(Ok(WatchEvent::Deleted(object)))) => {
                update_version(version, &object);
                Observation::Deleted(to_json(object))
            }
            // Usually status 410. Listing the objects again also handles other errors.
            Ok(Some(Ok(WatchEvent::Error(_)))) => return true,
            Ok(Some(Err(Error::Api(status)))) if status.code == STATUS_GONE => return true,
            Ok(Some(Err(_)) | None) | Err(_) => return false,
        };
        if sender.send((kind, observation)).await.is_err() {
            return false;
        }
    }
}
