//! How long ranks may continue without contact to the server.

use crate::fence::Fence;
use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// The duration of a lease until the server has sent it.
const DEFAULT_LENGTH: Duration = Duration::from_secs(20);

/// Margin: ranks read their lease every so often, and take a moment to end.
const MARGIN: Duration = Duration::from_secs(4);

/// How often the lease's deadline is extended.
const FENCE_EVERY: Duration = Duration::from_millis(500);

/// The agent's lease, renewed by every `Welcome` and `HeartbeatAck`. Once it has expired, the server may have given the work to another
/// agent, so the ranks here must end. It uses the monotonic clock: setting the time of day does not expire it.
#[derive(Debug)]
pub(super) struct Lease {
    state: Mutex<State>,
    fence: Fence,
    has_complained: AtomicBool,
}

#[derive(Debug)]
struct State {
    /// When the server was last in contact; before that, when this agent started.
    last: Instant,
    length: Duration,
    /// The server was in contact since this agent started.
    renewed: bool,
}

impl Lease {
    /// `fence`: the file in which ranks read their deadline.
    pub(super) fn new(fence: Fence) -> Self {
        let state = State { last: Instant::now(), length: DEFAULT_LENGTH, renewed: false };
        Self { state: Mutex::new(state), fence, has_complained: AtomicBool::new(false) }
    }

    /// Renews the lease from `sent`, when the message was sent that the server has answered: the server's own lease began no earlier.
    /// The new deadline is on disk when this returns, so a rank that is started next reads it.
    pub(super) fn renew(&self, sent: Instant) {
        {
            let mut state = self.lock();
            (state.last, state.renewed) = (sent, true);
        }
        self.extend();
    }

    /// The server has sent how long it waits.
    pub(super) fn set_length(&self, length: Duration) {
        self.lock().length = length;
    }

    /// How long the server has been silent, when that is past the lease.
    pub(super) fn overdue(&self) -> Option<Duration> {
        let State { last, length, .. } = *self.lock();
        Some(last.elapsed()).filter(|silent| *silent > length)
    }

    /// How long ranks may continue without further contact. A little less than the server's own limit, so that they have ended
    /// when it gives the work to others. `None` also before the first contact: the ranks of an earlier agent keep the deadline
    /// that it gave them, or starting agents again and again would let them train for ever.
    fn left(&self) -> Option<Duration> {
        let State { last, length, renewed } = *self.lock();
        let length = length.saturating_sub((length / 5).min(MARGIN));
        length.checked_sub(last.elapsed()).filter(|_| renewed)
    }

    /// Gives ranks the time that is left.
    fn extend(&self) {
        if let Some(left) = self.left()
            && let Err(error) = self.fence.set(left)
            && !self.has_complained.swap(true, Ordering::Relaxed)
        {
            tracing::error!(%error, path = %self.fence.path().display(), "cannot extend the lease that ranks read");
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Plain values, which are valid even if the thread that held the lock panicked.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Extends the lease's deadline periodically while the server is in contact.
pub(super) async fn keep_fence(lease: Arc<Lease>) {
    loop {
        lease.extend();
        tokio::time::sleep(FENCE_EVERY).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_keep_their_deadline_until_the_server_is_in_contact() {
        let dir = tempfile::tempdir().unwrap();
        let lease = Lease::new(Fence::open(dir.path()).unwrap());
        let deadline = || std::fs::read_to_string(dir.path().join("lease")).unwrap();
        lease.extend();
        lease.set_length(Duration::from_secs(15));
        lease.extend();
        assert_eq!(deadline(), "", "what an earlier agent wrote stays");
        lease.renew(Instant::now());
        let first = deadline();
        assert_ne!(first, "", "a rank that starts now has a deadline");
        assert!(lease.left().unwrap() > Duration::from_secs(10));
        lease.renew(Instant::now() + Duration::from_secs(5));
        assert!(deadline() > first);
    }

    #[test]
    fn it_counts_from_the_sending_not_from_the_answer() {
        let dir = tempfile::tempdir().unwrap();
        let lease = Lease::new(Fence::open(dir.path()).unwrap());
        assert_eq!(lease.overdue(), None);
        lease.set_length(Duration::from_secs(5));
        lease.renew(Instant::now().checked_sub(Duration::from_secs(6)).unwrap());
        assert!(lease.overdue().unwrap() >= Duration::from_secs(6));
        lease.renew(Instant::now());
        assert_eq!(lease.overdue(), None);
    }
}
