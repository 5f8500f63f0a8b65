//! The end of a process group, by a failure, a lost rank or an abort.

use crate::CommError;
use lockstep_host::lock;
use socket2::SockRef;
use std::{
    net::{Shutdown, TcpListener, TcpStream},
    sync::{Arc, Mutex, OnceLock, Weak},
};

/// Whether and why a group has ended. The group and its concurrent group
/// ([`ProcessGroup::concurrent_group`](crate::ProcessGroup::concurrent_group), a second ring for collectives that run at the same
/// time) share this state, and calls in progress check it.
#[derive(Debug, Default)]
pub(super) struct End {
    /// The error of the call that ended the group. Other calls get the same error with their own operation.
    cause: OnceLock<CommError>,
    /// The reason of an abort. The group may have ended earlier for another cause.
    abort_reason: OnceLock<String>,
    streams: Mutex<Vec<TcpStream>>,
    /// The listener at which other ranks connect for messages.
    listener: OnceLock<TcpListener>,
    /// The ends of the groups split from this group.
    split_ends: Mutex<Vec<Weak<End>>>,
}

impl End {
    /// Ends this group as aborted for `reason`, unless it has already ended.
    pub(super) fn close(&self, reason: String) {
        self.close_with(CommError::Aborted { operation: "", reason });
    }

    /// Ends this group because of `cause`, and closes the connections, so that calls that wait on them return. The first
    /// cause is kept.
    pub(super) fn close_with(&self, cause: CommError) {
        let _ = self.cause.set(cause);
        for stream in lock(&self.streams).iter() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        if let Some(listener) = self.listener.get() {
            // On Linux, this wakes a thread that waits in `accept`.
            let _ = SockRef::from(listener).shutdown(Shutdown::Both);
        }
    }

    /// Ends this group and all groups split from it.
    pub(super) fn abort(&self, reason: &str) {
        let _ = self.abort_reason.set(reason.into());
        self.close(reason.into());
        let split = std::mem::take(&mut *lock(&self.split_ends));
        split.iter().filter_map(Weak::upgrade).for_each(|group| group.abort(reason));
    }

    /// Makes an abort of this group also abort `group`, which was split from this group.
    pub(super) fn propagate_abort_to(&self, group: &Arc<End>) {
        let mut split = lock(&self.split_ends);
        split.retain(|other| other.strong_count() > 0);
        split.push(Arc::downgrade(group));
        drop(split);
        if let Some(reason) = self.abort_reason.get() {
            group.abort(reason);
        }
    }

    /// Registers a connection to be closed when the group ends.
    pub(super) fn add(&self, stream: &TcpStream) -> std::io::Result<()> {
        let clone = stream.try_clone()?;
        lock(&self.streams).push(clone);
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
        self.cause.get().is_some()
    }

    pub(super) fn check_not_ended(&self, operation: &'static str) -> Result<(), CommError> {
        let Some(mut error) = self.cause.get().cloned() else { return Ok(()) };
        *error.operation() = operation;
        Err(error)
    }

    /// Ends the group because of `error`. Returns `error`, or the reason why the group had already ended.
    pub(super) fn fail_with(&self, mut error: CommError) -> CommError {
        if let Err(aborted) = self.check_not_ended(error.operation()) {
            // An abort shuts down connections, which a call sees as lost. Return the reason of the abort instead.
            return aborted;
        }
        match &error {
            // Other calls in progress report this rank as lost, too.
            CommError::Disconnected { .. } => self.close_with(error.clone()),
            other => self.close(other.to_string()),
        }
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
        assert!(matches!(end.fail_with(lost()), CommError::Disconnected { peer: 3, .. }));
        let other = end.fail_with(CommError::Failed { operation: "broadcast", detail: "closed".into() });
        assert!(matches!(other, CommError::Disconnected { operation: "broadcast", peer: 3, .. }), "{other}");
        // An abort also closes connections, but no rank is lost.
        let end = End::default();
        end.abort("asked to stop");
        assert!(matches!(end.fail_with(lost()), CommError::Aborted { .. }));
        assert!(matches!(end.check_not_ended("barrier"), Err(CommError::Aborted { .. })));
    }
}
