//! Lists objects, then watches their changes, and lists them again after each watch.

use super::cluster::{Cluster, INITIAL_BACKOFF, Kind, is_retryable, to_json};
use futures_util::StreamExt as _;
use kube::{
    Error,
    api::{ListParams, WatchEvent, WatchParams},
};
use serde_json::Value;
use std::{
    pin::pin,
    time::{Duration, Instant},
};
use tokio::{
    sync::mpsc::Sender,
    time::{sleep, timeout},
};

/// Time after which the API server ends a watch.
const WATCH_SECS: u32 = 240;
/// Time without data after which a connection counts as lost.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(WATCH_SECS as u64 + 30);
/// If a watch ends before this time, the pause before the next watch is longer.
const MIN_WATCH_TIME: Duration = Duration::from_secs(1);
/// HTTP status (Gone) with which the API server refuses a watch whose `resourceVersion` is too old. Under load this happens even right
/// after a list.
const STATUS_GONE: u16 = 410;

/// A message about the observed objects.
#[derive(Debug)]
pub(super) enum Observation {
    /// All objects that exist.
    Listed(Vec<Value>),
    Changed(Value),
    Deleted(Value),
}

/// Sends all objects, then their changes. Retries after errors, except an error that [`is_retryable`] excludes, which it returns.
pub(super) async fn observe(
    cluster: &Cluster,
    kind: Kind,
    params: ListParams,
    sender: &Sender<(Kind, Observation)>,
) -> anyhow::Error {
    let mut backoff = INITIAL_BACKOFF;
    loop {
        let began = Instant::now();
        match list_and_watch(cluster, kind, &params, sender).await {
            Ok(()) if began.elapsed() >= MIN_WATCH_TIME => backoff = INITIAL_BACKOFF,
            Ok(()) => {}
            Err(Error::Api(status)) if status.code == STATUS_GONE => {}
            Err(error) if is_retryable(&error) => cluster.report_lost(&error),
            Err(error) => return cluster.explain(&format!("watching {kind:?}s"), &error),
        }
        sleep(backoff.next_pause()).await;
    }
}

/// Sends the objects, and then the changes of one watch.
async fn list_and_watch(
    cluster: &Cluster,
    kind: Kind,
    params: &ListParams,
    sender: &Sender<(Kind, Observation)>,
) -> Result<(), Error> {
    let api = cluster.api(kind);
    let list = cluster.with_time_limit(api.list(params)).await?;
    cluster.report_restored();
    // The receiver outlives this call, so sending does not fail.
    let send = async |observation| drop(sender.send((kind, observation)).await);
    send(Observation::Listed(list.items.into_iter().map(to_json).collect())).await;
    let watch_params = WatchParams {
        label_selector: params.label_selector.clone(),
        field_selector: params.field_selector.clone(),
        timeout: Some(WATCH_SECS),
        ..WatchParams::default()
    };
    let version = list.metadata.resource_version.unwrap_or_default();
    let mut events = pin!(api.watch(&watch_params, &version).await?);
    while let Ok(Some(Ok(event))) = timeout(SILENCE_TIMEOUT, events.next()).await {
        match event {
            WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                send(Observation::Changed(to_json(object))).await;
            }
            WatchEvent::Deleted(object) => send(Observation::Deleted(to_json(object))).await,
            WatchEvent::Bookmark(_) => {}
            WatchEvent::Error(_) => break,
        }
    }
    Ok(())
}
