//! The end of a process group, by a failure, a lost rank or an abort.

use crate::CommError;
use socket2::SockRef;
use std::{
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

/// Whether and why a group has ended. The group and its concurrent group share this state, and calls in progress
/// check it.
#[derive(Debug, Default)]
pub(super) struct End {
    reason: OnceLock<String>,
    /// The ranks whose machines do not respond, if this ended the group.
    unreachable: OnceLock<Vec<u32>>,
    /// The rank that closed a connection, and the error of the connection, if this ended the group.
    lost: OnceLock<(u32, String)>,
    aborted: AtomicBool,
    streams: Mutex<Vec<TcpStream>>,
    /// The listener at which other ranks connect for messages.
    listener: OnceLock<TcpListener>,
    /// The ends of the groups split from this group.
    split: Mutex<Vec<Weak<End>>>,
}

impl End {
    /// Ends this group. Closes its connections, so that calls that wait on these connections return.
    pub(super) fn call(&self, reason: String) {
        let _ = self.reason.set(reason);
        for stream in self.streams.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        if let Some(listener) = self.listener.get() {
            // On Linux, this wakes a thread that waits in `accept`.
            let _ = SockRef::from(listener).shutdown(Shutdown::Both);
        }
    }

    /// Ends this group because the machines of `peers` do not respond.
    pub(super) fn lose(&self, peers: Vec<u32>, reason: String) {
        if !self.has_ended() {
            let _ = self.unreachable.set(peers);
            self.call(reason);
        }
    }

    /// Ends this group and all groups split from it.
    pub(super) fn abort(&self, reason: &str) {
        self.aborted.store(true, Ordering::SeqCst);
        self.call(reason.into());
        let split = std::mem::take(&mut *self.split.lock().unwrap_or_else(PoisonError::into_inner));
        split.iter().filter_map(Weak::upgrade).for_each(|group| group.abort(reason));
    }

    /// Makes an abort of this group also abort `group`, which was split from this group.
    pub(super) fn abort_with(&self, group: &Arc<End>) {
        let mut split = self.split.lock().unwrap_or_else(PoisonError::into_inner);
        split.retain(|other| other.strong_count() > 0);
        split.push(Arc::downgrade(group));
        drop(split);
        if self.aborted.load(Ordering::SeqCst) {
            group.abort(
                self.reason.get().map_or("the group from which it was split was aborted", String::as_str),
            );
        }
    }

    /// Registers a connection to be closed when the group ends.
    pub(super) fn add(&self, stream: &TcpStream) -> std::io::Result<()> {
        let clone = stream.try_clone()?;
        self.streams.lock().unwrap_or_else(PoisonError::into_inner).push(clone);
        if self.has_ended() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        Ok(())
    }

    /// Registers the listener for messages, to be shut down when the group ends.
    pub(super) fn add_listener(&self, listener: &TcpListener) -> std::io::Result<()> {
        let _ = self.listener.set(listener.try_clone()?);
        Ok(())
    }

    pub(super) fn has_ended(&self) -> bool {
        self.reason.get().is_some()
    }

    pub(super) fn check_not_ended(&self, operation: &'static str) -> Result<(), CommError> {
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

    /// Ends the group because of `error`. Returns `error`, or the reason why the group had already ended.
    pub(super) fn failed(&self, error: CommError) -> CommError {
        if let Err(aborted) = self.check_not_ended(error.operation()) {
            // An abort shuts down connections, which a call sees as lost. Return the reason of the abort instead.
            return aborted;
        }
        if let CommError::Disconnected { peer, detail, .. } = &error {
            // Makes other calls in progress report this rank as lost, too.
            let _ = self.lost.set((*peer, detail.clone()));
        }
        self.call(error.to_string());
        error
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The group and its concurrent group have calls in progress. Either may notice first that a rank has exited.
    #[test]
    fn all_calls_in_progress_report_the_same_lost_rank() {
        let lost =
            || CommError::Disconnected { operation: "all_reduce", peer: 3, detail: "it is gone".into() };
        let end = End::default();
        assert!(matches!(end.failed(lost()), CommError::Disconnected { peer: 3, .. }));
        let other = end.failed(CommError::Failed { operation: "broadcast", detail: "closed".into() });
        assert!(matches!(other, CommError::Disconnected { operation: "broadcast", peer: 3, .. }), "{other}");
        // An abort also closes connections, but no rank is lost.
        let end = End::default();
        end.abort("asked to stop");
        assert!(matches!(end.failed(lost()), CommError::Aborted { .. }));
        assert!(matches!(end.check_not_ended("barrier"), Err(CommError::Aborted { .. })));
    }
}
