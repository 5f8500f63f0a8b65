//! `lockstep serve`: the server, its dashboard, and an agent for this machine.

use super::{
    access,
    browser::Opened,
    init_tracing,
    local_agent::{LocalAgent, Settings, Slots},
    oidc::OidcArgs,
    output, wrong,
};
use lockstep_engine::MOST_CPU_SLOTS;
use lockstep_server::{
    AccessLogTo, AgentAuth, FairShare, Network, PublicUrl, Running, ServeConfig, ServeError, TlsConfig,
    tls::{TlsSuites, TlsVersion},
};
use lockstep_worker::agent::state_dir;
use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
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
    /// Encrypt with this certificate (PEM, the server's first, then those between it and the CA); read again when it changes
    #[arg(long, value_name = "FILE", requires = "tls_key", conflicts_with = "tls_own_ca")]
    tls_cert: Option<PathBuf>,
    /// The certificate's key (PEM), which only this user may read
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Encrypt with a certificate that the server makes and renews itself, signed by the CA in <data-dir>/ca
    #[arg(long)]
    tls_own_ca: bool,
    /// Cipher suites of TLS to speak, between commas, as the IANA or OpenSSL name them [default: all that are secure]
    #[arg(long, value_name = "LIST")]
    tls_suites: Option<TlsSuites>,
    /// Lowest version of TLS to speak: 1.2 or 1.3
    #[arg(long, value_name = "VERSION", default_value = "1.2")]
    tls_min_version: TlsVersion,
    /// CA of the certificates by which agents show who they are (PEM); read again when it changes [default: with --tls-own-ca the
    /// server's own]
    #[arg(long, value_name = "FILE")]
    agent_ca: Option<PathBuf>,
    /// Revocation list (CRL, PEM or DER) of that CA; read again when it changes
    #[arg(long, value_name = "FILE", requires = "agent_ca")]
    agent_crl: Option<PathBuf>,
    /// How agents of other machines show who they are: certificate, token or either [default: either with --tls-own-ca or
    /// --agent-ca, else token]
    #[arg(long, value_name = "HOW")]
    agent_auth: Option<AgentAuth>,
    /// The address that people and programs use, where it is another than the one listened on
    #[arg(long, value_name = "URL")]
    public_url: Option<PublicUrl>,
    /// Proxy that says for whom it speaks (X-Forwarded-For, -Proto, -Host): an address or a network such as 10.0.0.0/8.
    /// May be given several times
    #[arg(long, value_name = "NETWORK")]
    trusted_proxy: Vec<Network>,
    /// Listen without TLS also where other machines can reach it. Tokens and weights can be read on the way
    #[arg(long, conflicts_with_all = ["tls_cert", "tls_own_ca"])]
    insecure_http: bool,
    /// Requests that an address of another machine may make a second; at once it may make ten times as many. 0: no limit
    #[arg(long, value_name = "N", default_value = "200")]
    requests_per_second: u32,
    /// Requests a second with one token, or of one person who is signed in, from all addresses together, this machine's included;
    /// at once ten times as many. Agents are not counted. 0: no limit
    #[arg(long, value_name = "N", default_value = "1000")]
    token_requests_per_second: u32,
    /// Write a line for each request into this file, or to standard output with -
    #[arg(long, value_name = "FILE")]
    access_log: Option<PathBuf>,
    /// Data directory: database, job folders and checkpoints
    #[arg(long, value_name = "DIR", default_value = "lockstep-data")]
    data_dir: PathBuf,
    /// Keep checkpoints in an object store, too: a directory (of another disk), or s3://BUCKET/PREFIX, with AWS_ENDPOINT_URL,
    /// AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ALLOW_HTTP as they are read elsewhere
    #[arg(long, value_name = "URL", env = "LOCKSTEP_ARTIFACTS", hide_env_values = true)]
    artifacts: Option<String>,
    /// Take over an object store that another server has marked as its own and no longer uses, such as the server whose backup this
    /// database was restored from
    #[arg(long, env = "LOCKSTEP_ARTIFACTS_ADOPT")]
    artifacts_adopt: bool,
    /// Database: sqlite://PATH or postgres://USER@HOST/NAME [default: sqlite://<data-dir>/lockstep.db]
    #[arg(long, value_name = "URL", env = "LOCKSTEP_DATABASE", hide_env_values = true)]
    database: Option<String>,
    /// Who comes first of those whose jobs of one priority wait: owner, project (the one with the fewest slots in use) or off (the
    /// job that was submitted first)
    #[arg(long, value_name = "BY", default_value = "off")]
    fair_share: FairShare,
    /// Seconds after a job's end until its points leave the event stream; its metrics are kept
    #[arg(long, value_name = "SECS", default_value = "3600")]
    keep_points: u32,
    /// Seconds of silence after which an agent counts as lost and its jobs continue elsewhere; its ranks end 4 s earlier
    #[arg(long, value_name = "SECS", env = "LOCKSTEP_LEASE", default_value = "15",
        value_parser = clap::value_parser!(u32).range(8..=3600))]
    lease: u32,
    /// Ask nobody for a token: everybody on this machine may do everything. For loopback addresses only
    #[arg(long)]
    no_auth: bool,
    /// Do not open the dashboard in a browser [default: on a terminal with a screen it is opened, signed in]
    #[arg(long)]
    no_open: bool,
    #[command(flatten)]
    oidc: OidcArgs,
    /// Folder that datasets and files of weights may come from, with everything below it; may be given several times [default: any, named
    /// by admins alone]
    #[arg(long, value_name = "DIR")]
    dataset_root: Vec<PathBuf>,
    /// Start no agent for this machine
    #[arg(long)]
    no_local_agent: bool,
    /// Address or name by which ranks of other machines reach those of this one, for jobs over several machines [default: the
    /// address of the interface that NCCL_SOCKET_IFNAME names, or of --listen, where that is one]
    #[arg(long, value_name = "ADDRESS", conflicts_with = "no_local_agent")]
    advertise: Option<String>,
    /// CPU slots: ranks that run at once on this machine's cores [default: one per GPU, or one per core without GPUs]
    #[arg(long, value_name = "N", conflicts_with = "no_local_agent",
        value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_CPU_SLOTS)))]
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
    // Each request that an object store does not answer would be a line: the server says it once.
    init_tracing("info,object_store=warn");
    let mut config = ServeConfig::new(args.data_dir);
    config.listen = resolve(&args.listen)?;
    config.bundled = Some(super::bundled::PICTURES);
    config.tls = match (args.tls_cert, args.tls_key) {
        (Some(certificate), Some(key)) => Some(TlsConfig::Files { certificate, key }),
        _ => args.tls_own_ca.then_some(TlsConfig::OwnCa),
    };
    config.tls_suites = args.tls_suites;
    config.tls_lowest = args.tls_min_version;
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
    config.lease = Duration::from_secs(args.lease.into());
    config.keep_points = Duration::from_secs(args.keep_points.into());
    let slots = match (args.cpu_slots, args.gpus) {
        (Some(count), _) => Slots::Cpu(count),
        (None, Some(list)) => Slots::Gpus(list),
        (None, None) => Slots::Found,
    };
    let local_agent = !args.no_local_agent;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(async {
        // Before the address is printed: who reads it may stop the server at once.
        let mut signals = StopSignals::listen()?;
        let mut server = Server::start(config).await?;
        output::line(format_args!("dashboard: {}", server.running.url()))?;
        if !args.no_auth {
            // Once, within ten minutes; `lockstep login-link` prints another. Also where this goes into a log, as notebook servers do it: that is
            // where people look who start a server with nohup or in a container, and only the server knows the address and the certificate
            // that a command in its place would need. Somebody else who reads the log and is faster leaves a link that does not work.
            output::line(format_args!("sign in: {}", server.login_link()?))?;
        }
        let _opened = Opened::of(server.running(), server.data_dir(), !args.no_open);
        if local_agent {
            server.advertise = args.advertise.or(server.advertise);
            server.start_agent(slots, false).await?;
        }
        tokio::select! {
            () = signals.next() => {}
            ended = &mut server.ended => return server_error(ended),
        }
        tracing::info!("ending in order; once more to end at once");
        tokio::select! {
            stopped = server.stop() => stopped,
            () = signals.next() => Ok(()),
        }
    });
    // A thread that waits for a file system which does not respond cannot be stopped.
    runtime.shutdown_timeout(LAST_FILES);
    result
}

/// SIGTERM and Ctrl-C, from when this is made on: one that comes before somebody waits for it is not lost.
pub(crate) struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl StopSignals {
    /// # Errors
    /// The system does not let us listen to signals.
    pub(crate) fn listen() -> io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// Waits for the next one.
    pub(crate) async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// A running server, and the agent of its machine.
pub(crate) struct Server {
    running: Running,
    /// Where programs of this machine find it in clear.
    local: SocketAddr,
    data_dir: PathBuf,
    shutdown: Option<oneshot::Sender<()>>,
    /// When it ends, wanted or not.
    pub(crate) ended: tokio::task::JoinHandle<Result<(), ServeError>>,
    agent: Option<LocalAgent>,
    /// How ranks of other machines reach those of this one.
    advertise: Option<String>,
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
    pub(crate) async fn start_or(mut config: ServeConfig) -> Result<Self, ServeError> {
        let data_dir = config.data_dir.clone();
        // The certificate is for the names that others use: this machine's own agent comes by a way of its own.
        let mut local_listener = None;
        if config.tls.is_some() {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(ServeError::Stopped)?;
            local_listener = Some(listener.local_addr().map_err(ServeError::Stopped)?);
            config.local_listener = Some(Arc::new(listener));
        }
        let (ready, is_ready) = oneshot::channel();
        let (shutdown, is_shutdown) = oneshot::channel::<()>();
        let ended = tokio::spawn(lockstep_server::serve(
            config,
            move |running| {
                // Nobody waits for it any more: then nobody needs it.
                let _ = ready.send(running);
            },
            async {
                // Sent or dropped: both mean shutdown.
                let _ = is_shutdown.await;
            },
        ));
        match is_ready.await {
            Ok(running) => {
                let local = local_listener.unwrap_or_else(|| reachable(running.address()));
                let ip = running.address().ip();
                // Where NCCL's variable names an interface, its agent takes that one, as any agent does.
                let is_free = matches!(lockstep_host::nccl_interface(), Ok(None));
                let advertise =
                    (is_free && !ip.is_unspecified() && !ip.is_loopback()).then(|| ip.to_string());
                let shutdown = Some(shutdown);
                Ok(Self { running, local, data_dir, shutdown, ended, agent: None, advertise })
            }
            Err(_) => match ended.await {
                Ok(Err(error)) => Err(error),
                Ok(Ok(())) => Err(stopped("it ended before it was ready")),
                Err(error) => Err(stopped(&error.to_string())),
            },
        }
    }

    /// `http://127.0.0.1:PORT`, for programs of this machine.
    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.local)
    }

    pub(crate) fn running(&self) -> &Running {
        &self.running
    }

    pub(crate) fn data_dir(&self) -> &Path {
        &self.data_dir
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
        let settings =
            Settings { server: self.url(), dir, advertise: self.advertise.clone(), slots, quiet, token_file };
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

/// Where this machine itself reaches an address that is listened on.
fn reachable(mut address: SocketAddr) -> SocketAddr {
    match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(std::net::Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    address
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
