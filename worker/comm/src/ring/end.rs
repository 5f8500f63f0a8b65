//! The end of a process group, by a failure, a lost rank or an abort.

use crate::CommError;
use lockstep_host::lock;
use socket2::SockRef;
use std::{
    io,
    net::Shutdown,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Mutex, OnceLock, Weak},
};

/// Whether and why a group has ended. The group and its concurrent group
/// ([`ProcessGroup::concurrent_group`](crate::ProcessGroup::concurrent_group), a second ring for collectives that run at the same
/// time) share this state, and calls in progress check it.
#[derive(Debug, Default)]
pub(crate) struct End {
    /// The error of the call that ended the group. Other calls return the same error, with `operation` set to their own name.
    cause: OnceLock<CommError>,
    /// The reason of an abort. The group may have ended earlier for another cause.
    abort_reason: OnceLock<String>,
    /// The connections, and the listener at which other ranks connect for messages.
    sockets: Mutex<Vec<OwnedFd>>,
    split_ends: Mutex<Vec<Weak<End>>>,
}

impl End {
    /// Ends this group as aborted for `reason`, unless it has already ended.
    pub(super) fn close(&self, reason: String) {
        self.close_with(CommError::Aborted { operation: "", reason });
    }

    /// Ends this group because of `cause`, and shuts the sockets down, so that calls that wait on them return. (On Linux, this also
    /// ends a wait in `accept`.) The first cause is kept.
    pub(super) fn close_with(&self, cause: CommError) {
        let _ = self.cause.set(cause);
        for socket in lock(&self.sockets).iter() {
            let _ = SockRef::from(socket).shutdown(Shutdown::Both);
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

    /// Registers a connection or a listener, to be shut down when the group ends.
    pub(super) fn add(&self, socket: &impl AsFd) -> io::Result<()> {
        let clone = socket.as_fd().try_clone_to_owned()?;
        lock(&self.sockets).push(clone);
        if self.has_ended() {
            let _ = SockRef::from(socket).shutdown(Shutdown::Both);
        }
        Ok(())
    }

    pub(super) fn has_ended(&self) -> bool {
        self.cause.get().is_some()
    }

    pub(crate) fn check_not_ended(&self, operation: &'static str) -> Result<(), CommError> {
        let Some(mut error) = self.cause.get().cloned() else { return Ok(()) };
        *error.operation_mut() = operation;
        Err(error)
    }

    /// Ends the group because of `error`, which the neighbours notice at once. Returns `error`, or the reason why the group had
    /// already ended.
    pub(crate) fn fail_with(&self, mut error: CommError) -> CommError {
        if let Err(aborted) = self.check_not_ended(error.operation_mut()) {
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
        let lost = || CommError::Disconnected { operation: "all_reduce", peer: 3, detail: None };
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
