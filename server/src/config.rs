//! The configuration of `lockstep serve`, and the errors that keep it from starting.

use crate::{
    access_log::AccessLogTo,
    addresses::{Network, PublicUrl},
    oidc_config::OidcConfig,
    tls_suites::{TlsSuites, TlsVersion},
};
use std::{
    borrow::Cow,
    net::{IpAddr, SocketAddr, TcpListener},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

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
            database: None,
            heartbeat: Duration::from_secs(2),
            lease: Duration::from_secs(15),
            fair_share: FairShare::Off,
            checkpoint_wait: Duration::from_secs(600),
            stream_patience: Duration::from_secs(20),
            keep_points: Duration::from_secs(3600),
            evaluation_wait: Duration::from_secs(20),
            head_patience: Duration::from_secs(30),
            body_patience: Duration::from_secs(30),
            no_auth: false,
            oidc: None,
            dataset_roots: Vec::new(),
            audit_entries: 100_000,
            connections: None,
            bundled: None,
        }
    }
}

impl ServeConfig {
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
pub fn may_listen(config: &ServeConfig) -> Result<(), ServeError> {
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

/// Why the server did not start, or stopped. Each message says what to change.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// An address that other machines can reach.
    #[error(
        "refusing to listen on {0} with --no-auth: it can be reached from other machines, and anybody there could run jobs \
         here; leave out --no-auth, so that requests need a token, or listen on 127.0.0.1 or [::1]"
    )]
    NotLoopback(IpAddr),
    /// Others reach it through a proxy.
    #[error(
        "refusing --no-auth with --trusted-proxy or --public-url: whoever reaches the proxy could run jobs here; leave out --no-auth, so that \
         requests need a token"
    )]
    OpenToOthers,
    /// An address that other machines can reach, without TLS.
    #[error(
        "refusing to listen on {0} without TLS: whoever can listen to the network could read tokens and weights; give it a \
         certificate with --tls-cert and --tls-key, or have it make its own with --tls-own-ca, or name the proxy that \
         encrypts with --trusted-proxy; --insecure-http listens in clear nevertheless"
    )]
    Plaintext(IpAddr),
    /// The OpenID provider cannot be used as it is given.
    #[error("--oidc-issuer: {0}")]
    Oidc(String),
    /// A certificate that cannot be served.
    #[error("TLS: {0}")]
    Tls(String),
    /// The access log cannot be written.
    #[error("the access log cannot be written: {0}; choose another file with --access-log")]
    AccessLog(String),
    /// Another program listens there.
    #[error("{0} is taken by another program; stop it, or choose another port with --listen {1}:0")]
    PortTaken(SocketAddr, IpAddr),
    /// The address cannot be listened on for another reason.
    #[error("cannot listen on {address}: {source}; choose another address with --listen")]
    Listen {
        /// The address asked for.
        address: SocketAddr,
        /// What the system said.
        source: std::io::Error,
    },
    /// The data directory cannot be made or written.
    #[error("the data directory {} cannot be used: {source}; make it writable or choose another with --data-dir", path.display())]
    DataDir {
        /// The directory.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Another server has the data directory.
    #[error(
        "the data directory {} is in use by another lockstep server{}; stop that one or choose another with --data-dir",
        path.display(),
        .pid.as_ref().map(|p| format!(" (process {p})")).unwrap_or_default()
    )]
    DataDirInUse {
        /// The directory.
        path: PathBuf,
        /// The other server's process, when it could be read.
        pid: Option<String>,
    },
    /// A database URL that this build cannot open.
    #[error("the database {0:?} cannot be used: {1}")]
    DatabaseUrl(String, String),
    /// The database was written by a later version.
    #[error(
        "the database {path} was written by a newer version of lockstep (it has migration {found}, this version \
         knows up to {known}); install that version, or choose another --data-dir"
    )]
    DatabaseTooNew {
        /// The database.
        path: String,
        /// The newest migration in it.
        found: i64,
        /// The newest migration here.
        known: i64,
    },
    /// The database was written by a version whose tables no migration leads on from.
    #[error(
        "the database {path} was written by a version of lockstep from before the first release, and its tables are no \
         longer brought up to date: with the version that wrote it run `lockstep backup -o FILE`, move the database away, and \
         with this version run `lockstep restore FILE` (or leave it there and name a new one with --database)"
    )]
    DatabaseTooOld {
        /// The database.
        path: String,
    },
    /// A migration that was begun and not ended.
    #[error(
        "migration {version} of the database {path} was begun and never finished, so its tables may be half changed; \
         put back a copy from before the upgrade, or restore a backup into a new database (`lockstep restore FILE \
         --database URL`)"
    )]
    DatabaseHalfMigrated {
        /// The database.
        path: String,
        /// The migration.
        version: i64,
    },
    /// A migration that is another here.
    #[error(
        "the database {path} was made by another build of lockstep: its migration {version} is not the one that this \
         build has; use the build that made it, or back up with that one and restore into a new database with this one"
    )]
    DatabaseOfAnotherBuild {
        /// The database.
        path: String,
        /// The migration.
        version: i64,
    },
    /// Another server, or another command of this program, has the database.
    #[error(
        "the database {path} is in use by another lockstep server{}; stop that one, or name another with --database",
        .by.as_ref().map(|by| format!(" ({by})")).unwrap_or_default()
    )]
    DatabaseInUse {
        /// The database.
        path: String,
        /// Who has it, when that is known.
        by: Option<String>,
    },
    /// The database cannot be opened.
    #[error("the database {path} cannot be opened: {detail}")]
    Database {
        /// The database.
        path: String,
        /// What went wrong.
        detail: String,
    },
    /// The file that holds the token of this machine cannot be used.
    #[error(
        "the token of this machine cannot be kept: {0}; make the file `token` of the data directory writable, or remove it"
    )]
    Token(#[source] std::io::Error),
    /// It ran, and then could not continue.
    #[error("the server stopped: {0}")]
    Stopped(#[source] std::io::Error),
}

impl ServeError {
    /// 2 when the request was wrong, 1 when it failed while running.
    pub fn exit_code(&self) -> u8 {
        if matches!(self, ServeError::Stopped(_)) { 1 } else { 2 }
    }
}
