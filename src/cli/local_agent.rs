//! The agent of the server's own machine: a separate process, which is restarted after a crash.
//!
//! The agent is a child process that outlives its parent. If the server is killed, ranks train on, and the agent of the next server adopts
//! them.

use super::{describe_error, usage_error};
use anyhow::Context;
use lockstep_host::SECRET_VARIABLES;
use lockstep_protocol::backoff::Backoff;
use lockstep_worker::agent::state_dir::running_agent;
use rustix::process::{Pid, Signal, kill_process};
use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::{Duration, Instant},
};
use tokio::{
    process::{Child, Command},
    sync::oneshot,
    task::JoinHandle,
    time::{sleep, timeout},
};

/// Time from SIGTERM to SIGKILL. An agent gives its ranks 20 s to write a checkpoint and 5 s to exit, and then reports to the server for up
/// to 5 s.
const KILL_DELAY: Duration = Duration::from_secs(35);
/// Pauses before an agent that has crashed is restarted.
const RETRY: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(10));
/// An agent that has run for this time resets the pauses.
const BACKOFF_RESET: Duration = Duration::from_secs(30);

/// A running local agent and its task.
pub(crate) struct LocalAgent {
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

/// Settings of the local agent.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    /// The server's address, `http://127.0.0.1:PORT`.
    pub(crate) server: String,
    /// The agent's folder.
    pub(crate) dir: PathBuf,
    /// Further options of `lockstep agent` with their values.
    pub(crate) options: Vec<(&'static str, String)>,
    /// File with the agent's token, or `None` if it needs no token. The token is not passed in an argument or a variable, which other
    /// accounts could read and ranks would inherit.
    pub(crate) token_file: Option<PathBuf>,
    pub(crate) log: AgentLog,
}

/// Where an agent writes its diagnostics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AgentLog {
    /// The server's standard error.
    Stderr,
    /// `agent.log` in the agent's folder.
    File,
}

impl LocalAgent {
    /// Asks the agent of an earlier server to exit and leave its ranks running, then starts a new agent, which adopts the ranks.
    ///
    /// # Errors
    /// The earlier agent cannot be ended, or the new agent cannot be started.
    pub(crate) async fn start(settings: Settings) -> anyhow::Result<Self> {
        end_earlier_agent(&settings.dir).await?;
        let child = spawn(&settings)?;
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(supervise(settings, child, stopped));
        Ok(Self { stop, task })
    }

    /// Stops the agent, which first ends its ranks and reports their end to the server.
    pub(crate) async fn stop(self) {
        // If the task has ended, there is no agent to stop.
        let _ = self.stop.send(());
        let _ = self.task.await;
    }
}

async fn supervise(settings: Settings, first: Child, mut stopped: oneshot::Receiver<()>) {
    let (mut spawned, mut backoff) = (Ok(first), RETRY);
    loop {
        let started = Instant::now();
        match spawned {
            Ok(mut child) => tokio::select! {
                _ = &mut stopped => return end_agent(child).await,
                status = child.wait() => match status {
                    Ok(status) => tracing::warn!(%status, "the local agent ended; starting it again"),
                    Err(error) => tracing::warn!(%error, "waiting for the local agent failed; starting it again"),
                },
            },
            Err(error) => tracing::error!(error = describe_error(&error), "the local agent does not start"),
        }
        if started.elapsed() >= BACKOFF_RESET {
            backoff = RETRY;
        }
        tokio::select! {
            _ = &mut stopped => return,
            () = sleep(backoff.next_pause()) => spawned = spawn(&settings),
        }
    }
}

fn spawn(settings: &Settings) -> anyhow::Result<Child> {
    let program = lockstep_host::own_program()?;
    let mut command = Command::new(&program);
    command
        .args(["agent", "--server", &settings.server, "--name", "local", "--follow-parent", "--data-dir"])
        .arg(&settings.dir)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        // Ctrl-C reaches only the server, which then ends its agent in order.
        .process_group(0);
    for name in SECRET_VARIABLES {
        command.env_remove(name);
    }
    if let Some(path) = &settings.token_file {
        command.arg("--token-file").arg(path);
    }
    for (name, value) in &settings.options {
        command.args([*name, value.as_str()]);
    }
    if settings.log == AgentLog::File {
        std::fs::create_dir_all(&settings.dir)?;
        let path = settings.dir.join("agent.log");
        let log = std::fs::File::options()
            .append(true)
            .create(true)
            .open(&path)
            .with_context(|| path.display().to_string())?;
        command.stderr(log);
    }
    command.spawn().with_context(|| format!("{} agent", program.display()))
}

async fn end_agent(mut child: Child) {
    let Some(pid) = child.id().and_then(|id| Pid::from_raw(id.cast_signed())) else { return };
    // An error means that the process has exited, which the wait below detects.
    let _ = kill_process(pid, Signal::TERM);
    if timeout(KILL_DELAY, child.wait()).await.is_err() {
        tracing::warn!("the local agent does not end; killing it");
        let _ = child.kill().await;
    }
}

/// Ends the agent of an earlier, killed server, which still locks the folder. SIGUSR1 asks the agent to exit and leave its ranks running.
async fn end_earlier_agent(dir: &Path) -> anyhow::Result<()> {
    let Some(pid) = running_agent(dir).and_then(Pid::from_raw) else { return Ok(()) };
    tracing::info!(process = pid.as_raw_nonzero(), "taking over from an earlier server's agent");
    for signal in [Signal::USR1, Signal::KILL] {
        if kill_process(pid, signal).is_err() {
            return Ok(());
        }
        // Waits up to 5 s for the lock instead of the process, which is not a child of this process.
        for _ in 0..100 {
            if running_agent(dir) != Some(pid.as_raw_nonzero().get()) {
                return Ok(());
            }
            sleep(Duration::from_millis(50)).await;
        }
    }
    Err(usage_error(format!(
        "the agent (process {}) that uses {} does not end; end this process, then start the server again",
        pid.as_raw_nonzero(),
        dir.display()
    )))
}
