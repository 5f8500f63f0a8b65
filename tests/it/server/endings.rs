//! How the server, its agent and their processes end.

use super::{Server, ended, signal};
use rustix::process::Signal;
use std::{
    process::ExitStatus,
    time::{Duration, Instant},
};

impl Server {
    /// The server's own process.
    pub(crate) fn serve_pid(&self) -> i32 {
        self.serve.as_ref().expect("a server").id() as i32
    }

    /// As a power cut would, but for the agents and ranks.
    pub(crate) fn kill_serve(&mut self) {
        let mut serve = self.serve.take().expect("a server");
        serve.kill().expect("SIGKILL");
        serve.wait().expect("its status");
    }

    /// Waits until the server has died by itself; false when it does not within `patience`.
    pub(crate) async fn serve_died(&mut self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        loop {
            if self.serve.as_mut().is_none_or(|serve| serve.try_wait().is_ok_and(|status| status.is_some())) {
                self.serve = None;
                return true;
            }
            if Instant::now() > deadline {
                return false;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Ctrl-C or SIGTERM, as a person or a service manager gives it; the exit status.
    pub(crate) async fn end_serve(&mut self, with: Signal) -> ExitStatus {
        let mut serve = self.serve.take().expect("a server");
        signal(serve.id() as i32, with);
        ended(&mut serve).await
    }

    /// The agent that was started next to the server.
    pub(crate) fn agent_beside(&self) -> Option<i32> {
        self.agent.as_ref().map(|child| child.id() as i32)
    }

    /// As `kill -9` of the agent that was started next to the server.
    pub(crate) fn kill_agent(&mut self) {
        let mut agent = self.agent.take().expect("an agent");
        agent.kill().expect("SIGKILL");
        agent.wait().expect("its status");
    }

    /// Stops everything in order (SIGTERM to the server) and asserts that no process is left.
    pub(crate) async fn stop(self) {
        drop(self.stop_and_keep().await);
    }

    /// As [`Server::stop`]; the files stay as long as the value.
    pub(crate) async fn stop_and_keep(mut self) -> Self {
        for mut child in [self.agent.take(), self.serve.take()].into_iter().flatten() {
            signal(child.id() as i32, Signal::TERM);
            let status = ended(&mut child).await;
            assert_eq!(status.code(), Some(0), "an orderly stop ends with exit status 0, not {status}");
        }
        self.until("no process is left after an orderly stop", async |s: &Server| s.processes().is_empty())
            .await;
        self
    }
}
