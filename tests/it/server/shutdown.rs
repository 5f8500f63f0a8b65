//! Ends the server, its agent and their processes.

use super::{Server, exit_status, signal};
use rustix::process::Signal;
use std::{
    process::ExitStatus,
    time::{Duration, Instant},
};

impl Server {
    /// The process id of `lockstep serve`.
    pub(crate) fn serve_pid(&self) -> i32 {
        self.serve.as_ref().expect("a server").id() as i32
    }

    /// Kills the server with SIGKILL; agents and ranks continue.
    pub(crate) fn kill_serve(&mut self) {
        let mut serve = self.serve.take().expect("a server");
        serve.kill().expect("SIGKILL");
        serve.wait().expect("its status");
    }

    /// Waits until the server has ended by itself; false if it still runs after `limit`.
    pub(crate) async fn serve_ends_within(&mut self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
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

    /// Sends SIGINT or SIGTERM to the server and returns the exit status.
    pub(crate) async fn stop_serve(&mut self, stop_signal: Signal) -> ExitStatus {
        let mut serve = self.serve.take().expect("a server");
        signal(serve.id() as i32, stop_signal);
        exit_status(&mut serve).await
    }

    /// The process id of the agent that the test has started.
    pub(crate) fn agent_pid(&self) -> Option<i32> {
        self.agent.as_ref().map(|child| child.id() as i32)
    }

    /// Kills the agent that the test has started with SIGKILL.
    pub(crate) fn kill_agent(&mut self) {
        let mut agent = self.agent.take().expect("an agent");
        agent.kill().expect("SIGKILL");
        agent.wait().expect("its status");
    }

    /// Stops everything in order (SIGTERM to the server) and asserts that no process is left.
    pub(crate) async fn stop(self) {
        drop(self.stop_and_keep().await);
    }

    /// As [`Server::stop`], but returns the server, which keeps the files.
    pub(crate) async fn stop_and_keep(mut self) -> Self {
        for mut child in [self.agent.take(), self.serve.take()].into_iter().flatten() {
            signal(child.id() as i32, Signal::TERM);
            let status = exit_status(&mut child).await;
            assert_eq!(status.code(), Some(0), "an orderly stop ends with exit status 0, not {status}");
        }
        self.until("no process is left after an orderly stop", async |s: &Server| s.processes().is_empty())
            .await;
        self
    }
}
