//! TLS of clients: CA certificates, client certificates, and error messages.

mod identity;

pub use identity::{IdentityFiles, create_pkcs12, read_password};

use lockstep_host::files;
use rustls::{
    AlertDescription, CertificateError, ClientConfig, Error as TlsError, InvalidMessage, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, pem::PemObject},
};
use std::{error::Error, io, path::Path, sync::Arc};

/// Maximum number of names in a certificate that an error lists.
const MAX_NAMES: usize = 8;
/// Maximum size of a file of CA certificates.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// A configuration that trusts the system's CA certificates and those in `ca_file`. `SSL_CERT_FILE` and `SSL_CERT_DIR`
/// replace the system's usual paths.
///
/// # Errors
/// Why the file cannot be used.
pub fn client_config(ca_file: Option<&Path>) -> Result<Arc<ClientConfig>, String> {
    client_config_with_identity(ca_file, None)
}

/// Like [`client_config`], with a certificate (`identity`) that the client presents if the server requests one.
///
/// # Errors
/// Why a file cannot be used.
pub fn client_config_with_identity(
    ca_file: Option<&Path>,
    identity: Option<&IdentityFiles>,
) -> Result<Arc<ClientConfig>, String> {
    let mut roots = RootCertStore::empty();
    // Unreadable CA certificates of the system are skipped, which causes an error only when they are needed.
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if let Some(path) = ca_file {
        let shown = path.display();
        let pem =
            files::read(path, MAX_FILE_BYTES).map_err(|error| format!("the CA file {shown}: {error}"))?;
        let mut count = 0;
        for certificate in CertificateDer::pem_slice_iter(&pem) {
            let certificate =
                certificate.map_err(|error| format!("the CA file {shown} cannot be read as PEM: {error}"))?;
            roots.add(certificate).map_err(|error| {
                format!("the CA file {shown} has a certificate that cannot be used: {error}")
            })?;
            count += 1;
        }
        if count == 0 {
            return Err(format!("the CA file {shown} has no certificate (PEM, \"BEGIN CERTIFICATE\")"));
        }
    }
    config(roots, identity)
}

/// A configuration for a client that uses plain HTTP. It trusts no CA certificate, and no file is read.
///
/// # Errors
/// Never, unless the cryptographic library supports no version of TLS.
pub fn client_config_without_roots() -> Result<Arc<ClientConfig>, String> {
    config(RootCertStore::empty(), None)
}

fn config(roots: RootCertStore, identity: Option<&IdentityFiles>) -> Result<Arc<ClientConfig>, String> {
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_root_certificates(roots);
    let mut config = match identity.map(IdentityFiles::read).transpose()? {
        None => config.with_no_client_auth(),
        Some(identity) => {
            config.with_client_auth_cert(identity.chain, identity.key).map_err(|error| match error {
                TlsError::InconsistentKeys(_) => {
                    "this agent's key does not belong to its certificate; name a matching pair".to_owned()
                }
                other => format!("this agent's certificate cannot be used: {other}"),
            })?
        }
    };
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// Why TLS with the server `server` failed. `None` if the error has another cause.
pub fn in_words(error: &(dyn Error + 'static), server: &str) -> Option<String> {
    let why = match find_tls_error(error)? {
        TlsError::InvalidCertificate(problem) => certificate_in_words(problem),
        TlsError::InvalidMessage(InvalidMessage::InvalidContentType) => {
            "it speaks plain HTTP on this port; write http:// instead of https:// in the address".into()
        }
        TlsError::AlertReceived(AlertDescription::ProtocolVersion) | TlsError::PeerIncompatible(_) => {
            "it has no version of TLS in common with this program, which speaks 1.2 and 1.3".into()
        }
        TlsError::AlertReceived(AlertDescription::HandshakeFailure) => {
            "it has no cipher suite in common with this program; see --tls-suites of `lockstep serve`".into()
        }
        TlsError::AlertReceived(alert) => match refusal_in_words(*alert) {
            Some(why) => why,
            None => format!("TLS fails: the server says {alert:?}"),
        },
        other => format!("TLS fails: {other}"),
    };
    Some(format!("{server}: {why}"))
}

/// Why a server rejected this client's certificate, according to the TLS alert.
fn refusal_in_words(alert: AlertDescription) -> Option<String> {
    let why = match alert {
        AlertDescription::CertificateRevoked => "was revoked",
        AlertDescription::CertificateExpired => {
            "is not valid at this time: it has expired, or one of the two machines has a wrong clock"
        }
        AlertDescription::UnknownCA => {
            "was issued by an authority (CA) that it does not know (see --agent-ca of `lockstep serve`)"
        }
        AlertDescription::BadCertificate
        | AlertDescription::UnsupportedCertificate
        | AlertDescription::CertificateUnknown
        | AlertDescription::AccessDenied
        | AlertDescription::DecryptError => "is not acceptable to it; its log gives the reason",
        _ => return None,
    };
    Some(format!(
        "it refuses this agent's certificate, which {why}. Issue another certificate (on the server's machine: `lockstep ca issue \
         NAME --agent`) and replace the files on this machine, which are read again for each connection"
    ))
}

fn certificate_in_words(problem: &CertificateError) -> String {
    match problem {
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            "this machine does not know the authority (CA) that signed the server's certificate. If the server has a CA of its \
             own, run `lockstep ca show` on the server's machine, save the output in a file on this machine, and give the file's \
             path with --ca-file or LOCKSTEP_CA_FILE"
                .into()
        }
        CertificateError::NotValidForNameContext { expected, presented } if presented.is_empty() => {
            format!("its certificate is for no name; have a certificate issued for {}", expected.to_str())
        }
        CertificateError::NotValidForNameContext { expected, presented } => {
            let (expected, names) = (expected.to_str(), presented.iter().take(MAX_NAMES));
            let names: Vec<_> = names.map(|name| strip_name_type(name)).collect();
            format!(
                "its certificate is not for {expected} but for {}; use one of these names in the address, or have a certificate \
                 issued for {expected}",
                names.join(", ")
            )
        }
        CertificateError::NotValidForName => {
            "its certificate is not for the name in this address; use a name of the certificate in the address".into()
        }
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            "its certificate has expired; renew it on the server's machine, and check the clock of this machine".into()
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "its certificate is not valid yet; check the clocks of both machines".into()
        }
        other => format!("its certificate is not accepted: {other}"),
    }
}

/// Extracts the name from the library's format `DnsName("a")`.
fn strip_name_type(presented: &str) -> String {
    presented.split_once('(').map_or(presented, |(_, rest)| rest).trim_matches([')', '"']).to_owned()
}

/// Finds the TLS error among the causes of an error. `source()` of an I/O error skips the error that it contains, so
/// `get_ref` is used.
fn find_tls_error<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a TlsError> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref::<TlsError>() {
            return Some(found);
        }
        next = match error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
            Some(inner) => Some(inner as &(dyn Error + 'static)),
            None => error.source(),
        };
    }
    None
}
