//! How a group ends.

use crate::CommError;
use socket2::SockRef;
use std::{
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

/// How a group has ended, for calls in progress, also in the group concurrent to it.
#[derive(Debug, Default)]
pub(super) struct End {
    reason: OnceLock<String>,
    /// The ranks whose machines do not answer, if this is the reason.
    unreachable: OnceLock<Vec<u32>>,
    /// The rank that closed a connection, and how that showed, if this is the reason.
    lost: OnceLock<(u32, String)>,
    aborted: AtomicBool,
    streams: Mutex<Vec<TcpStream>>,
    /// The listener at which other ranks connect for messages.
    listener: OnceLock<TcpListener>,
    /// The ends of groups that were split from this one.
    split: Mutex<Vec<Weak<End>>>,
}

impl End {
    /// Ends this group: its connections are closed, so calls that wait for them return.
    pub(super) fn call(&self, reason: String) {
        let _ = self.reason.set(reason);
        for stream in self.streams.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        if let Some(listener) = self.listener.get() {
            // On Linux this wakes a thread that waits in `accept`.
            let _ = SockRef::from(listener).shutdown(Shutdown::Both);
        }
    }

    /// Ends this group because the machines of these ranks do not answer.
    pub(super) fn lose(&self, peers: Vec<u32>, reason: String) {
        if !self.has_come() {
            let _ = self.unreachable.set(peers);
            self.call(reason);
        }
    }

    /// Ends this group and all that were split from it.
    pub(super) fn abort(&self, reason: &str) {
        self.aborted.store(true, Ordering::SeqCst);
        self.call(reason.into());
        let split = std::mem::take(&mut *self.split.lock().unwrap_or_else(PoisonError::into_inner));
        split.iter().filter_map(Weak::upgrade).for_each(|group| group.abort(reason));
    }

    /// An abort of this group is one of `group`, too.
    pub(super) fn split_off(&self, group: &Arc<End>) {
        let mut split = self.split.lock().unwrap_or_else(PoisonError::into_inner);
        split.retain(|other| other.strong_count() > 0);
        split.push(Arc::downgrade(group));
        drop(split);
        if self.aborted.load(Ordering::SeqCst) {
            group.abort(
                self.reason.get().map_or("the group that it was split from was aborted", String::as_str),
            );
        }
    }

    /// Has a connection closed when the group ends.
    pub(super) fn add(&self, stream: &TcpStream) -> std::io::Result<()> {
        let clone = stream.try_clone()?;
        self.streams.lock().unwrap_or_else(PoisonError::into_inner).push(clone);
        if self.has_come() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        Ok(())
    }

    /// The same for the listener, of which there is one.
    pub(super) fn add_listener(&self, listener: &TcpListener) -> std::io::Result<()> {
        let _ = self.listener.set(listener.try_clone()?);
        Ok(())
    }

    pub(super) fn has_come(&self) -> bool {
        self.reason.get().is_some()
    }

    pub(super) fn not_ended(&self, operation: &'static str) -> Result<(), CommError> {
        let Some(reason) = self.reason.get() else { return Ok(()) };
        Err(match (self.unreachable.get(), self.lost.get()) {
            (Some(peers), _) => {
                CommError::Unreachable { operation, peers: peers.clone(), detail: reason.clone() }
            }
            (None, Some((peer, detail))) => {
                CommError::Disconnected { operation, peer: *peer, detail: detail.clone() }
            }
            (None, None) => CommError::Aborted { operation, reason: reason.clone() },
        })
    }

    /// Ends the group because of `error`, and gives that error, or the end that came before it.
    pub(super) fn failed(&self, error: CommError) -> CommError {
        if let Err(aborted) = self.not_ended(error.operation()) {
            // A call sees a connection that an abort has shut down as lost: return the abort's reason instead.
            return aborted;
        }
        if let CommError::Disconnected { peer, detail, .. } = &error {
            // Calls that are under way at the same time have lost this rank, too.
            let _ = self.lost.set((*peer, detail.clone()));
        }
        self.call(error.to_string());
        error
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A group has calls under way in two lanes, and either may see first that a rank is gone.
    #[test]
    fn all_calls_under_way_have_lost_the_rank_that_one_of_them_has_lost() {
        let lost =
            || CommError::Disconnected { operation: "all_reduce", peer: 3, detail: "it is gone".into() };
        let end = End::default();
        assert!(matches!(end.failed(lost()), CommError::Disconnected { peer: 3, .. }));
        let other = end.failed(CommError::Failed { operation: "broadcast", detail: "closed".into() });
        assert!(matches!(other, CommError::Disconnected { operation: "broadcast", peer: 3, .. }), "{other}");
        // A rank that is ended itself loses connections by that, and no rank.
        let end = End::default();
        end.abort("asked to stop");
        assert!(matches!(end.failed(lost()), CommError::Aborted { .. }));
        assert!(matches!(end.not_ended("barrier"), Err(CommError::Aborted { .. })));
    }
}
