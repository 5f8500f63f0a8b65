//! How long ranks may continue without contact to the server.

use crate::fence::Fence;
use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

/// The duration of a lease until the server has sent it.
const UNTIL_TOLD: Duration = Duration::from_secs(20);

/// Margin: ranks read their lease every so often, and take a moment to end.
const MARGIN: Duration = Duration::from_secs(4);

/// How often the lease's deadline is extended.
const FENCE_EVERY: Duration = Duration::from_millis(500);

/// Renewed by every `Welcome` and `HeartbeatAck`. Once it is over, the server may have given the work to another agent, so the
/// ranks here must end. On the monotonic clock: setting the time of day fences nobody.
#[derive(Debug)]
pub(super) struct Lease(Mutex<(Instant, Duration)>);

impl Lease {
    pub(super) fn new() -> Self {
        Self(Mutex::new((Instant::now(), UNTIL_TOLD)))
    }

    /// The server answered a message that was sent at `sent`: its own clock began then at the earliest.
    pub(super) fn renew(&self, sent: Instant) {
        self.lock().0 = sent;
    }

    /// The server has sent how long it waits.
    pub(super) fn set_length(&self, length: Duration) {
        self.lock().1 = length;
    }

    /// How long the server has been silent, when that is past the lease.
    pub(super) fn overdue(&self) -> Option<Duration> {
        let (last, length) = *self.lock();
        Some(last.elapsed()).filter(|silent| *silent > length)
    }

    /// How long ranks may continue without further contact. A little less than the server's own limit, so that they have ended
    /// when it gives the work to others.
    pub(super) fn left(&self) -> Option<Duration> {
        let (last, length) = *self.lock();
        let length = length.saturating_sub((length / 5).min(MARGIN));
        length.checked_sub(last.elapsed())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, (Instant, Duration)> {
        // Two plain values, which are valid even if the thread that held the lock panicked.
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Extends the lease's deadline periodically while the server is in contact.
pub(super) async fn keep_fence(fence: Fence, lease: Arc<Lease>) {
    let mut complained = false;
    loop {
        if let Some(left) = lease.left()
            && let Err(error) = fence.set(left)
            && !std::mem::replace(&mut complained, true)
        {
            tracing::error!(%error, path = %fence.path().display(), "cannot extend the lease that ranks read");
        }
        tokio::time::sleep(FENCE_EVERY).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_counts_from_the_sending_not_from_the_answer() {
        let lease = Lease::new();
        assert_eq!(lease.overdue(), None);
        lease.set_length(Duration::from_secs(5));
        lease.renew(Instant::now().checked_sub(Duration::from_secs(6)).unwrap());
        assert!(lease.overdue().unwrap() >= Duration::from_secs(6));
        lease.renew(Instant::now());
        assert_eq!(lease.overdue(), None);
    }
}
