//! The configuration of `lockstep serve`.

pub(crate) mod addresses;
pub(crate) mod oidc;
pub(crate) mod serve_error;
pub(crate) mod smtp;
pub(crate) mod tls_suites;

use addresses::{ProxyNetwork, PublicUrl};
use lockstep_protocol::{JobId, words};
use oidc::OidcConfig;
use serve_error::ServeError;
use smtp::SmtpConfig;
use std::{
    borrow::Cow,
    net::{SocketAddr, TcpListener},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};
use tls_suites::{TlsSuites, TlsVersion};

/// The source of the server's certificate.
#[derive(Debug, Clone)]
pub enum TlsConfig {
    /// Files in PEM format, which another program renews.
    Files {
        /// The server's certificate, followed by intermediate certificates.
        certificate: PathBuf,
        key: PathBuf,
    },
    /// The certificate authority in the data directory (`lockstep ca`), which is created if it is missing.
    OwnCa,
}

/// The destination of the access log.
#[derive(Debug, Clone)]
pub enum AccessLogTo {
    Stdout,
    /// A file that only this user can read. A full file is renamed to `FILE.1`, which replaces an earlier file of this name.
    File(PathBuf),
}

words! {
    /// How agents of other machines identify themselves. The agent of the server's machine always has its own token.
    pub enum AgentAuth: "agent credential" {
        Token = "token",
        Certificate = "certificate",
        /// By a certificate, or by a token if they have no certificate.
        Either = "either",
    }
}

words! {
    /// Whether slots are shared fairly between owners or between projects, among waiting jobs of the same priority.
    #[derive(Default)]
    pub enum FairShare: "fair share" {
        /// No fair sharing: the job that was submitted first comes first.
        #[default]
        Off = "off",
        /// Owners: the owner with the fewest slots in use comes first.
        Owner = "owner",
        /// Projects: the project with the fewest slots in use comes first.
        Project = "project",
    }
}

#[derive(Debug, Clone)]
pub struct ServeConfig {
    /// The address to listen on. Port 0 means a free port. See [`check_listen_address`].
    pub listen: SocketAddr,
    /// A second listener on loopback without TLS, for the agent of this machine if `listen` uses TLS.
    pub local_listener: Option<Arc<TcpListener>>,
    /// The certificate for TLS. `None`: no TLS.
    pub tls: Option<TlsConfig>,
    /// The accepted cipher suites. `None`: all.
    pub tls_suites: Option<TlsSuites>,
    pub tls_min_version: TlsVersion,
    /// Authorities of agents' certificates (PEM). `None`: the server's own authority, if it has one.
    pub agent_ca: Option<PathBuf>,
    /// The revocation list of these authorities (PEM or DER), read again when it changes.
    pub agent_crl: Option<PathBuf>,
    /// How agents identify themselves. `None`: by certificate or token if an authority for certificates is configured, and else by token.
    pub agent_auth: Option<AgentAuth>,
    /// Whether the server may listen without TLS at an address that other machines can reach.
    pub insecure_http: bool,
    /// The address that people and programs use.
    pub public_url: Option<PublicUrl>,
    /// Proxies whose `X-Forwarded-*` headers are trusted.
    pub trusted_proxies: Vec<ProxyNetwork>,
    /// Maximum requests per second, on average, of an address of another machine. 0: no limit.
    pub requests_per_second: u32,
    /// Maximum requests per second, on average, of a token or a signed-in person. 0: no limit. Agents are not limited.
    pub token_requests_per_second: u32,
    /// Time limit of a TLS handshake.
    pub handshake_timeout: Duration,
    /// Interval between two checks whether the certificate's files have changed.
    pub certificate_check_interval: Duration,
    /// The destination of the access log. `None`: requests are not logged.
    pub access_log: Option<AccessLogTo>,
    /// The size in bytes at which a file of the access log is followed by a new file.
    pub access_log_bytes: u64,
    /// The folder of the database, the jobs and their checkpoints. Created if it is missing.
    pub data_dir: PathBuf,
    /// A second location for checkpoints: a directory, or `s3://BUCKET/PREFIX`.
    pub artifacts: Option<String>,
    /// Whether to take over `artifacts` from another server, such as the server whose backup was restored.
    pub artifacts_adopt: bool,
    /// The database's URL, `sqlite://PATH` or `postgres://...`. `None`: `lockstep.db` in the data directory.
    pub database: Option<String>,
    /// Interval between two heartbeats of an agent.
    pub heartbeat: Duration,
    /// An attempt whose agent has been silent for this long is lost.
    pub lease: Duration,
    pub fair_share: FairShare,
    /// Maximum wait for the upload of a checkpoint, if its job can only continue on a machine that does not have the checkpoint.
    pub checkpoint_wait: Duration,
    /// A stream whose client reads nothing for this long is closed. The client can reconnect and continue.
    pub stream_timeout: Duration,
    /// How long a job's points remain in its events, and thus in its stream, after the job's end. Its metrics keep the points for ever.
    pub keep_points: Duration,
    /// A run from elsewhere whose program sends nothing for this long counts as failed until the program sends again.
    pub run_silence: Duration,
    /// How long a request waits for an evaluation, or for a checkpoint from the object store. After this time, the client must ask again.
    pub response_wait: Duration,
    /// Time limit for a request's head, counted from the start of the connection or the end of the previous response.
    pub head_timeout: Duration,
    /// Maximum time between two parts of a request's body.
    pub body_timeout: Duration,
    /// Whether everybody who reaches the server may do everything. Only allowed on loopback addresses.
    pub no_auth: bool,
    /// The OpenID provider that signs people in, in addition to passwords.
    pub oidc: Option<OidcConfig>,
    /// Folders that datasets and files of weights may come from, on the machines that have them. Empty: only admins may name paths, and
    /// these may be in any folder.
    pub dataset_roots: Vec<PathBuf>,
    /// Maximum number of entries in the audit log. The oldest are removed.
    pub max_audit_entries: u32,
    /// Maximum number of concurrent connections. `None`: as many as the process's file descriptors allow.
    pub max_connections: Option<usize>,
    /// Whether webhooks may send to addresses that are not on the internet: this machine, private networks, metadata services.
    pub webhooks_allow_private: bool,
    /// The mail server for e-mail of webhooks. `None`: webhooks cannot send e-mail.
    pub smtp: Option<SmtpConfig>,
    /// The pause after each failed attempt to send a message of a webhook. There is one more attempt than pauses.
    pub webhook_retries: Vec<Duration>,
    /// Pictures that come with the program, which are registered if the server has no dataset.
    pub bundled: Option<Bundled>,
}

/// A dataset that is part of the program.
#[derive(Debug, Clone, Copy)]
pub struct Bundled {
    pub name: &'static str,
    /// Names and contents of the dataset's files.
    pub files: fn() -> Vec<(String, Cow<'static, [u8]>)>,
}

impl ServeConfig {
    /// The defaults: `127.0.0.1:7070`, the data directory's own SQLite file.
    pub fn new(data_dir: impl Into<PathBuf>) -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 7070)),
            local_listener: None,
            tls: None,
            tls_suites: None,
            tls_min_version: TlsVersion::default(),
            agent_ca: None,
            agent_crl: None,
            agent_auth: None,
            insecure_http: false,
            public_url: None,
            trusted_proxies: Vec::new(),
            requests_per_second: 200,
            token_requests_per_second: 1000,
            handshake_timeout: Duration::from_secs(10),
            certificate_check_interval: Duration::from_secs(5),
            access_log: None,
            access_log_bytes: 64 << 20,
            data_dir: data_dir.into(),
            artifacts: None,
            artifacts_adopt: false,
            database: None,
            heartbeat: Duration::from_secs(2),
            lease: Duration::from_secs(15),
            fair_share: FairShare::Off,
            checkpoint_wait: Duration::from_secs(600),
            stream_timeout: Duration::from_secs(20),
            keep_points: Duration::from_secs(3600),
            run_silence: Duration::from_secs(600),
            response_wait: Duration::from_secs(20),
            head_timeout: Duration::from_secs(30),
            body_timeout: Duration::from_secs(30),
            no_auth: false,
            oidc: None,
            dataset_roots: Vec::new(),
            max_audit_entries: 100_000,
            max_connections: None,
            webhooks_allow_private: false,
            smtp: None,
            webhook_retries: [5, 300, 1800, 7200, 18_000, 36_000].map(Duration::from_secs).into(),
            bundled: None,
        }
    }

    /// A job's folder. Ids from requests are checked, so the folder is always below `jobs`.
    pub(crate) fn job_dir(&self, id: &JobId) -> PathBuf {
        self.data_dir.join("jobs").join(id.as_str())
    }

    /// How agents identify themselves, with the default applied.
    pub(crate) fn agent_auth(&self) -> AgentAuth {
        let default = if self.has_agent_authority() { AgentAuth::Either } else { AgentAuth::Token };
        self.agent_auth.unwrap_or(default)
    }

    fn has_agent_authority(&self) -> bool {
        self.agent_ca.is_some() || matches!(self.tls, Some(TlsConfig::OwnCa))
    }

    /// Whether TLS handshakes request client certificates.
    pub(crate) fn requests_client_certificates(&self) -> bool {
        self.agent_auth() != AgentAuth::Token
    }

    /// Refuses options about agents' certificates that contradict each other or have no effect.
    fn check_agent_auth(&self) -> Result<(), String> {
        let tls_options = [
            (self.agent_ca.is_some(), "--agent-ca"),
            (self.agent_auth.is_some_and(|auth| auth != AgentAuth::Token), "--agent-auth"),
            (self.tls_suites.is_some(), "--tls-suites"),
            (self.tls_min_version != TlsVersion::default(), "--tls-min-version"),
        ];
        if self.tls.is_none()
            && let Some((_, option)) = tls_options.iter().find(|(given, _)| *given)
        {
            return Err(format!(
                "{option} needs TLS; give a certificate with --tls-cert and --tls-key, or use --tls-own-ca"
            ));
        }
        if self.agent_crl.is_some() && self.agent_ca.is_none() {
            let own = "certificates of the server's own authority are revoked with `lockstep ca revoke`";
            return Err(format!("--agent-crl revokes certificates of --agent-ca, which is missing; {own}"));
        }
        if self.agent_ca.is_some() && !self.requests_client_certificates() {
            return Err("--agent-ca has no effect with --agent-auth token; leave out one of the two".into());
        }
        if self.requests_client_certificates() && !self.has_agent_authority() {
            return Err(
                "--agent-auth needs the authority of agents' certificates; name it with --agent-ca".into()
            );
        }
        if self.no_auth && self.agent_auth == Some(AgentAuth::Certificate) {
            return Err(
                "with --no-auth agents do not identify themselves; leave out --no-auth or --agent-auth"
                    .into(),
            );
        }
        Ok(())
    }
}

/// Checks whether the server may listen at the configured address.
///
/// # Errors
/// Other machines can reach the address, and the server would accept requests from anybody, or without TLS.
pub(crate) fn check_listen_address(config: &ServeConfig) -> Result<(), ServeError> {
    config.check_agent_auth().map_err(ServeError::Tls)?;
    if let Some(local_listener) = &config.local_listener {
        let address = local_listener.local_addr().map_err(ServeError::Stopped)?;
        if !address.ip().is_loopback() {
            return Err(ServeError::Plaintext(address.ip()));
        }
    }
    // All clients of the proxy would have all rights.
    if config.no_auth && (!config.trusted_proxies.is_empty() || config.public_url.is_some()) {
        return Err(ServeError::OpenToOthers);
    }
    if config.oidc.is_some() && config.no_auth {
        return Err(ServeError::Oidc(
            "--no-auth and an OpenID provider exclude each other; leave out one of the two".into(),
        ));
    }
    let ip = config.listen.ip();
    if config.oidc.is_some() && config.public_url.is_none() && !ip.is_loopback() {
        let detail =
            "the provider sends browsers back to the address that people use; name it with --public-url";
        return Err(ServeError::Oidc(detail.into()));
    }
    if ip.is_loopback() {
        return Ok(());
    }
    if config.no_auth {
        return Err(ServeError::NotLoopback(ip));
    }
    if config.tls.is_none() && !config.insecure_http && config.trusted_proxies.is_empty() {
        return Err(ServeError::Plaintext(ip));
    }
    Ok(())
}
