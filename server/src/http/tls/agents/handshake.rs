//! The certificate verifier of rustls for [`AgentTrust`], and the reason of a refusal in a handshake.

use super::{AgentTrust, RefusedCertificate, who};
use crate::http::tls::certificate::Facts;
use rustls::{
    DigitallySignedStruct, DistinguishedName, Error as TlsError, SignatureScheme,
    client::danger::HandshakeSignatureValid,
    pki_types::{CertificateDer, UnixTime},
    server::danger::{ClientCertVerified, ClientCertVerifier},
};
use std::cell::RefCell;

tokio::task_local! {
    /// Why the current handshake refused a certificate.
    static REFUSED: RefCell<Option<RefusedCertificate>>;
}

/// Runs a handshake. Also returns the reason if the client's certificate was refused.
pub(in crate::http::tls) async fn handshake<T>(
    work: impl Future<Output = T>,
) -> (T, Option<RefusedCertificate>) {
    let watched = async {
        let result = work.await;
        (result, REFUSED.with(|refused| refused.borrow_mut().take()))
    };
    REFUSED.scope(RefCell::default(), watched).await
}

impl ClientCertVerifier for AgentTrust {
    fn client_auth_mandatory(&self) -> bool {
        // Browsers present no certificate.
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &self.hints
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, TlsError> {
        self.current().verifier.verify_client_cert(end_entity, intermediates, now).inspect_err(|error| {
            let facts = Facts::read(end_entity);
            let who = facts.as_ref().map_or_else(|| "(unreadable)".to_owned(), who);
            let refused = RefusedCertificate { who, why: self.in_words(error, facts.as_ref()) };
            // Fails outside of `handshake`, where the reason is not needed.
            let _ = REFUSED.try_with(|place| *place.borrow_mut() = Some(refused));
        })
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        self.current().verifier.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        self.current().verifier.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.current().verifier.supported_verify_schemes()
    }
}
