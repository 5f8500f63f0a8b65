//! The client certificate for mutual TLS: PEM files, or a PKCS#12 file with a password.

use lockstep_host::files;
use p12_keystore::{
    Certificate, KeyStore, KeyStoreEntry, Pkcs12Archive, PrivateKey as StoredKey, PrivateKeyChain,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, pem::PemObject};
use std::{
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

/// Maximum size of a file. A chain has a few kilobytes.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// Maximum length of a password.
const MAX_PASSWORD_BYTES: usize = 1024;

/// The paths of a client's certificate and key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum IdentityFiles {
    /// PEM. The client's certificate comes first, then the intermediate certificates.
    Pem {
        certificate: PathBuf,
        /// The key. Other users must not be able to read it.
        key: PathBuf,
    },
    /// PKCS#12, a format in which many certificate authorities issue certificates.
    Pkcs12 {
        file: PathBuf,
        /// The file with the password. Other users must not be able to read it.
        password: PathBuf,
    },
}

/// The content of the files.
pub(super) struct Identity {
    pub(super) chain: Vec<CertificateDer<'static>>,
    pub(super) key: PrivateKeyDer<'static>,
}

impl IdentityFiles {
    /// Reads the files, which may have changed since the last call.
    ///
    /// # Errors
    /// What is wrong with a file, and what to change.
    pub(super) fn read(&self) -> Result<Identity, String> {
        match self {
            Self::Pem { certificate, key } => {
                let shown = certificate.display();
                let pem = read(certificate, None)?;
                let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
                let chain = chain.map_err(|error| format!("{shown} cannot be read as PEM: {error}"))?;
                if chain.is_empty() {
                    return Err(format!("{shown} has no certificate (PEM, \"BEGIN CERTIFICATE\")"));
                }
                let pem = read(key, Some("key"))?;
                let key = PrivateKeyDer::from_pem_slice(&pem).map_err(|_| {
                    format!(
                        "{} has no private key (PEM, \"BEGIN PRIVATE KEY\", without a passphrase); a key with a passphrase can be \
                         given as --pkcs12-file",
                        key.display()
                    )
                })?;
                Ok(Identity { chain, key })
            }
            Self::Pkcs12 { file, password } => {
                let password = read_password(password)?;
                read_pkcs12(&read(file, Some("file"))?, &password)
                    .map_err(|error| format!("{}: {error}", file.display()))
            }
        }
    }

    /// The name in the certificate (its common name), if it is valid as the name of an agent.
    ///
    /// # Errors
    /// The files cannot be used.
    pub fn name(&self) -> Result<Option<String>, String> {
        let identity = self.read()?;
        let leaf = identity.chain.first().and_then(|leaf| Certificate::from_der(leaf).ok());
        let name = leaf.and_then(|leaf| {
            let name = leaf.subject().split(", ").find_map(|part| part.strip_prefix("CN="))?;
            let is_plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
            (!name.is_empty() && name.bytes().all(is_plain)).then(|| name.to_owned())
        });
        Ok(name)
    }
}

/// Reads a password from the first line of a file.
///
/// # Errors
/// The file cannot be read, other users can read it, or the password is too long.
pub fn read_password(path: &Path) -> Result<String, String> {
    let text = String::from_utf8(read(path, Some("password"))?)
        .map_err(|_| format!("{} is not text (UTF-8)", path.display()))?;
    let line = text.lines().next().unwrap_or_default();
    if line.is_empty() || line.len() > MAX_PASSWORD_BYTES {
        return Err(format!(
            "{} must contain a password of 1 to {MAX_PASSWORD_BYTES} bytes in its first line",
            path.display()
        ));
    }
    Ok(line.to_owned())
}

/// Creates a PKCS#12 file with a chain (PEM) and its key (PEM, PKCS#8), encrypted with AES-256.
///
/// # Errors
/// The chain or the key is invalid.
pub fn create_pkcs12(name: &str, chain: &str, key: &str, password: &str) -> Result<Vec<u8>, String> {
    let failed = |error: p12_keystore::error::Error| error.to_string();
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(chain.as_bytes()).collect();
    let chain: Result<Vec<_>, _> =
        chain.map_err(|e| e.to_string())?.iter().map(|der| Certificate::from_der(der)).collect();
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(|error| error.to_string())?;
    let key = StoredKey::from_der(key.secret_der()).map_err(failed)?;
    let mut store = KeyStore::new();
    let entry = PrivateKeyChain::new(name, key, chain.map_err(failed)?);
    store.add_entry(name, KeyStoreEntry::PrivateKeyChain(entry));
    store.writer(password).write().map_err(failed)
}

fn read_pkcs12(bytes: &[u8], password: &str) -> Result<Identity, String> {
    let archive = Pkcs12Archive::from_pkcs12(bytes, password).map_err(|error| {
        format!(
            "the file cannot be read as PKCS#12 with the given password ({error}); check --pkcs12-password-file"
        )
    })?;
    let [key] = archive.keys.as_slice() else {
        return Err(format!("the file has {} private keys, and must have one", archive.keys.len()));
    };
    // The key's own certificate has the key's id. The others are intermediate certificates.
    let id = key.local_key_id.as_ref().map(AsRef::<[u8]>::as_ref);
    let own = archive.certs.iter().position(|bag| id.is_some() && bag.local_key_id.as_deref() == id);
    let own = own.unwrap_or(0);
    let Some(leaf) = archive.certs.get(own) else { return Err("the file has no certificate".into()) };
    let others = archive.certs.iter().enumerate().filter(|(index, _)| *index != own).map(|(_, bag)| bag);
    let chain = std::iter::once(leaf)
        .chain(others)
        .map(|bag| CertificateDer::from(bag.cert.as_der().to_vec()))
        .collect();
    let key = PrivatePkcs8KeyDer::from(key.key.as_der().to_vec()).into();
    Ok(Identity { chain, key })
}

/// Reads a file. If `private` (a description for the message) is given, other users must not be able to read the file.
fn read(path: &Path, private: Option<&str>) -> Result<Vec<u8>, String> {
    let shown = path.display();
    let failed = |error: String| format!("{shown}: {error}");
    let (file, size) = files::open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(|error| failed(files::cannot_be_read(error)))?;
    // The mode must be 0600, or 0640 if root owns the file, as in Debian's group `ssl-cert`.
    let readable_by_others = metadata.mode() & if metadata.uid() == 0 { 0o037 } else { 0o077 };
    if let Some(what) = private
        && readable_by_others != 0
    {
        return Err(format!(
            "the {what} {shown} can be read by others (mode {:04o}); restrict it with `chmod 600 {shown}`",
            metadata.mode() & 0o7777
        ));
    }
    files::read_opened((file, size), MAX_FILE_BYTES).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, os::unix::fs::PermissionsExt};

    #[test]
    fn a_password_file_must_be_private_and_have_one_valid_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("password");
        for (text, right) in [
            ("secret\nmore\n".to_owned(), Some("secret")),
            (String::new(), None),
            ("a".repeat(MAX_PASSWORD_BYTES), Some("a")),
            ("a".repeat(MAX_PASSWORD_BYTES + 1), None),
        ] {
            fs::write(&path, &text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
            let found = read_password(&path);
            assert_eq!(found.is_ok(), right.is_some(), "{} bytes: {found:?}", text.len());
            assert!(right.is_none_or(|right| found.unwrap().starts_with(right)));
        }
        fs::write(&path, "secret").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        assert!(read_password(&path).unwrap_err().contains("chmod 600"));
    }

    #[test]
    fn files_above_the_size_limit_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("long");
        fs::write(&path, vec![b'a'; MAX_FILE_BYTES as usize]).unwrap();
        assert!(read(&path, None).is_ok());
        fs::write(&path, vec![b'a'; MAX_FILE_BYTES as usize + 1]).unwrap();
        assert!(read(&path, None).unwrap_err().contains("at most 1048576 are allowed"));
    }
}
