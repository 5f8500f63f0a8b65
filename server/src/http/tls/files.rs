//! Reads and checks a certificate and its key from PEM files.

use super::certificate::Facts;
use crate::config::tls_suites::provider;
use jiff::Timestamp;
use rustls::{
    pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, pem::PemObject},
    sign::CertifiedKey,
};
use sha2::{Digest, Sha256};
use std::{fs::File, io::Read, os::unix::fs::MetadataExt, path::Path, sync::Arc};

/// Maximum size of a file. A chain has a few kilobytes.
const FILE_BYTES: u64 = 1 << 20;

/// A certificate with its key.
#[derive(Debug)]
pub(super) struct Loaded {
    pub(super) key: Arc<CertifiedKey>,
    pub(super) facts: Facts,
}

/// Reads a chain and its key, which may be in the same file.
///
/// # Errors
/// A sentence that says what to change.
pub(super) fn load(certificate: &Path, key: &Path) -> Result<Loaded, String> {
    let shown = certificate.display();
    let certified = pair(certificate, key)?;
    let facts = certified
        .cert
        .first()
        .and_then(|leaf| Facts::read(leaf))
        .ok_or_else(|| format!("{shown} has a certificate that cannot be read"))?;
    if facts.names.is_empty() {
        return Err(format!(
            "the certificate in {shown} has no subject alternative name, which clients require; have it \
             issued with the names of this server"
        ));
    }
    let now = crate::now();
    if facts.not_after < now {
        return Err(format!("the certificate in {shown} expired at {}; renew it", minute(facts.not_after)));
    }
    if facts.not_before > now {
        return Err(format!(
            "the certificate in {shown} is not valid before {}; check this machine's clock",
            minute(facts.not_before)
        ));
    }
    Ok(Loaded { key: Arc::new(certified), facts })
}

/// Reads a chain, and the key of its first certificate.
pub(super) fn pair(certificate: &Path, key: &Path) -> Result<CertifiedKey, String> {
    let chain = certificates(certificate)?;
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
pub(super) fn minute(time: Timestamp) -> String {
    let text = time.to_string();
    format!("{} UTC", text.get(..16).unwrap_or(&text).replace('T', " "))
}

/// Reads the certificates of a file, at least one.
pub(super) fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let shown = path.display();
    let pem = read(path, Readers::Anybody)?;
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    match chain {
        Ok(chain) if !chain.is_empty() => Ok(chain),
        Ok(_) => Err(format!("{shown} has no certificate (PEM, \"BEGIN CERTIFICATE\")")),
        Err(error) => Err(format!("{shown} cannot be read as PEM: {error}")),
    }
}

/// Reads the revocation lists of a file (PEM, or one in DER), at least one.
pub(super) fn revocation_lists(path: &Path) -> Result<Vec<CertificateRevocationListDer<'static>>, String> {
    const SEQUENCE: u8 = 0x30;
    let shown = path.display();
    let content = read(path, Readers::Anybody)?;
    if content.first() == Some(&SEQUENCE) {
        return Ok(vec![CertificateRevocationListDer::from(content)]);
    }
    let lists: Result<Vec<_>, _> = CertificateRevocationListDer::pem_slice_iter(&content).collect();
    match lists {
        Ok(lists) if !lists.is_empty() => Ok(lists),
        Ok(_) => Err(format!("{shown} has no revocation list (PEM, \"BEGIN X509 CRL\", or DER)")),
        Err(error) => Err(format!("{shown} cannot be read as PEM: {error}")),
    }
}

/// Reads a key from a file that other users cannot read.
fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, String> {
    let pem = read(path, Readers::Owner)?;
    PrivateKeyDer::from_pem_slice(&pem).map_err(|_| {
        format!("{} has no private key (PEM, \"BEGIN PRIVATE KEY\", without a passphrase)", path.display())
    })
}

/// Who may be able to read a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Readers {
    Anybody,
    /// Only the file's owner, so its mode is `0600`, or `0640` if root owns it, as with Debian's group `ssl-cert` and Postgres.
    Owner,
}

/// Reads a file.
///
/// # Errors
/// The file cannot be read, is too long, or can be read by more users than `readers`.
pub(super) fn read(path: &Path, readers: Readers) -> Result<Vec<u8>, String> {
    let shown = path.display();
    let failed = |error: std::io::Error| format!("{shown}: {error}");
    let file = File::open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return Err(format!("{shown} is not a regular file"));
    }
    if metadata.len() > FILE_BYTES {
        return Err(format!("{shown} has more than {} KiB", FILE_BYTES >> 10));
    }
    let open_to = metadata.mode() & if metadata.uid() == 0 { 0o037 } else { 0o077 };
    if readers == Readers::Owner && open_to != 0 {
        return Err(format!(
            "the key {shown} can be read by others (mode {:04o}); close it with `chmod 600 {shown}`",
            metadata.mode() & 0o7777
        ));
    }
    let mut content = Vec::new();
    file.take(FILE_BYTES).read_to_end(&mut content).map_err(failed)?;
    Ok(content)
}

/// SHA-256 of a certificate (DER), in the format of browsers.
pub(super) fn fingerprint(der: &[u8]) -> String {
    Sha256::digest(der).iter().map(|byte| format!("{byte:02X}")).collect::<Vec<_>>().join(":")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_more_than_one_mebibyte_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("chain.pem");
        std::fs::write(&path, vec![b'#'; FILE_BYTES as usize]).unwrap();
        assert_eq!(read(&path, Readers::Anybody).unwrap().len() as u64, FILE_BYTES);
        std::fs::write(&path, vec![b'#'; FILE_BYTES as usize + 1]).unwrap();
        let why = read(&path, Readers::Anybody).unwrap_err();
        assert!(why.contains("chain.pem has more than 1024 KiB"), "{why}");
    }
}
