//! HTTP clients for the server's own requests to other servers.

use reqwest::{Client, ClientBuilder, redirect};
use rustls::{ClientConfig, RootCertStore, crypto::ring};
use std::{error::Error, sync::Arc};

/// The system's CA certificates. Unreadable certificates are skipped; a connection that needs one of them fails.
pub(crate) fn system_authorities() -> RootCertStore {
    let mut authorities = RootCertStore::empty();
    authorities.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    authorities
}

/// A builder of clients that use HTTP/1.1, trust these CA certificates and follow no redirects.
pub(crate) fn builder(authorities: RootCertStore) -> Result<ClientBuilder, rustls::Error> {
    let mut tls = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(authorities)
        .with_no_client_auth();
    tls.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Client::builder()
        .redirect(redirect::Policy::none())
        .user_agent(concat!("lockstep/", env!("CARGO_PKG_VERSION")))
        .tls_backend_preconfigured(tls))
}

/// The text of the innermost cause of an error, which is the most specific.
pub(crate) fn root_cause(mut error: &dyn Error) -> String {
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}
