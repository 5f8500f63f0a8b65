//! Reads and checks a certificate and its key from PEM files.

use super::certificate::Facts;
use crate::{
    config::tls_suites::provider,
    util::pem_files::{Readers, parse_objects, read, read_certificates},
};
use jiff::Timestamp;
use rustls::{
    pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, pem::PemObject},
    sign::CertifiedKey,
};
use sha2::{Digest, Sha256};
use std::{path::Path, sync::Arc};

#[derive(Debug)]
pub(super) struct LoadedCertificate {
    pub(super) key: Arc<CertifiedKey>,
    pub(super) facts: Facts,
}

/// Reads a chain and its key, which may be in the same file.
///
/// # Errors
/// A sentence that says what to change.
pub(super) fn load(certificate: &Path, key: &Path) -> Result<LoadedCertificate, String> {
    let shown = certificate.display();
    let certified = read_pair(certificate, key)?;
    let facts = first_facts(certificate, &certified.cert)?;
    if facts.names.is_empty() {
        return Err(format!(
            "the certificate in {shown} has no subject alternative name, which clients require; have it \
             issued with the names of this server"
        ));
    }
    let now = crate::now();
    if facts.not_after < now {
        return Err(format!(
            "the certificate in {shown} expired at {}; renew it",
            format_minute(facts.not_after)
        ));
    }
    if facts.not_before > now {
        return Err(format!(
            "the certificate in {shown} is not valid before {}; check this machine's clock",
            format_minute(facts.not_before)
        ));
    }
    Ok(LoadedCertificate { key: Arc::new(certified), facts })
}

/// The facts of the first certificate of a chain that was read from `path`.
pub(super) fn first_facts(path: &Path, chain: &[CertificateDer<'_>]) -> Result<Facts, String> {
    let facts = chain.first().and_then(|leaf| Facts::read(leaf));
    facts.ok_or_else(|| format!("{} has a certificate that cannot be read", path.display()))
}

/// Reads a chain, and the key of its first certificate.
pub(super) fn read_pair(certificate: &Path, key: &Path) -> Result<CertifiedKey, String> {
    let chain = read_certificates(certificate)?;
    CertifiedKey::from_der(chain, private_key(key)?, &provider()).map_err(|error| match error {
        rustls::Error::InconsistentKeys(_) => format!(
            "the key in {} does not belong to the certificate in {}; name a matching pair",
            key.display(),
            certificate.display()
        ),
        other => format!("{} with {}: {other}", certificate.display(), key.display()),
    })
}

/// A time in UTC, to the minute.
pub(super) fn format_minute(time: Timestamp) -> String {
    time.strftime("%Y-%m-%d %H:%M UTC").to_string()
}

/// Reads the revocation lists of a file: one or more in PEM, or one in DER.
pub(super) fn revocation_lists(path: &Path) -> Result<Vec<CertificateRevocationListDer<'static>>, String> {
    const SEQUENCE: u8 = 0x30;
    let content = read(path, Readers::Anybody)?;
    if content.first() == Some(&SEQUENCE) {
        return Ok(vec![CertificateRevocationListDer::from(content)]);
    }
    parse_objects(path, &content, "revocation list (PEM, \"BEGIN X509 CRL\", or DER)")
}

/// Reads a key from a file that other users cannot read.
fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, String> {
    let pem = read(path, Readers::Owner)?;
    PrivateKeyDer::from_pem_slice(&pem).map_err(|_| {
        format!("{} has no private key (PEM, \"BEGIN PRIVATE KEY\", without a passphrase)", path.display())
    })
}

/// SHA-256 of a certificate (DER), in the format of browsers.
pub(super) fn fingerprint(der: &[u8]) -> String {
    Sha256::digest(der).iter().map(|byte| format!("{byte:02X}")).collect::<Vec<_>>().join(":")
}
