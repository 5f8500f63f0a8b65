//! What is left of deleted jobs goes bit by bit, beside everything else that is written.

use crate::app::App;
use std::time::{Duration, Instant};

/// After a failure: the database may be away.
const TRY_AGAIN: Duration = Duration::from_secs(5);
/// The longest rest between two bits.
const LONGEST_REST: Duration = Duration::from_millis(200);

/// Removes until `app` stops: first what an earlier server did not get to.
pub(crate) async fn run(app: App) {
    loop {
        let began = Instant::now();
        match app.store.purge_deleted().await {
            // Half of the writer's time at most: reports of running jobs come first.
            Ok(true) => tokio::time::sleep(began.elapsed().min(LONGEST_REST)).await,
            Ok(false) => app.deleted.notified().await,
            Err(error) => {
                tracing::warn!(%error, "what is left of deleted jobs could not be removed; trying again");
                tokio::time::sleep(TRY_AGAIN).await;
            }
        }
    }
}
