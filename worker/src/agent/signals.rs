//! The signals that an agent handles.

use tokio::signal::unix::{Signal, SignalKind, signal};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AgentSignal {
    /// SIGTERM or SIGINT: end in an orderly way, together with the ranks.
    End,
    /// SIGUSR1: end at once, and leave the ranks to the next agent.
    Detach,
}

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

    pub(super) async fn next(&mut self) -> AgentSignal {
        tokio::select! {
            _ = self.terminate.recv() => AgentSignal::End,
            _ = self.interrupt.recv() => AgentSignal::End,
            _ = self.detach.recv() => AgentSignal::Detach,
        }
    }
}
