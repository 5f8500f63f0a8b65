//! What happens to tokens and sessions by themselves: they expire, when they were used is stored, and old ones are removed.

use crate::app::App;
use std::time::Duration;
use tokio::time::{Instant, MissedTickBehavior, interval};

/// How soon the websockets of a token that has expired are closed, at the latest.
const EXPIRE_EVERY: Duration = Duration::from_secs(1);
/// When a token was last used is stored so often.
const STORE_USE_EVERY: Duration = Duration::from_secs(60);
const PURGE_EVERY: Duration = Duration::from_secs(3600);
/// A token that is no longer valid is listed for so long.
const KEPT: Duration = Duration::from_secs(90 * 24 * 3600);

/// Runs until dropped.
pub(crate) async fn run(app: App) {
    let mut tick = interval(EXPIRE_EVERY);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut stored, mut purged) = (Instant::now(), None);
    loop {
        tick.tick().await;
        let now = crate::now();
        app.access.expire(now);
        if stored.elapsed() >= STORE_USE_EVERY {
            store_use(&app).await;
            stored = Instant::now();
        }
        if purged.is_none_or(|at: Instant| at.elapsed() >= PURGE_EVERY) {
            app.access.forget(now - KEPT);
            if let Err(error) = app.store.purge_access(now, now - KEPT).await {
                tracing::warn!(%error, "old tokens and sessions could not be removed");
            }
            purged = Some(Instant::now());
        }
    }
}

/// Stores when tokens were last used, many at once.
pub(crate) async fn store_use(app: &App) {
    let used = app.access.take_used();
    if !used.is_empty()
        && let Err(error) = app.store.note_token_use(&used).await
    {
        tracing::warn!(%error, "when tokens were last used could not be stored");
    }
}
