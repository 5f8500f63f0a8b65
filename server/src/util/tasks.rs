//! The server's background tasks, and the signal that stops them.

use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// The background tasks of a server. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tasks {
    /// Cancelled when the server stops. Websockets then close, and tasks end.
    pub(crate) stopping: CancellationToken,
    /// Tracks websockets and background tasks, for which a stopping server waits.
    pub(crate) tracker: TaskTracker,
}

impl Tasks {
    /// Runs a task until the server stops.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let stopping = self.stopping.clone();
        self.tracker.spawn(async move {
            tokio::select! {
                () = task => {}
                () = stopping.cancelled() => {}
            }
        });
    }
}
