//! How long ranks may continue without contact to the server.

use crate::fence::Fence;
use lockstep_host::lock;
use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

/// The length of the lease until the server has sent it.
const DEFAULT_LENGTH: Duration = Duration::from_secs(20);

/// Time from the ranks' deadline to the end of the lease (at most a fifth of the lease), because ranks read their deadline at
/// intervals and take a moment to end.
const MARGIN: Duration = Duration::from_secs(4);

/// Interval between two extensions of the ranks' deadline.
const FENCE_EVERY: Duration = Duration::from_millis(500);

/// The agent's lease. Every `Welcome` and `HeartbeatAck` renews it, and so does the agent while the server has certainly
/// ended. After the lease has expired, the server may have given the work to another agent, so the ranks of this agent
/// must end. The lease uses the monotonic clock, so changing the time of day does not affect it.
#[derive(Debug)]
pub(super) struct Lease {
    state: Mutex<State>,
    fence: Fence,
}

#[derive(Debug)]
struct State {
    /// The time of the last contact with the server, or of the agent's start if there was none.
    last_contact: Instant,
    length: Duration,
    /// Whether there was contact with the server since this agent started.
    has_contact: bool,
    has_logged_error: bool,
}

impl Lease {
    /// `fence` is the file in which ranks read their deadline.
    pub(super) fn new(fence: Fence) -> Self {
        let (last_contact, length) = (Instant::now(), DEFAULT_LENGTH);
        let state = State { last_contact, length, has_contact: false, has_logged_error: false };
        Self { state: Mutex::new(state), fence }
    }

    /// Renews the lease. `sent` is the time at which the agent sent the message to which the server has responded. The server's
    /// own lease did not begin before `sent`. When this returns, the new deadline is on disk, so a rank that is started next
    /// reads it.
    pub(super) fn renew(&self, sent: Instant) {
        {
            let mut state = lock(&self.state);
            (state.last_contact, state.has_contact) = (sent, true);
        }
        self.extend();
    }

    /// Sets the length of the lease, as sent by the server.
    pub(super) fn set_length(&self, length: Duration) {
        lock(&self.state).length = length;
    }

    /// How long the server has been silent. `None` unless the lease has expired.
    pub(super) fn silence_if_expired(&self) -> Option<Duration> {
        let State { last_contact, length, .. } = *lock(&self.state);
        Some(last_contact.elapsed()).filter(|silent| *silent > length)
    }

    /// How long ranks may continue without further contact. The time is a little less than the server's own limit, so that ranks
    /// have ended when the server gives the work to other agents. `None` after this time, and before the first contact: the ranks
    /// of an earlier agent then keep their deadline, because they could otherwise train forever if the agent is restarted
    /// repeatedly.
    fn remaining(&self) -> Option<Duration> {
        let State { last_contact, length, has_contact, .. } = *lock(&self.state);
        let length = length.saturating_sub((length / 5).min(MARGIN));
        length.checked_sub(last_contact.elapsed()).filter(|_| has_contact)
    }

    /// Writes the ranks' new deadline, if there is one ([`Self::remaining`]).
    fn extend(&self) {
        if let Some(remaining) = self.remaining()
            && let Err(error) = self.fence.set(remaining)
            && !std::mem::replace(&mut lock(&self.state).has_logged_error, true)
        {
            tracing::error!(%error, path = %self.fence.path.display(), "cannot extend the lease that ranks read");
        }
    }
}

/// Extends the ranks' deadline periodically, except while the lease has expired.
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
    fn ranks_keep_their_deadline_until_first_contact() {
        let dir = tempfile::tempdir().unwrap();
        let lease = Lease::new(Fence::open(dir.path()).unwrap());
        let deadline = || std::fs::read_to_string(dir.path().join("lease")).unwrap();
        lease.extend();
        lease.set_length(Duration::from_secs(15));
        lease.extend();
        assert_eq!(deadline(), "", "an earlier agent's deadline is kept");
        lease.renew(Instant::now());
        let first = deadline();
        assert_ne!(first, "", "a rank that starts now has a deadline");
        assert!(lease.remaining().unwrap() > Duration::from_secs(10));
        lease.renew(Instant::now() + Duration::from_secs(5));
        assert!(deadline() > first);
    }

    #[test]
    fn the_lease_starts_when_the_message_is_sent() {
        let dir = tempfile::tempdir().unwrap();
        let lease = Lease::new(Fence::open(dir.path()).unwrap());
        assert_eq!(lease.silence_if_expired(), None);
        lease.set_length(Duration::from_secs(5));
        lease.renew(Instant::now().checked_sub(Duration::from_secs(6)).unwrap());
        assert!(lease.silence_if_expired().unwrap() >= Duration::from_secs(6));
        lease.renew(Instant::now());
        assert_eq!(lease.silence_if_expired(), None);
    }
}
