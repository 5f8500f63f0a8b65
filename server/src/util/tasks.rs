//! The server's own tasks, and the signal that it stops.

use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tasks {
    /// Cancelled when the server stops: websockets close, tasks end.
    pub(crate) stopping: CancellationToken,
    /// Websockets and the server's own tasks.
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
