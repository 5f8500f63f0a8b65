//! Agents that identify themselves by a certificate (mutual TLS): verification by CA certificates and revocation lists, and reasons for
//! refusals.
//!
//! A certificate is verified twice, with the same rules: in the handshake, and when the agent's connection begins, because a resumed
//! handshake verifies nothing. While an agent is connected, its certificate is verified again with each new revocation list and when it
//! expires.

mod handshake;

pub(super) use handshake::handshake;

use super::{
    ca,
    certificate::{Facts, next_update},
    expires_soon,
    files::{self, format_minute},
    stamp_of,
};
use crate::{
    config::{ServeConfig, TlsConfig, tls_suites},
    util::{lock, pem_files},
};
use jiff::Timestamp;
use lockstep_protocol::numbers::plural;
use rustls::{
    CertificateError, DistinguishedName, Error as TlsError, RootCertStore,
    pki_types::{CertificateDer, UnixTime},
    server::{WebPkiClientVerifier, danger::ClientCertVerifier},
};
use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::Duration,
};
use tokio::sync::watch;

/// Maximum number of agents that a warning about expiring certificates names. Further agents are counted.
const MAX_NAMED: usize = 20;
/// Maximum length of a serial number in a log line, in hexadecimal digits. RFC 5280 allows no longer serial numbers.
const SERIAL_DIGITS: usize = 40;
/// Maximum interval between two checks for expired certificates. The clock may be set meanwhile.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RefusedCertificate {
    /// The certificate's name and serial number.
    pub(crate) who: String,
    pub(crate) why: String,
}

/// The certificate of a connection's client.
#[derive(Debug)]
pub(crate) struct ClientCertificate {
    chain: Vec<CertificateDer<'static>>,
    /// The name in the certificate, as in [`name_of`].
    pub(crate) name: Option<String>,
    pub(crate) facts: Facts,
}

impl ClientCertificate {
    /// The certificate that a client has presented in its handshake.
    pub(crate) fn of(chain: &[CertificateDer<'_>]) -> Option<Self> {
        let facts = Facts::read(chain.first()?)?;
        let chain = chain.iter().map(|der| der.clone().into_owned()).collect();
        Some(Self { chain, name: name_of(&facts), facts })
    }

    /// Name and serial number, for logs.
    pub(crate) fn who(&self) -> String {
        who(&self.facts)
    }
}

/// The name by which a certificate identifies its holder: the common name, or else the first alternative name.
fn name_of(facts: &Facts) -> Option<String> {
    let name = facts.common_name.clone().or_else(|| facts.names.first().map(ToString::to_string))?;
    let is_plain = !name.trim().is_empty() && name.len() <= 100;
    (is_plain && lockstep_protocol::invisible::first_invisible(&name).is_none()).then_some(name)
}

fn who(facts: &Facts) -> String {
    let name = name_of(facts).unwrap_or_else(|| "(no name)".into());
    let serial: String = ca::serial_text(&facts.serial).chars().take(SERIAL_DIGITS).collect();
    format!("{name}, serial {serial}")
}

/// The certificates that the server accepts from agents.
pub(crate) struct AgentTrust {
    /// The file with the authorities' certificates.
    ca_file: PathBuf,
    /// The file of the revocation list. The list of the server's own authority exists from the first revocation on.
    revocation_list: Option<PathBuf>,
    /// Whether the authority is the server's own.
    is_own: bool,
    /// Names of the authorities, which are sent to clients, so that browsers offer only matching certificates.
    hints: Vec<DistinguishedName>,
    current: RwLock<Arc<Trust>>,
    files: Mutex<WatchedFiles>,
    changed: watch::Sender<()>,
    /// Name and certificate of agents that have joined since this server started, by the agent's id.
    joined: Mutex<BTreeMap<String, (String, Facts)>>,
}

struct Trust {
    verifier: Arc<dyn ClientCertVerifier>,
    authorities: Vec<Facts>,
    /// The earliest time at which a revocation list must be replaced; `None` without revocation lists.
    next_update: Option<Timestamp>,
}

struct WatchedFiles {
    stamp: super::Stamp,
    /// Why the files on the disk are not used; `None` if they are used.
    refusal: Option<String>,
    /// Whether the log has a warning that the revocation list is out of date.
    is_outdated: bool,
}

fn stamp_of_both(ca_file: &Path, revocation_list: Option<&Path>) -> super::Stamp {
    [stamp_of(ca_file), revocation_list.and_then(stamp_of)]
}

impl Trust {
    fn read(ca_file: &Path, revocation_list: Option<&Path>, is_own: bool) -> Result<Self, String> {
        let shown = ca_file.display();
        let mut roots = RootCertStore::empty();
        let mut authorities = Vec::new();
        for certificate in pem_files::read_certificates(ca_file)? {
            authorities.push(files::first_facts(ca_file, std::slice::from_ref(&certificate))?);
            roots.add(certificate).map_err(|error| {
                format!("{shown} has a certificate that cannot be used as an authority: {error}")
            })?;
        }
        let lists = match revocation_list {
            // The server's own authority may not have revoked any certificate yet.
            Some(path) if !is_own || path.exists() => files::revocation_lists(path)?,
            Some(path) if ca::has_revoked(path) => {
                return Err(format!(
                    "the list of revoked certificates {} is missing, and certificates were revoked: put the file back, or revoke one of these \
                     certificates again, which writes the complete list",
                    path.display()
                ));
            }
            _ => Vec::new(),
        };
        let next_update = lists.iter().filter_map(|list| next_update(list)).min();
        // An outdated list is used nevertheless. Otherwise every agent would be refused as soon as the authority is late with a new list.
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), tls_suites::provider())
            .with_crls(lists)
            .only_check_end_entity_revocation()
            .allow_unauthenticated()
            .build();
        let verifier = verifier.map_err(|error| match revocation_list {
            Some(list) => format!("{shown} with {}: {error}", list.display()),
            None => format!("{shown}: {error}"),
        })?;
        Ok(Self { verifier, authorities, next_update })
    }
}

impl AgentTrust {
    /// Opens the configured files. `None` if agents present no certificates.
    ///
    /// # Errors
    /// A sentence that says what to change.
    pub(super) fn open(config: &ServeConfig, tls: &TlsConfig) -> Result<Option<Self>, String> {
        let (ca_file, revocation_list, is_own) = match (&config.agent_ca, tls) {
            _ if !config.requests_client_certificates() => return Ok(None),
            (Some(file), _) => (file.clone(), config.agent_crl.clone(), false),
            (None, TlsConfig::OwnCa) => {
                let certificate = ca::folder(&config.data_dir).join("ca.crt");
                (certificate, Some(ca::revocation_list(&config.data_dir)), true)
            }
            (None, TlsConfig::Files { .. }) => return Ok(None),
        };
        let stamp = stamp_of_both(&ca_file, revocation_list.as_deref());
        let trust = Trust::read(&ca_file, revocation_list.as_deref(), is_own)?;
        Ok(Some(Self {
            ca_file,
            revocation_list,
            is_own,
            hints: trust.verifier.root_hint_subjects().to_vec(),
            current: RwLock::new(Arc::new(trust)),
            files: Mutex::new(WatchedFiles { stamp, refusal: None, is_outdated: false }),
            changed: watch::Sender::new(()),
            joined: Mutex::default(),
        }))
    }

    fn current(&self) -> Arc<Trust> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reloads changed files. If a changed file cannot be used, the old files stay in use. Otherwise, a damaged revocation list would admit
    /// agents whose certificates are already revoked.
    pub(super) fn reload_if_changed(&self) {
        self.read_if_changed();
        let warning = self.outdated_warning(crate::now());
        let mut files = lock(&self.files);
        if let Some(warning) = warning.as_ref().filter(|_| !files.is_outdated) {
            tracing::warn!("{warning}");
        }
        files.is_outdated = warning.is_some();
    }

    /// A warning that the revocation list should have been replaced by now.
    fn outdated_warning(&self, now: Timestamp) -> Option<String> {
        let due = self.current().next_update.filter(|due| *due < now)?;
        Some(format!(
            "the revocation list {} of agents' certificates is out of date: the next list was due at {}. It is still used, so agents that \
             were revoked since are accepted; replace the list by the authority's newest list",
            self.revocation_list.as_deref().unwrap_or_else(|| Path::new("")).display(),
            format_minute(due)
        ))
    }

    fn read_if_changed(&self) {
        let mut files = lock(&self.files);
        let stamp = stamp_of_both(&self.ca_file, self.revocation_list.as_deref());
        if stamp == files.stamp {
            return;
        }
        files.stamp = stamp;
        match Trust::read(&self.ca_file, self.revocation_list.as_deref(), self.is_own) {
            Ok(trust) => {
                tracing::info!(
                    "agents' certificates are verified with new CA certificates or a new revocation list"
                );
                *self.current.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(trust);
                files.refusal = None;
                self.changed.send_replace(());
            }
            Err(error) => {
                tracing::warn!(
                    error,
                    "the CA certificates or the revocation list of agents have changed but cannot be used; the old files stay in use"
                );
                files.refusal = Some(error);
            }
        }
    }

    /// Verifies a certificate of an agent.
    ///
    /// # Errors
    /// Why the certificate is refused; a sentence.
    pub(crate) fn check(&self, certificate: &ClientCertificate) -> Result<(), String> {
        let Some((leaf, rest)) = certificate.chain.split_first() else {
            return Err("its certificate chain is empty".into());
        };
        let verified = self.current().verifier.verify_client_cert(leaf, rest, UnixTime::now());
        verified.map(drop).map_err(|error| self.in_words(&error, Some(&certificate.facts)))
    }

    /// Waits until a certificate is no longer accepted, and returns the reason.
    pub(crate) async fn wait_until_refused(&self, certificate: &ClientCertificate) -> String {
        let mut changed = self.changed.subscribe();
        loop {
            if let Err(why) = self.check(certificate) {
                return why;
            }
            let seconds = certificate.facts.not_after.as_second() - crate::now().as_second();
            let until_expiry = Duration::from_secs(seconds.max(0).unsigned_abs() + 1);
            tokio::select! {
                _ = changed.changed() => {}
                () = tokio::time::sleep(until_expiry.min(CHECK_INTERVAL)) => {}
            }
        }
    }

    fn in_words(&self, error: &TlsError, facts: Option<&Facts>) -> String {
        let TlsError::InvalidCertificate(problem) = error else { return error.to_string() };
        match problem {
            CertificateError::Revoked => "its certificate was revoked".into(),
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => match facts {
                Some(facts) => format!("its certificate expired at {}", format_minute(facts.not_after)),
                None => "its certificate has expired".into(),
            },
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                "its certificate is not valid yet; check the clocks of both machines".into()
            }
            CertificateError::UnknownIssuer | CertificateError::BadSignature => {
                format!("the authority of its certificate is not in {}", self.ca_file.display())
            }
            CertificateError::UnknownRevocationStatus => {
                let list =
                    self.revocation_list.as_ref().map(|path| path.display().to_string()).unwrap_or_default();
                format!("the revocation list {list} was not issued by the authority of its certificate")
            }
            CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
                "its certificate is not for clients (extended key usage clientAuth)".into()
            }
            other => format!("its certificate is not accepted: {other}"),
        }
    }

    /// Records the certificate with which an agent has joined, for [`AgentTrust::warnings`]. `None` if it has joined with a token.
    pub(crate) fn note_join(&self, agent_id: &str, name: &str, certificate: Option<&ClientCertificate>) {
        let mut joined = lock(&self.joined);
        match certificate {
            Some(certificate) => {
                joined.insert(agent_id.to_owned(), (name.to_owned(), certificate.facts.clone()))
            }
            None => joined.remove(agent_id),
        };
    }

    /// A warning that the certificate with which an agent last connected expires soon.
    pub(crate) fn warning_of(&self, agent_id: &str) -> Option<String> {
        let joined = lock(&self.joined);
        let (_, facts) = joined.get(agent_id)?;
        expires_soon("its certificate", facts, crate::now())
    }

    /// Warnings for the operator.
    pub(super) fn warnings(&self) -> Vec<String> {
        let now = crate::now();
        let mut warnings = Vec::new();
        // `ServerCertificate::warnings` already warns about the server's own authority.
        if !self.is_own {
            let authorities = &self.current().authorities;
            let what = "the authority of agents' certificates";
            warnings.extend(authorities.iter().filter_map(|facts| expires_soon(what, facts, now)));
        }
        if let Some(refusal) = &lock(&self.files).refusal {
            warnings.push(format!(
                "the new CA certificates or revocation list of agents are not used: {refusal}"
            ));
        }
        warnings.extend(self.outdated_warning(now));
        let joined = lock(&self.joined);
        let expiring: Vec<_> = joined
            .values()
            .filter_map(|(name, facts)| {
                expires_soon(&format!("the certificate of the agent {name}"), facts, now)
            })
            .collect();
        let unnamed = expiring.len().saturating_sub(MAX_NAMED);
        warnings.extend(expiring.into_iter().take(MAX_NAMED));
        if unnamed > 0 {
            let agents = plural(unnamed as u64, "more agent");
            warnings.push(format!("the certificates of {agents} expire soon; see the page Machines"));
        }
        warnings
    }
}

impl fmt::Debug for AgentTrust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AgentTrust").field("ca_file", &self.ca_file).finish_non_exhaustive()
    }
}
