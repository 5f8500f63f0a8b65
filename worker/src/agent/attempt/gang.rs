//! The coordinated start of an attempt with ranks on several agents. An agent whose preflight check has passed reports
//! this and waits for the other agents. So no rank waits at the rendezvous while another machine still examines its
//! dataset, and no rank is started if the check of another machine fails.

use super::super::preflight::Refusal;
use lockstep_comm::rendezvous::free_port;
use lockstep_protocol::agent::StartAttempt;
use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};
use tokio::sync::watch;

/// Time limit for the checks of other machines, which may have to copy a large dataset first.
const CHECKS_TIMEOUT: Duration = Duration::from_secs(12 * 3600);

/// Chooses the port at which rank 0 listens, on the machine of rank 0.
pub(super) fn choose_port(start: &StartAttempt) -> Result<u16, Refusal> {
    free_port(&start.master_addr).map_err(|error| {
        Refusal::NotStarted(format!("{} has no free port for the ranks: {error}", start.master_addr))
    })
}

/// State that the agent's session and the task of an attempt share before the start.
#[derive(Debug, Clone)]
pub(in crate::agent) struct Gang {
    /// Set when the check has passed, to the port of rank 0 on the machine of rank 0 and to `None` on the other machines.
    ready_port: Arc<OnceLock<Option<u16>>>,
    /// The port of rank 0. `None` until all machines are ready.
    master_port: watch::Sender<Option<u16>>,
}

impl Gang {
    pub(super) fn new() -> Self {
        Self { ready_port: Arc::default(), master_port: watch::Sender::new(None) }
    }

    /// `None` until the check has passed. Then what this machine reports to the server: the port of rank 0, or `None` if rank 0 is
    /// elsewhere.
    pub(in crate::agent) fn ready_port(&self) -> Option<Option<u16>> {
        self.ready_port.get().copied()
    }

    /// Lets the ranks start. The session calls this when the server reports that all machines are ready.
    pub(in crate::agent) fn launch(&self, master_port: u16) {
        // Only the server's first `Launch` message counts.
        self.master_port.send_if_modified(|port| port.is_none() && port.replace(master_port).is_none());
    }

    /// Reports that the preflight check has passed on this machine, waits for the other machines, and returns the
    /// port of rank 0.
    ///
    /// # Errors
    /// Why the ranks cannot be started.
    pub(super) async fn wait_for_machines(&self, start: &StartAttempt) -> Result<u16, Refusal> {
        let port = start.has_rank_0().then(|| choose_port(start)).transpose()?;
        let _ = self.ready_port.set(port);
        let mut master_port = self.master_port.subscribe();
        match tokio::time::timeout(CHECKS_TIMEOUT, master_port.wait_for(Option::is_some)).await {
            Ok(Ok(port)) => Ok(port.unwrap_or_default()),
            _ => Err(Refusal::NotStarted(format!(
                "the job's other machines were not ready within {} h",
                CHECKS_TIMEOUT.as_secs() / 3600
            ))),
        }
    }
}
