//! The agent of the server's own machine: a process of its own, started again when it dies.
//!
//! It is a child that outlives its parent: when the server is killed, ranks train on, and the next
//! server's agent takes them over.

use super::{sentence, wrong};
use anyhow::Context;
use lockstep_host::SECRETS;
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

/// From TERM to KILL: an agent gives its ranks 20 s to write a checkpoint and 5 s to end, and reports to the server for up to
/// 5 s more.
const GRACE: Duration = Duration::from_secs(35);
/// Pauses before a dead agent is started again.
const RETRY: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(10));
/// An agent that lived this long was fine: the next pause is the first again.
const FINE_AFTER: Duration = Duration::from_secs(30);

/// A running local agent and its task.
pub(crate) struct LocalAgent {
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

/// The places for ranks that the local agent offers.
#[derive(Debug, Clone)]
pub(crate) enum Slots {
    /// What there is: one a GPU, or one a core.
    Found,
    Cpu(u32),
    /// As `--gpus` takes them.
    Gpus(String),
}

/// What the local agent is started with.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    /// `http://127.0.0.1:PORT`.
    pub(crate) server: String,
    /// The agent's folder.
    pub(crate) dir: PathBuf,
    pub(crate) slots: Slots,
    /// As `--advertise` takes it: the agent itself sees loopback alone.
    pub(crate) advertise: Option<String>,
    /// Holds its token, unless it needs none. The token itself is in no argument and no variable, which other accounts could read
    /// and ranks would inherit.
    pub(crate) token_file: Option<PathBuf>,
    /// What it has to say goes into `agent.log` of its folder instead of standard error.
    pub(crate) quiet: bool,
}

impl LocalAgent {
    /// Asks an agent that an earlier server left behind to let go of its ranks, then starts ours.
    ///
    /// # Errors
    /// The old one cannot be ended, or ours not be started.
    pub(crate) async fn start(settings: Settings) -> anyhow::Result<Self> {
        relieve(&settings.dir).await?;
        let child = spawn(&settings)?;
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(keep(settings, child, stopped));
        Ok(Self { stop, task })
    }

    /// Ends it in order: its ranks end, the server hears of it.
    pub(crate) async fn stop(self) {
        // A task that is gone has nothing to end.
        let _ = self.stop.send(());
        let _ = self.task.await;
    }
}

async fn keep(settings: Settings, mut child: Child, mut stopped: oneshot::Receiver<()>) {
    let mut backoff = RETRY;
    let mut born = Instant::now();
    loop {
        tokio::select! {
            _ = &mut stopped => return end(child).await,
            status = child.wait() => {
                if born.elapsed() >= FINE_AFTER {
                    backoff = RETRY;
                }
                match status {
                    Ok(status) => tracing::warn!(%status, "the local agent ended; starting it again"),
                    Err(error) => tracing::warn!(%error, "the local agent is gone; starting it again"),
                }
            }
        }
        loop {
            tokio::select! {
                _ = &mut stopped => return,
                () = sleep(backoff.pause()) => {}
            }
            match spawn(&settings) {
                Ok(again) => {
                    child = again;
                    born = Instant::now();
                    break;
                }
                Err(error) => tracing::error!(error = sentence(&error), "the local agent does not start"),
            }
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
        // Ctrl-C is for the server, which ends its agent in order.
        .process_group(0);
    for name in SECRETS {
        command.env_remove(name);
    }
    if let Some(path) = &settings.token_file {
        command.arg("--token-file").arg(path);
    }
    if let Some(address) = &settings.advertise {
        command.args(["--advertise", address]);
    }
    match &settings.slots {
        Slots::Found => {}
        Slots::Cpu(count) => {
            command.args(["--cpu-slots", &count.to_string()]);
        }
        Slots::Gpus(list) => {
            command.args(["--gpus", list]);
        }
    }
    if settings.quiet {
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

async fn end(mut child: Child) {
    let Some(pid) = child.id().and_then(|id| Pid::from_raw(id.cast_signed())) else { return };
    // Gone meanwhile: the wait below says so.
    let _ = kill_process(pid, Signal::TERM);
    if timeout(GRACE, child.wait()).await.is_err() {
        tracing::warn!("the local agent does not end; killing it");
        let _ = child.kill().await;
    }
}

/// Ends an agent of an earlier server that was killed, which still holds the folder. SIGUSR1 asks it to end
/// and leave its ranks running.
async fn relieve(dir: &Path) -> anyhow::Result<()> {
    let Some(pid) = running_agent(dir).and_then(Pid::from_raw) else { return Ok(()) };
    tracing::info!(process = pid.as_raw_nonzero(), "taking over from an earlier server's agent");
    for signal in [Signal::USR1, Signal::KILL] {
        // Waits for the lock to be free and not for the process to be gone: it is not our child, so another process reaps it.
        let gone = || running_agent(dir) != Some(pid.as_raw_nonzero().get());
        if kill_process(pid, signal).is_err() || wait_until(gone).await {
            return Ok(());
        }
    }
    Err(wrong(format!("the agent (process {}) on {} does not end", pid.as_raw_nonzero(), dir.display())))
}

async fn wait_until(done: impl Fn() -> bool) -> bool {
    for _ in 0..100 {
        if done() {
            return true;
        }
        sleep(Duration::from_millis(50)).await;
    }
    false
}
