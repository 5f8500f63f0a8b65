//! `lockstep serve`: the server, its dashboard, and an agent for this machine.

use super::{
    access,
    browser::SignInFile,
    init_tracing,
    local_agent::{AgentLog, LocalAgent, Settings},
    oidc::OidcArgs,
    output, usage_error,
};
use lockstep_engine::MAX_CPU_SLOTS;
use lockstep_server::{
    AccessLogTo, AgentAuth, FairShare, ProxyNetwork, PublicUrl, Running, ServeConfig, ServeError, SmtpConfig,
    TlsConfig,
    tls::{TlsSuites, TlsVersion},
};
use lockstep_worker::agent::state_dir;
use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs},
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::oneshot,
};

/// The page that a browser opens first.
const START_PAGE: &str = "/jobs";

/// Time limit for threads that still read or write files after the server has ended.
pub(crate) const FILE_THREADS_TIMEOUT: Duration = Duration::from_secs(3);

/// Serve the dashboard and the REST interface, and train on this machine
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Address and port to listen on; port 0 chooses a free port
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:7070")]
    listen: String,
    /// Encrypt with this certificate (PEM: the server's own certificate first, then intermediate certificates); read again when it changes
    #[arg(long, value_name = "FILE", requires = "tls_key", conflicts_with = "tls_own_ca")]
    tls_cert: Option<PathBuf>,
    /// The certificate's key (PEM); only this user may be able to read the file
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Encrypt with a certificate that the server makes and renews, signed by the CA in <data-dir>/ca
    #[arg(long)]
    tls_own_ca: bool,
    /// Allowed cipher suites of TLS, separated by commas, by their IANA or OpenSSL names [default: all secure suites]
    #[arg(long, value_name = "LIST")]
    tls_suites: Option<TlsSuites>,
    /// Lowest allowed version of TLS: 1.2 or 1.3
    #[arg(long, value_name = "VERSION", default_value = "1.2")]
    tls_min_version: TlsVersion,
    /// CA of the certificates that identify agents (PEM); read again when it changes [default: the server's own CA with --tls-own-ca]
    #[arg(long, value_name = "FILE")]
    agent_ca: Option<PathBuf>,
    /// Revocation list (CRL, PEM or DER) of the CA in --agent-ca; read again when it changes
    #[arg(long, value_name = "FILE", requires = "agent_ca")]
    agent_crl: Option<PathBuf>,
    /// How agents on other machines authenticate: certificate, token or either [default: either with --tls-own-ca or --agent-ca, otherwise
    /// token]
    #[arg(long, value_name = "HOW")]
    agent_auth: Option<AgentAuth>,
    /// Address that people and programs use, if it differs from the address in --listen
    #[arg(long, value_name = "URL")]
    public_url: Option<PublicUrl>,
    /// Proxy whose headers name the client (X-Forwarded-For, -Proto, -Host): an address, or a network such as
    /// 10.0.0.0/8 (may be repeated)
    #[arg(long, value_name = "NETWORK")]
    trusted_proxy: Vec<ProxyNetwork>,
    /// Listen without TLS even if other machines can reach the address. Then other machines on the network can read tokens and weights
    #[arg(long, conflicts_with_all = ["tls_cert", "tls_own_ca"])]
    insecure_http: bool,
    /// Maximum number of requests per second from one address of another machine, with bursts of ten times as many. 0: no limit
    #[arg(long, value_name = "N", default_value = "200")]
    requests_per_second: u32,
    /// Maximum number of requests per second with one token or for one signed-in person, from all addresses including this machine, with
    /// bursts of ten times as many. Requests of agents are not counted. 0: no limit
    #[arg(long, value_name = "N", default_value = "1000")]
    token_requests_per_second: u32,
    /// Write a line for each request to this file, or to standard output with -
    #[arg(long, value_name = "FILE")]
    access_log: Option<PathBuf>,
    /// Data directory, for the database, job folders and checkpoints
    #[arg(long, value_name = "DIR", env = "LOCKSTEP_DATA_DIR", default_value = "lockstep-data")]
    data_dir: PathBuf,
    /// Also keep checkpoints in an object store: a directory (on another disk), or s3://BUCKET/PREFIX with the usual environment variables
    /// AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ALLOW_HTTP
    #[arg(long, value_name = "URL", env = "LOCKSTEP_ARTIFACTS", hide_env_values = true)]
    artifacts: Option<String>,
    /// Take over an object store that belonged to another server, for example after a restore from a backup. The other server must no
    /// longer use the store
    #[arg(long, env = "LOCKSTEP_ARTIFACTS_ADOPT")]
    artifacts_adopt: bool,
    /// Database: sqlite://PATH or postgres://USER@HOST/NAME [default: sqlite://<data-dir>/lockstep.db]
    #[arg(long, value_name = "URL", env = "LOCKSTEP_DATABASE", hide_env_values = true)]
    database: Option<String>,
    /// Fair share among waiting jobs of the same priority: by owner or by project (the owner or project with the fewest slots in use comes
    /// first), or off (the job that was submitted first comes first)
    #[arg(long, value_name = "BY", default_value = "off")]
    fair_share: FairShare,
    /// Seconds after a job's end until the points of its metrics are removed from the event stream; metric queries still return them
    #[arg(long, value_name = "SECS", default_value = "3600")]
    keep_points: u32,
    /// Seconds without a message after which an agent counts as lost and its jobs continue on other machines. Its ranks end
    /// earlier, by a fifth of this time but at most 4 s
    #[arg(long, value_name = "SECS", env = "LOCKSTEP_LEASE", default_value = "15",
        value_parser = clap::value_parser!(u32).range(8..=3600))]
    lease: u32,
    /// Seconds without a message after which a run from elsewhere (trained by another program, reported to this server) counts as failed;
    /// it continues when the program sends a message
    #[arg(long, value_name = "SECS", default_value = "600", value_parser = clap::value_parser!(u32).range(1..))]
    run_silence: u32,
    /// Require no token: everybody on this machine has all rights. Only for loopback addresses
    #[arg(long)]
    no_auth: bool,
    /// Do not open the dashboard in a browser [default: opened, signed in, if the command runs on a terminal and a graphical
    /// display exists]
    #[arg(long)]
    no_open: bool,
    #[command(flatten)]
    oidc: OidcArgs,
    /// Folder that may contain datasets and files of weights, also in subfolders (may be repeated) [default: any folder, but only
    /// admins may name files]
    #[arg(long, value_name = "DIR")]
    dataset_root: Vec<PathBuf>,
    /// Let webhooks connect to this machine, private networks and metadata services, and not only to the internet
    #[arg(long)]
    webhooks_allow_private: bool,
    /// Mail server for e-mail of webhooks: smtps://USER:PASSWORD@HOST (TLS), smtp://USER:PASSWORD@HOST?tls=required (STARTTLS) or
    /// smtp://HOST (not encrypted). Other accounts of the machine can read a password in this option, but not in the environment variable
    #[arg(long, value_name = "URL", env = "LOCKSTEP_SMTP", hide_env_values = true, requires = "smtp_from")]
    smtp: Option<String>,
    /// Sender of e-mail, such as "Lockstep <lockstep@example.org>"
    #[arg(long, value_name = "ADDRESS", env = "LOCKSTEP_SMTP_FROM", requires = "smtp")]
    smtp_from: Option<String>,
    /// Start no agent for this machine
    #[arg(long)]
    no_local_agent: bool,
    /// Address or name by which ranks on other machines reach this machine's ranks, for jobs over several machines [default: the address of
    /// the interface in NCCL_SOCKET_IFNAME, or of --listen if it is a specific address]
    #[arg(long, value_name = "ADDRESS", conflicts_with = "no_local_agent")]
    advertise: Option<String>,
    /// Number of CPU slots: ranks that may run at once on this machine's cores [default: one per GPU, or one per core without GPUs]
    #[arg(long, value_name = "N", conflicts_with = "no_local_agent",
        value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_CPU_SLOTS)))]
    cpu_slots: Option<u32>,
    /// GPUs to use: their indexes among the visible GPUs (CUDA_VISIBLE_DEVICES), or their UUIDs
    #[arg(long, value_name = "LIST", conflicts_with_all = ["no_local_agent", "cpu_slots"])]
    gpus: Option<String>,
    /// GPUs on which the agent keeps a spare process with an open CUDA context, so that ranks start sooner: auto, on or off; see
    /// `lockstep agent --help` [default: auto]
    #[arg(long, value_name = "WHICH", conflicts_with = "no_local_agent", value_parser = super::agent::WARM_VALUES)]
    warm: Option<String>,
}

/// Serves until Ctrl-C or SIGTERM.
///
/// # Errors
/// Exit status 2 if the address, the folder or the database cannot be used.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    lockstep_server::keep_files_private();
    // The object store's client would log each failed request, which the server itself already logs.
    init_tracing("info,object_store=warn");
    let mut config = ServeConfig::new(args.data_dir);
    config.listen = resolve_address(&args.listen)?;
    config.bundled = Some(super::bundled::PICTURES);
    config.tls = match (args.tls_cert, args.tls_key) {
        (Some(certificate), Some(key)) => Some(TlsConfig::Files { certificate, key }),
        _ => args.tls_own_ca.then_some(TlsConfig::OwnCa),
    };
    config.tls_suites = args.tls_suites;
    config.tls_min_version = args.tls_min_version;
    config.agent_ca = args.agent_ca;
    config.agent_crl = args.agent_crl;
    config.agent_auth = args.agent_auth;
    config.public_url = args.public_url;
    config.trusted_proxies = args.trusted_proxy;
    config.insecure_http = args.insecure_http;
    config.requests_per_second = args.requests_per_second;
    config.token_requests_per_second = args.token_requests_per_second;
    config.access_log = args.access_log.map(|path| match path.to_str() {
        Some("-") => AccessLogTo::Stdout,
        _ => AccessLogTo::File(path),
    });
    config.artifacts = args.artifacts;
    config.artifacts_adopt = args.artifacts_adopt;
    config.database = args.database;
    config.no_auth = args.no_auth;
    config.oidc = args.oidc.config()?;
    config.dataset_roots = args.dataset_root;
    config.fair_share = args.fair_share;
    config.webhooks_allow_private = args.webhooks_allow_private;
    let smtp = args.smtp.zip(args.smtp_from).map(|(url, from)| SmtpConfig::new(&url, &from));
    config.smtp = smtp.transpose().map_err(usage_error)?;
    config.lease = Duration::from_secs(args.lease.into());
    config.keep_points = Duration::from_secs(args.keep_points.into());
    config.run_silence = Duration::from_secs(args.run_silence.into());
    let agent_options = [
        ("--cpu-slots", args.cpu_slots.map(|count| count.to_string())),
        ("--gpus", args.gpus),
        ("--warm", args.warm),
    ];
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(async {
        // Listens for signals before the address is printed: a program that reads the address may stop the server at once.
        let mut signals = StopSignals::listen()?;
        let is_new = !config.data_dir.exists();
        let mut server = Server::start(config).await.map_err(with_exit_status)?;
        if is_new && let Ok(data_dir) = server.data_dir.canonicalize() {
            tracing::info!("created the data directory {}", data_dir.display());
        }
        output::line(format_args!("dashboard: {}", server.running.url()))?;
        if !args.no_auth {
            // The link works once, within ten minutes. It is printed even into a log, like the links of notebook servers, because people who
            // start a server with nohup or in a container look there. `lockstep login-link` needs the data directory, or the address and
            // the certificate, which these people may not have at hand.
            output::line(format_args!("sign in: {}", server.running.login_link(START_PAGE)?))?;
        }
        let sign_in_file = SignInFile::new(&server.data_dir);
        if !args.no_open {
            sign_in_file.open_browser(&server.running, START_PAGE);
        }
        if !args.no_local_agent {
            server.advertise = args.advertise.or(server.advertise);
            let options = agent_options.into_iter().filter_map(|(name, value)| Some((name, value?)));
            server.start_agent(options.collect(), AgentLog::Stderr).await?;
        }
        tokio::select! {
            () = signals.next() => {}
            outcome = &mut server.task => return server_result(outcome),
        }
        tracing::info!("stopping; send the signal again to stop at once");
        tokio::select! {
            stopped = server.stop() => stopped,
            () = signals.next() => Ok(()),
        }
    });
    // A thread that waits for an unresponsive file system cannot be stopped.
    runtime.shutdown_timeout(FILE_THREADS_TIMEOUT);
    result
}

/// Receives SIGTERM and Ctrl-C from its creation on: a signal that arrives before a call of `next` is not lost.
pub(crate) struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
    /// When `next` last returned.
    last: Option<Instant>,
}

/// Time in which further signals belong to the same request: `timeout`(1) signals a process, and then also its process group.
const SAME_REQUEST: Duration = Duration::from_secs(1);

impl StopSignals {
    /// Starts to receive the signals.
    ///
    /// # Errors
    /// The system does not allow signal handlers.
    pub(crate) fn listen() -> io::Result<Self> {
        let [terminate, interrupt] = [SignalKind::terminate(), SignalKind::interrupt()].map(signal);
        Ok(Self { terminate: terminate?, interrupt: interrupt?, last: None })
    }

    /// Waits for the next signal. Signals within a second after the last one count as the same.
    pub(crate) async fn next(&mut self) {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => {}
                _ = self.interrupt.recv() => {}
            }
            if self.last.is_none_or(|last| last.elapsed() > SAME_REQUEST) {
                self.last = Some(Instant::now());
                return;
            }
        }
    }
}

/// A running server, and the agent of its machine.
pub(crate) struct Server {
    pub(crate) running: Running,
    /// Address without TLS for programs on this machine.
    local_address: SocketAddr,
    data_dir: PathBuf,
    shutdown: oneshot::Sender<()>,
    /// The task that serves. It completes when the server ends, for any reason.
    pub(crate) task: tokio::task::JoinHandle<Result<(), ServeError>>,
    agent: Option<LocalAgent>,
    /// Address by which ranks on other machines reach this machine's ranks. The agent connects to the server over loopback, so it cannot
    /// find this address itself.
    advertise: Option<String>,
}

impl Server {
    /// Starts the server. Returns when the server accepts connections.
    ///
    /// # Errors
    /// Returns the reason why the server cannot start.
    pub(crate) async fn start(mut config: ServeConfig) -> Result<Self, ServeError> {
        let data_dir = config.data_dir.clone();
        // The certificate is for public names, so this machine's own agent connects to a separate listener.
        let mut separate_address = None;
        if config.tls.is_some() {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(ServeError::Stopped)?;
            separate_address = Some(listener.local_addr().map_err(ServeError::Stopped)?);
            config.local_listener = Some(Arc::new(listener));
        }
        let (ready, ready_receiver) = oneshot::channel();
        let (shutdown, shutdown_receiver) = oneshot::channel::<()>();
        let task = tokio::spawn(lockstep_server::serve(
            config,
            move |running| {
                // If the receiver is dropped, the value is not needed.
                let _ = ready.send(running);
            },
            async {
                // Sending a value and dropping the sender both mean shutdown.
                let _ = shutdown_receiver.await;
            },
        ));
        match ready_receiver.await {
            Ok(running) => {
                let local_address = separate_address.unwrap_or_else(|| reachable_address(running.address()));
                let ip = running.address().ip();
                // If NCCL_SOCKET_IFNAME names an interface, the agent advertises that interface's address without an option. A value that
                // begins with `^` only excludes interfaces.
                let has_nccl_interface =
                    lockstep_host::nccl_variable().is_some_and(|value| !value.starts_with('^'));
                let is_specific = !ip.is_unspecified() && !ip.is_loopback();
                let advertise = (!has_nccl_interface && is_specific).then(|| ip.to_string());
                let server =
                    Self { running, local_address, data_dir, shutdown, task, agent: None, advertise };
                if let Err(error) = access::record_address(&server.data_dir, &server.url()) {
                    tracing::warn!(
                        "{error}; commands cannot find this server through its data directory: pass --server {} to them",
                        server.url()
                    );
                }
                Ok(server)
            }
            Err(_) => match task.await {
                Ok(Err(error)) => Err(error),
                Ok(Ok(())) => Err(stopped_error("the server ended before it was ready")),
                Err(error) => Err(stopped_error(&error.to_string())),
            },
        }
    }

    /// Returns `http://127.0.0.1:PORT`, the address for programs on this machine.
    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.local_address)
    }

    /// Starts the agent of this machine with these options.
    ///
    /// # Errors
    /// The agent cannot be started.
    pub(crate) async fn start_agent(
        &mut self,
        mut options: Vec<(&'static str, String)>,
        log: AgentLog,
    ) -> anyhow::Result<()> {
        options.extend(self.advertise.clone().map(|address| ("--advertise", address)));
        let dir = self.data_dir.join("agent");
        let agent_id = state_dir::agent_id(&dir)?;
        let token = dir.join("token");
        let token_file = self.running.ensure_agent_token(&agent_id, &token).await?.then_some(token);
        let settings = Settings { server: self.url(), dir, options, log, token_file };
        self.agent = Some(LocalAgent::start(settings).await?);
        Ok(())
    }

    /// Ends the agent with its ranks, then the server.
    ///
    /// # Errors
    /// The server failed in the meantime.
    pub(crate) async fn stop(self) -> anyhow::Result<()> {
        access::forget_address(&self.data_dir);
        if let Some(agent) = self.agent {
            agent.stop().await;
        }
        drop(self.shutdown);
        server_result(self.task.await)
    }
}

/// Returns the address by which this machine connects to a listening address: loopback for an unspecified address.
fn reachable_address(mut address: SocketAddr) -> SocketAddr {
    match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(std::net::Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    address
}

/// Converts the result of the server's task.
fn server_result(outcome: Result<Result<(), ServeError>, tokio::task::JoinError>) -> anyhow::Result<()> {
    match outcome {
        Ok(result) => result.map_err(with_exit_status),
        Err(error) => Err(anyhow::anyhow!("the server failed: {error}")),
    }
}

fn with_exit_status(error: ServeError) -> anyhow::Error {
    if error.exit_code() == 2 { usage_error(error.to_string()) } else { error.into() }
}

fn stopped_error(why: &str) -> ServeError {
    ServeError::Stopped(std::io::Error::other(why.to_owned()))
}

/// Resolves a numeric address or a name (`localhost:7070`).
pub(crate) fn resolve_address(listen: &str) -> anyhow::Result<SocketAddr> {
    let problem =
        |why: String| usage_error(format!("--listen {listen}: {why}; an example is 127.0.0.1:7070"));
    let mut addresses = listen.to_socket_addrs().map_err(|e| problem(e.to_string()))?;
    addresses.next().ok_or_else(|| problem("no such address".into()))
}
