//! The CA certificates that the server trusts for connections to the provider.

use crate::{config::oidc::OidcConfig, util::tls_client};
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, pem::PemObject},
};
use std::{fs::File, io::Read, path::Path};

/// Maximum size of a file of CA certificates.
const CA_BYTES: u64 = 1 << 20;

/// TLS settings that trust the CA certificates of the system and of the configured file.
pub(super) fn tls(config: &OidcConfig) -> Result<ClientConfig, String> {
    let mut roots =
        if config.issuer.is_plain() { RootCertStore::empty() } else { tls_client::system_authorities() };
    if let Some(path) = &config.ca_file {
        add_authorities(&mut roots, path)
            .map_err(|error| format!("the CA file {}: {error}", path.display()))?;
    }
    tls_client::client_config(roots).map_err(|error| error.to_string())
}

fn add_authorities(roots: &mut RootCertStore, path: &Path) -> Result<(), String> {
    let mut pem = Vec::new();
    let file = File::open(path).map_err(|error| error.to_string())?;
    file.take(CA_BYTES + 1).read_to_end(&mut pem).map_err(|error| error.to_string())?;
    if pem.len() as u64 > CA_BYTES {
        return Err("it is longer than 1 MiB".into());
    }
    let mut count = 0;
    for certificate in CertificateDer::pem_slice_iter(&pem) {
        let certificate = certificate.map_err(|error| format!("it cannot be read as PEM: {error}"))?;
        roots
            .add(certificate)
            .map_err(|error| format!("it has a certificate that cannot be used: {error}"))?;
        count += 1;
    }
    match count {
        0 => Err("it has no certificate (PEM, \"BEGIN CERTIFICATE\")".into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ca_file_needs_a_certificate_and_has_a_size_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ca.pem");
        let add = |content: &[u8]| {
            std::fs::write(&path, content).unwrap();
            add_authorities(&mut RootCertStore::empty(), &path)
        };
        let ca = rcgen::generate_simple_self_signed(["a.example".to_owned()]).unwrap().cert.pem();
        assert_eq!(add(ca.as_bytes()), Ok(()));
        let mut longest = ca.clone().into_bytes();
        longest.resize(CA_BYTES as usize, b'\n');
        assert_eq!(add(&longest), Ok(()));
        longest.push(b'\n');
        assert!(add(&longest).unwrap_err().contains("1 MiB"));
        assert!(add(b"nothing").unwrap_err().contains("no certificate"));
    }
}
