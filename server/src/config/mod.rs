//! The configuration of `lockstep serve`.

pub(crate) mod addresses;
pub(crate) mod oidc;
pub(crate) mod serve_error;
pub(crate) mod tls_suites;

use addresses::{Network, PublicUrl};
use lockstep_protocol::JobId;
use oidc::OidcConfig;
use serve_error::ServeError;
use std::{
    borrow::Cow,
    net::{SocketAddr, TcpListener},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};
use tls_suites::{TlsSuites, TlsVersion};

/// Where the server's certificate comes from.
#[derive(Debug, Clone)]
pub enum TlsConfig {
    /// Files that somebody else renews (PEM).
    Files {
        /// The server's certificate, then those between it and the authority.
        certificate: PathBuf,
        /// Its key.
        key: PathBuf,
    },
    /// The authority in the data directory (`lockstep ca`), made when it is missing.
    OwnCa,
}

/// Where requests are logged.
#[derive(Debug, Clone)]
pub enum AccessLogTo {
    /// The standard output.
    Stdout,
    /// A file that only this user can read. When it is full it becomes `FILE.1`, and an earlier one of that name goes.
    File(PathBuf),
}

/// How agents of other machines show who they are. This machine's own agent has a token of its own in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AgentAuth {
    /// By a token.
    Token,
    /// By a certificate alone.
    Certificate,
    /// By a certificate or, without one, by a token.
    Either,
}

impl std::str::FromStr for AgentAuth {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "token" => Ok(Self::Token),
            "certificate" => Ok(Self::Certificate),
            "either" => Ok(Self::Either),
            _ => Err("agents show who they are by certificate, token or either".into()),
        }
    }
}

/// Whose jobs take turns where several of one priority wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FairShare {
    /// Nobody's: the job that was submitted first comes first.
    #[default]
    Off,
    /// Owners: the one with the fewest slots in use comes first.
    Owner,
    /// Projects, likewise.
    Project,
}

impl std::str::FromStr for FairShare {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self::Off),
            "owner" => Ok(Self::Owner),
            "project" => Ok(Self::Project),
            _ => Err("shares are by owner, by project or off".into()),
        }
    }
}

/// How the server runs.
#[derive(Debug, Clone)]
pub struct ServeConfig {
    /// Address and port to listen on; port 0 takes a free one. See [`may_listen`].
    pub listen: SocketAddr,
    /// Another listener, on loopback and in clear: for the agent of this machine where `listen` has TLS.
    pub local_listener: Option<Arc<TcpListener>>,
    /// Encrypt, with a certificate from there.
    pub tls: Option<TlsConfig>,
    /// The cipher suites that are spoken; all when absent.
    pub tls_suites: Option<TlsSuites>,
    /// The lowest version of TLS that is spoken.
    pub tls_lowest: TlsVersion,
    /// Authorities of agents' certificates (PEM). When absent, the server's own where it has one.
    pub agent_ca: Option<PathBuf>,
    /// The revocation list of these authorities (PEM or DER), read again when it changes.
    pub agent_crl: Option<PathBuf>,
    /// How agents show who they are; when absent, by either where there is an authority for certificates, else by token.
    pub agent_auth: Option<AgentAuth>,
    /// Listen in clear where other machines can reach it.
    pub insecure_http: bool,
    /// The address that people and programs use.
    pub public_url: Option<PublicUrl>,
    /// Proxies that are believed when they say for whom they speak.
    pub trusted_proxies: Vec<Network>,
    /// How many requests an address of another machine may make a second, in the long run; 0 is no limit.
    pub requests_per_second: u32,
    /// How many requests may be made with a token a second, or by a person who is signed in, in the long run; 0 is no limit. Agents
    /// are not counted.
    pub token_requests_per_second: u32,
    /// A TLS handshake must be over within this time.
    pub handshake_patience: Duration,
    /// How often the certificate's files are looked at.
    pub certificate_check: Duration,
    /// Where requests are logged.
    pub access_log: Option<AccessLogTo>,
    /// The length at which a file of that log is followed by a new one.
    pub access_log_bytes: u64,
    /// Where the database, job folders and checkpoints lie; made when missing.
    pub data_dir: PathBuf,
    /// Where checkpoints are kept besides the data directory: a directory, or `s3://BUCKET/PREFIX`. Nowhere when absent.
    pub artifacts: Option<String>,
    /// Take that store over from another server, such as the one whose backup the database was restored from.
    pub artifacts_adopt: bool,
    /// `sqlite://PATH` or `postgres://...`; the data directory's `lockstep.db` when absent.
    pub database: Option<String>,
    /// How often an agent says that it is alive.
    pub heartbeat: Duration,
    /// An attempt whose agent has been silent for this long is lost.
    pub lease: Duration,
    /// Who comes first of those whose jobs of one priority wait.
    pub fair_share: FairShare,
    /// Longest wait for a checkpoint that is being uploaded when its job could continue on another machine than its holder.
    pub checkpoint_wait: Duration,
    /// A reader of a stream that takes nothing for this long is closed; it can come back for the rest.
    pub stream_patience: Duration,
    /// Points of a job stay among its events, and so in its stream, for so long after its end. Metrics keep them for ever.
    pub keep_points: Duration,
    /// A run from elsewhere whose program sends nothing for this long has failed, until it sends again.
    pub run_silence: Duration,
    /// A request for an evaluation waits so long for its end; then it is answered 202 and asked again.
    pub evaluation_wait: Duration,
    /// A request's head must have come within this time, counted from the connection's begin or its last answer.
    pub head_patience: Duration,
    /// A request's body must continue to arrive within this time.
    pub body_patience: Duration,
    /// Everybody who reaches the server may do everything. For loopback addresses alone.
    pub no_auth: bool,
    /// The OpenID provider that signs people in, in addition to passwords.
    pub oidc: Option<OidcConfig>,
    /// Folders that datasets and files of weights may come from, on the machines that have them. Empty: any folder, named by
    /// admins alone.
    pub dataset_roots: Vec<PathBuf>,
    /// Entries of the audit log that are kept.
    pub audit_entries: u32,
    /// Connections at once; as many as the process's file descriptors allow when absent.
    pub connections: Option<usize>,
    /// Webhooks may reach addresses that the internet does not: this machine, private networks, metadata services.
    pub webhooks_allow_private: bool,
    /// The pause after each attempt to send a message of a webhook, but the last.
    pub webhook_retries: Vec<Duration>,
    /// Pictures that come with the program, for a server that has no dataset yet.
    pub bundled: Option<Bundled>,
}

/// A dataset that is part of the program.
#[derive(Debug, Clone, Copy)]
pub struct Bundled {
    /// It is registered under this name.
    pub name: &'static str,
    /// Names and contents of its files.
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
            tls_lowest: TlsVersion::default(),
            agent_ca: None,
            agent_crl: None,
            agent_auth: None,
            insecure_http: false,
            public_url: None,
            trusted_proxies: Vec::new(),
            requests_per_second: 200,
            token_requests_per_second: 1000,
            handshake_patience: Duration::from_secs(10),
            certificate_check: Duration::from_secs(5),
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
            stream_patience: Duration::from_secs(20),
            keep_points: Duration::from_secs(3600),
            run_silence: Duration::from_secs(600),
            evaluation_wait: Duration::from_secs(20),
            head_patience: Duration::from_secs(30),
            body_patience: Duration::from_secs(30),
            no_auth: false,
            oidc: None,
            dataset_roots: Vec::new(),
            audit_entries: 100_000,
            connections: None,
            webhooks_allow_private: false,
            webhook_retries: [5, 300, 1800, 7200, 18_000, 36_000].map(Duration::from_secs).into(),
            bundled: None,
        }
    }
}

impl ServeConfig {
    /// A job's folder. Ids are made here and checked when they come in, so it is always below `jobs`.
    pub(crate) fn job_dir(&self, id: &JobId) -> PathBuf {
        self.data_dir.join("jobs").join(id.as_str())
    }

    /// How agents show who they are.
    pub(crate) fn agent_auth(&self) -> AgentAuth {
        let has_authority = self.agent_ca.is_some() || matches!(self.tls, Some(TlsConfig::OwnCa));
        self.agent_auth.unwrap_or(if has_authority { AgentAuth::Either } else { AgentAuth::Token })
    }

    /// Whether handshakes ask for certificates.
    pub(crate) fn agents_show_certificates(&self) -> bool {
        self.agent_auth() != AgentAuth::Token
    }

    /// What contradicts itself about agents' certificates, or has no effect.
    fn check_agent_auth(&self) -> Result<(), String> {
        let wants = [
            (self.agent_ca.is_some(), "--agent-ca"),
            (self.agent_auth.is_some_and(|auth| auth != AgentAuth::Token), "--agent-auth"),
            (self.tls_suites.is_some(), "--tls-suites"),
            (self.tls_lowest != TlsVersion::default(), "--tls-min-version"),
        ];
        if let (None, Some((_, option))) = (&self.tls, wants.iter().find(|(given, _)| *given)) {
            return Err(format!(
                "{option} is about TLS; give a certificate with --tls-cert and --tls-key, or use --tls-own-ca"
            ));
        }
        if self.agent_crl.is_some() && self.agent_ca.is_none() {
            return Err("--agent-crl is the list of --agent-ca; the server's own authority has its own (`lockstep ca revoke`)".into());
        }
        if self.agent_ca.is_some() && !self.agents_show_certificates() {
            return Err("--agent-ca has no effect with --agent-auth token; leave out one of the two".into());
        }
        if self.agents_show_certificates()
            && self.agent_ca.is_none()
            && !matches!(self.tls, Some(TlsConfig::OwnCa))
        {
            return Err(
                "--agent-auth needs the authority of agents' certificates; name it with --agent-ca".into()
            );
        }
        if self.no_auth && self.agent_auth == Some(AgentAuth::Certificate) {
            return Err("with --no-auth agents show nothing; leave out --no-auth or --agent-auth".into());
        }
        Ok(())
    }
}

/// Whether the server may listen at the configured address.
///
/// # Errors
/// Other machines can reach it and it would take requests from anybody, or in clear.
pub(crate) fn may_listen(config: &ServeConfig) -> Result<(), ServeError> {
    config.check_agent_auth().map_err(ServeError::Tls)?;
    if let Some(local_listener) = &config.local_listener {
        let address = local_listener.local_addr().map_err(ServeError::Stopped)?;
        if !address.ip().is_loopback() {
            return Err(ServeError::Plaintext(address.ip()));
        }
    }
    // Whoever the proxy speaks for would come in with all rights.
    if config.no_auth && (!config.trusted_proxies.is_empty() || config.public_url.is_some()) {
        return Err(ServeError::OpenToOthers);
    }
    if config.oidc.is_some() && config.no_auth {
        return Err(ServeError::Oidc("with --no-auth nobody signs in; leave out one of the two".into()));
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
