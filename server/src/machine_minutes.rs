//! Stores what machines measured, and removes what is older than a day.

use crate::{app::App, machines::minute_of};
use std::time::Duration;
use tokio::time::{Instant, MissedTickBehavior, interval};

/// Most of what the end of a server that is killed takes away, besides the minute that is under way.
const STORE_EVERY: Duration = Duration::from_secs(20);
const PURGE_EVERY: Duration = Duration::from_secs(600);
/// How long means of minutes are kept.
pub(crate) const KEPT: Duration = Duration::from_secs(24 * 3600);

/// Runs until dropped.
pub(crate) async fn run(app: App) {
    let mut tick = interval(STORE_EVERY);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut purged: Option<Instant> = None;
    loop {
        tick.tick().await;
        store(&app, false).await;
        if purged.is_none_or(|at| at.elapsed() >= PURGE_EVERY) {
            let before = minute_of(crate::now() - KEPT);
            if let Err(error) = app.store.purge_machine_minutes(before).await {
                tracing::warn!(%error, "old measurements of machines could not be removed");
            }
            purged = Some(Instant::now());
        }
    }
}

/// Stores finished minutes; at the server's end also the one under way.
pub(crate) async fn store(app: &App, unfinished: bool) {
    let minutes = app.machines.take_minutes(crate::now(), unfinished);
    if !minutes.is_empty()
        && let Err(error) = app.store.add_machine_minutes(&minutes).await
    {
        tracing::warn!(%error, "measurements of machines could not be stored");
        app.machines.give_back(minutes);
    }
}
