//! TLS for the server's own requests to other servers.

use rustls::{ClientConfig, Error, RootCertStore, crypto::ring};
use std::sync::Arc;

/// The system's CA certificates. Unreadable certificates are skipped; a connection that needs one of them fails.
pub(crate) fn system_authorities() -> RootCertStore {
    let mut authorities = RootCertStore::empty();
    authorities.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    authorities
}

/// TLS settings for HTTP/1.1 that trust these CA certificates.
pub(crate) fn client_config(authorities: RootCertStore) -> Result<ClientConfig, Error> {
    let mut tls = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(authorities)
        .with_no_client_auth();
    tls.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(tls)
}
