//! The signals that an agent handles.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Streams of the handled signals.
pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    detach: Signal,
}

impl Signals {
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            detach: signal(SignalKind::user_defined1())?,
        })
    }

    /// Waits for the next signal. True if the signal asks the agent to detach.
    pub(super) async fn next(&mut self) -> bool {
        tokio::select! {
            _ = self.terminate.recv() => false,
            _ = self.interrupt.recv() => false,
            _ = self.detach.recv() => true,
        }
    }
}
