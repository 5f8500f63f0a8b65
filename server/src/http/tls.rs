//! TLS: the server's certificate, which comes from files or from the server's own certificate authority and is reloaded when the files
//! change; agents' certificates (`agents.rs`); cipher suites. Open connections keep the certificate of their handshake.

mod accept;
mod agents;
pub mod ca;
mod certificate;
mod files;
mod names;

pub use crate::config::tls_suites::{TlsSuites, TlsVersion};
pub(crate) use accept::accept;
pub(crate) use agents::{AgentTrust, ClientCertificate};
pub use certificate::{Facts, Name};
pub use names::addresses;

use crate::{
    config::{ServeConfig, TlsConfig, tls_suites},
    util::{lock, pem_files},
};
use ca::Authority;
use files::{LoadedCertificate, format_minute, load};
use rustls::{
    server::{ClientHello, ResolvesServerCert},
    sign::CertifiedKey,
};
use std::{
    fmt, fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::{Duration, Instant},
};
use tokio_rustls::TlsAcceptor;

/// Interval between two log lines about a certificate that expires soon.
const REMINDER_INTERVAL: Duration = Duration::from_secs(24 * 3600);
/// A certificate of the server's own authority is renewed when fewer days are left, which is before the first warning.
const RENEW_BEFORE_DAYS: i64 = 120;

/// The server's current certificate.
pub(crate) struct ServerCertificate {
    files: Mutex<WatchedFiles>,
    /// The server's own certificate authority, if it issues the certificate.
    own: Option<OwnAuthority>,
    /// The CA certificates that agents' certificates must come from. `None` if agents identify themselves by tokens only.
    pub(crate) agents: Option<Arc<AgentTrust>>,
    suites: Option<TlsSuites>,
    lowest_version: TlsVersion,
    current: RwLock<Arc<LoadedCertificate>>,
}

struct OwnAuthority {
    authority: Authority,
    names: Vec<String>,
}

struct WatchedFiles {
    certificate: PathBuf,
    key: PathBuf,
    stamp: Stamp,
    /// Why the files on the disk are not used; `None` if they are used.
    refusal: Option<String>,
    /// When warnings were last logged.
    last_reminder: Option<Instant>,
}

/// Inode, length and modification time, which differ after a file was changed or replaced.
type FileStamp = (u64, u64, i64, i64);
/// The stamps of two files; `None` for a missing file, and for a pipe, which can be read only once.
type Stamp = [Option<FileStamp>; 2];

fn stamp_of(path: &Path) -> Option<FileStamp> {
    let found = fs::metadata(path).ok().filter(fs::Metadata::is_file);
    found.map(|found| (found.ino(), found.len(), found.mtime(), found.mtime_nsec()))
}

impl ServerCertificate {
    /// Loads the certificate from files, or from the server's own authority, which issues a new certificate if necessary.
    ///
    /// # Errors
    /// A sentence that says what to change.
    pub(crate) fn open(config: &ServeConfig, tls: &TlsConfig) -> Result<Arc<Self>, String> {
        let (own, certificate, key) = match tls {
            TlsConfig::Files { certificate, key } => (None, certificate.clone(), key.clone()),
            TlsConfig::OwnCa => {
                let own = OwnAuthority::open(config)?;
                own.renew_if_due()?;
                let file = own.authority.server_file();
                (Some(own), file.clone(), file)
            }
        };
        let stamp = [certificate.as_path(), key.as_path()].map(stamp_of);
        let loaded = load(&certificate, &key)?;
        let files = Mutex::new(WatchedFiles { certificate, key, stamp, refusal: None, last_reminder: None });
        let agents = AgentTrust::open(config, tls)?.map(Arc::new);
        let (suites, lowest_version) = (config.tls_suites.clone(), config.tls_min_version);
        // If no version or suite can be offered, no client could connect. The server then does not start.
        tls_suites::server_config(suites.as_ref(), lowest_version, &loaded.key)?;
        let current = RwLock::new(Arc::new(loaded));
        Ok(Arc::new(Self { files, own, agents, suites, lowest_version, current }))
    }

    /// An acceptor for TLS connections that uses the current certificate.
    pub(crate) fn acceptor(self: &Arc<Self>) -> Result<TlsAcceptor, String> {
        let current = self.current();
        let config = tls_suites::server_config(self.suites.as_ref(), self.lowest_version, &current.key)?;
        let config = match &self.agents {
            Some(agents) => config.with_client_cert_verifier(agents.clone()),
            None => config.with_no_client_auth(),
        };
        let mut config = config.with_cert_resolver(self.clone());
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(TlsAcceptor::from(Arc::new(config)))
    }

    fn current(&self) -> Arc<LoadedCertificate> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether the certificate is valid for `host` (without port and brackets).
    pub(crate) fn matches(&self, host: &str) -> bool {
        self.current().facts.names.iter().any(|name| name.matches(host))
    }

    /// The names for which the certificate is valid.
    pub(crate) fn names(&self) -> Vec<String> {
        self.current().facts.names.iter().map(ToString::to_string).collect()
    }

    /// Warnings for the operator: a certificate expires soon, or its files cannot be used.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let now = crate::now();
        let mut warnings = Vec::from_iter(expires_soon("the TLS certificate", &self.current().facts, now));
        warnings.extend(self.own.as_ref().and_then(|own| {
            expires_soon("the certificate authority of this server", &own.authority.facts, now)
        }));
        if let Some(refusal) = &lock(&self.files).refusal {
            warnings.push(format!("the new TLS certificate is not served: {refusal}"));
        }
        warnings.extend(self.agents.iter().flat_map(|agents| agents.warnings()));
        warnings
    }

    /// Checks the certificate's files at this interval, and renews a certificate of the server's own authority. Never returns.
    pub(crate) async fn watch(self: Arc<Self>, interval: Duration) {
        loop {
            tokio::time::sleep(interval).await;
            let served = self.clone();
            // Reading files from a network file system may take long.
            if tokio::task::spawn_blocking(move || served.reload_if_changed()).await.is_err() {
                tracing::error!("reading the certificate's files failed");
            }
        }
    }

    fn reload_if_changed(&self) {
        if let Some(own) = &self.own
            && let Err(error) = own.renew_if_due()
        {
            tracing::error!(error, "the server's certificate cannot be renewed");
        }
        if let Some(agents) = &self.agents {
            agents.reload_if_changed();
        }
        let mut files = lock(&self.files);
        let stamp = [files.certificate.as_path(), files.key.as_path()].map(stamp_of);
        if stamp != files.stamp {
            files.stamp = stamp;
            match load(&files.certificate, &files.key) {
                Ok(loaded) => {
                    let until = format_minute(loaded.facts.not_after);
                    tracing::info!(until, names = loaded.facts.names_in_words(), "serving a new certificate");
                    *self.current.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(loaded);
                    (files.refusal, files.last_reminder) = (None, None);
                }
                Err(error) => {
                    tracing::warn!(
                        error,
                        "the certificate's files have changed but cannot be used; the old certificate stays in use"
                    );
                    files.refusal = Some(error);
                }
            }
        }
        let is_due = files.last_reminder.is_none_or(|last| last.elapsed() >= REMINDER_INTERVAL);
        if is_due {
            files.last_reminder = Some(Instant::now());
            drop(files);
            for warning in self.warnings() {
                tracing::warn!("{warning}");
            }
        }
    }
}

impl OwnAuthority {
    fn open(config: &ServeConfig) -> Result<Self, String> {
        let authority = if ca::exists(&config.data_dir) {
            Authority::open(&config.data_dir)?
        } else {
            let new = Authority::init(&config.data_dir)?;
            tracing::info!(
                sha256 = new.fingerprint,
                "created a certificate authority; `lockstep ca show` prints the certificate that clients must trust"
            );
            new
        };
        let mut names = names::of_this_machine();
        let host = config.public_url.as_ref().map(|url| url.host().to_owned());
        let listen_ip = config.listen.ip();
        let listen_ip = (!listen_ip.is_unspecified()).then(|| listen_ip.to_string());
        for name in host.into_iter().chain(listen_ip) {
            if !names.contains(&name) {
                names.insert(0, name);
            }
        }
        Ok(Self { authority, names })
    }

    /// Issues a new certificate if the current certificate expires soon, lacks a name of this machine, or is from another authority.
    fn renew_if_due(&self) -> Result<(), String> {
        let path = self.authority.server_file();
        let is_usable = path.exists()
            && load(&path, &path).is_ok_and(|loaded| {
                let has = |name: &String| loaded.facts.names.iter().any(|n| n.matches(name));
                loaded.facts.days_left(crate::now()) >= RENEW_BEFORE_DAYS
                    && self.names.iter().all(has)
                    && loaded.key.cert.len() > 1
                    && loaded.key.cert.last().map(|c| files::fingerprint(c)).as_deref()
                        == Some(self.authority.fingerprint.as_str())
            });
        if is_usable { Ok(()) } else { self.authority.issue_for_server(&self.names) }
    }
}

/// A warning about a certificate that expires soon; `None` if it does not expire soon.
pub fn expires_soon(what: &str, facts: &Facts, now: jiff::Timestamp) -> Option<String> {
    facts.expires_soon(now).then(|| {
        let days = facts.days_left(now);
        format!("{what} expires in {days} days, at {}; renew it", format_minute(facts.not_after))
    })
}

/// Reads the facts of the certificate in a file.
///
/// # Errors
/// The certificate cannot be read.
pub fn examine(certificate: &Path) -> Result<Facts, String> {
    files::first_facts(certificate, &pem_files::read_certificates(certificate)?)
}

impl ResolvesServerCert for ServerCertificate {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current().key.clone())
    }
}

impl fmt::Debug for ServerCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerCertificate").field("facts", &self.current().facts).finish_non_exhaustive()
    }
}
