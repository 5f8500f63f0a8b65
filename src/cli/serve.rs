//! `lockstep serve`: the server, its dashboard, and an agent for this machine.

use super::{
    access, init_tracing,
    local_agent::{LocalAgent, Settings, Slots},
    output, wrong,
};
use lockstep_server::{Running, ServeConfig, ServeError};
use lockstep_worker::agent::state_dir;
use std::{
    net::{SocketAddr, ToSocketAddrs},
    path::PathBuf,
    time::Duration,
};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::oneshot,
};

/// For what still reads or writes a file when all else has ended.
pub(crate) const LAST_FILES: Duration = Duration::from_secs(3);

/// Serve the dashboard and the REST interface, and train on this machine
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Address and port to listen on; port 0 takes a free one
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:7070")]
    listen: String,
    /// Data directory: database, job folders and checkpoints
    #[arg(long, value_name = "DIR", default_value = "lockstep-data")]
    data_dir: PathBuf,
    /// Database: sqlite://PATH or postgres://USER@HOST/NAME [default: sqlite://<data-dir>/lockstep.db]
    #[arg(long, value_name = "URL", env = "LOCKSTEP_DATABASE", hide_env_values = true)]
    database: Option<String>,
    /// Seconds after a job's end until its points leave the event stream; its metrics are kept
    #[arg(long, value_name = "SECS", default_value = "3600")]
    keep_points: u32,
    /// Ask nobody for a token: everybody on this machine may do everything
    #[arg(long)]
    no_auth: bool,
    /// Start no agent for this machine
    #[arg(long)]
    no_local_agent: bool,
    /// CPU slots: ranks that run at once on this machine's cores [default: one per GPU, or one per core without GPUs]
    #[arg(long, value_name = "N", conflicts_with = "no_local_agent")]
    cpu_slots: Option<u32>,
    /// GPUs to use: numbers among those that are visible (CUDA_VISIBLE_DEVICES), or UUIDs
    #[arg(long, value_name = "LIST", conflicts_with_all = ["no_local_agent", "cpu_slots"])]
    gpus: Option<String>,
}

/// Serves until Ctrl-C or SIGTERM.
///
/// # Errors
/// Exit status 2 when the address, the folder or the database cannot be used.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    lockstep_server::keep_files_private();
    init_tracing("info");
    let mut config = ServeConfig::new(args.data_dir);
    config.listen = resolve(&args.listen)?;
    config.database = args.database;
    config.no_auth = args.no_auth;
    config.keep_points = Duration::from_secs(args.keep_points.into());
    let slots = match (args.cpu_slots, args.gpus) {
        (Some(count), _) => Slots::Cpu(count),
        (None, Some(list)) => Slots::Gpus(list),
        (None, None) => Slots::Found,
    };
    let local_agent = !args.no_local_agent;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(async {
        let mut server = Server::start(config).await?;
        output::line(format_args!("dashboard: {}", server.url()))?;
        if !args.no_auth {
            // Once, within ten minutes; `lockstep login-link` prints another.
            output::line(format_args!("sign in: {}", server.login_link()?))?;
        }
        if local_agent {
            server.start_agent(slots, false).await?;
        }
        let told = tokio::select! {
            told = told_to_end() => told,
            ended = &mut server.ended => return server_error(ended),
        };
        told?;
        tracing::info!("ending in order; once more to end at once");
        tokio::select! {
            stopped = server.stop() => stopped,
            again = told_to_end() => again,
        }
    });
    // A thread that waits for a file system which does not answer cannot be told to end.
    runtime.shutdown_timeout(LAST_FILES);
    result
}

/// SIGTERM or Ctrl-C.
///
/// # Errors
/// The system does not let us listen to signals.
pub(crate) async fn told_to_end() -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}

/// A running server, and the agent of its machine.
pub(crate) struct Server {
    running: Running,
    data_dir: PathBuf,
    shutdown: Option<oneshot::Sender<()>>,
    /// When it ends, wanted or not.
    pub(crate) ended: tokio::task::JoinHandle<Result<(), ServeError>>,
    agent: Option<LocalAgent>,
}

impl Server {
    /// Starts it; returns once it accepts connections.
    ///
    /// # Errors
    /// As [`run`].
    pub(crate) async fn start(config: ServeConfig) -> anyhow::Result<Self> {
        Self::start_or(config).await.map_err(|error| match error.exit_code() {
            2 => wrong(error.to_string()),
            _ => error.into(),
        })
    }

    /// As [`Server::start`], for those that know what to do about an error.
    ///
    /// # Errors
    /// What keeps the server from starting.
    pub(crate) async fn start_or(config: ServeConfig) -> Result<Self, ServeError> {
        let data_dir = config.data_dir.clone();
        let (ready, is_ready) = oneshot::channel();
        let (shutdown, is_shutdown) = oneshot::channel::<()>();
        let ended = tokio::spawn(lockstep_server::serve(
            config,
            move |running| {
                // Nobody waits for it any more: then nobody needs it.
                let _ = ready.send(running);
            },
            async {
                // Told, or dropped: both mean the end.
                let _ = is_shutdown.await;
            },
        ));
        match is_ready.await {
            Ok(running) => Ok(Self { running, data_dir, shutdown: Some(shutdown), ended, agent: None }),
            Err(_) => match ended.await {
                Ok(Err(error)) => Err(error),
                Ok(Ok(())) => Err(stopped("it ended before it was ready")),
                Err(error) => Err(stopped(&error.to_string())),
            },
        }
    }

    /// `http://127.0.0.1:PORT`.
    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.running.address)
    }

    /// The address that signs a browser in, once.
    ///
    /// # Errors
    /// The system has no random bits.
    pub(crate) fn login_link(&self) -> std::io::Result<String> {
        self.running.login_link()
    }

    /// The token for this machine's programs.
    ///
    /// # Errors
    /// Its file cannot be read.
    pub(crate) fn token(&self) -> anyhow::Result<String> {
        access::from_file(&self.data_dir.join("token"))
    }

    /// Starts the agent of this machine.
    ///
    /// # Errors
    /// It cannot be started.
    pub(crate) async fn start_agent(&mut self, slots: Slots, quiet: bool) -> anyhow::Result<()> {
        let dir = self.data_dir.join("agent");
        let agent_id = state_dir::agent_id(&dir)?;
        let token = dir.join("token");
        let token_file = self.running.agent_token(&agent_id, &token).await?.then_some(token);
        let settings = Settings { server: self.url(), dir, slots, quiet, token_file };
        self.agent = Some(LocalAgent::start(settings).await?);
        Ok(())
    }

    /// Ends the agent with its ranks, then the server.
    ///
    /// # Errors
    /// The server failed meanwhile.
    pub(crate) async fn stop(mut self) -> anyhow::Result<()> {
        if let Some(agent) = self.agent.take() {
            agent.stop().await;
        }
        drop(self.shutdown.take());
        server_error((&mut self.ended).await)
    }
}

fn server_error(ended: Result<Result<(), ServeError>, tokio::task::JoinError>) -> anyhow::Result<()> {
    match ended {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) if error.exit_code() == 2 => Err(wrong(error.to_string())),
        Ok(Err(error)) => Err(error.into()),
        Err(error) => Err(anyhow::anyhow!("the server failed: {error}")),
    }
}

fn stopped(why: &str) -> ServeError {
    ServeError::Stopped(std::io::Error::other(why.to_owned()))
}

/// An address by number or by name (`localhost:7070`).
fn resolve(listen: &str) -> anyhow::Result<SocketAddr> {
    let problem = |why: String| wrong(format!("--listen {listen}: {why}; an example is 127.0.0.1:7070"));
    let mut found = listen.to_socket_addrs().map_err(|e| problem(e.to_string()))?;
    found.next().ok_or_else(|| problem("no such address".into()))
}
