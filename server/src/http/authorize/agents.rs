//! The identity of an agent that connects: from its certificate, or, if the server accepts that, from its token.

use super::bearer;
use crate::{
    auth::access::{Caller, Denied, certificate_id},
    config::AgentAuth,
    http::{HttpState, error::Error, peer::Peer},
};
use axum::http::{HeaderMap, header};
use lockstep_protocol::access::Scope;

/// Instructions for an agent without a certificate.
const ADVICE: &str = "start the agent with --cert-file and --key-file, or --pkcs12-file (on the server's machine: `lockstep ca issue NAME \
    --agent`)";

/// Whether a request comes from an agent that can be identified.
pub(crate) fn is_agent(http: &HttpState, headers: &HeaderMap, peer: &Peer) -> bool {
    let trust_and_certificate = http.peer_policy.agent_trust().zip(peer.certificate.as_deref());
    let token = headers.get(header::AUTHORIZATION).and_then(bearer);
    trust_and_certificate.is_some_and(|(trust, certificate)| trust.check(certificate).is_ok())
        || token
            .and_then(|token| http.auth.access.authenticate_token(token).ok())
            .is_some_and(|caller| caller.scope() == Some(Scope::Agent))
}

/// The agent that the connection's certificate names. `None` if the request must be identified by its token.
///
/// # Errors
/// The agent is refused. The refusal is also logged.
pub(super) fn identify_by_certificate(
    http: &HttpState,
    headers: &HeaderMap,
    peer: &Peer,
) -> Result<Option<Caller>, Error> {
    let auth = http.config.agent_auth();
    let Some(trust) = http.peer_policy.agent_trust().filter(|_| http.auth.access.must_authenticate) else {
        return Ok(None);
    };
    let refuse = |who: &str, why: &str, advice: &str| {
        http.agents.refusals.note(peer.address, who, why);
        Err(Error::Unauthorized(format!("this server refuses the agent: {why}; {advice}")))
    };
    let Some(certificate) = &peer.certificate else {
        // The agent of the server's own machine connects without TLS, with a token from the server.
        let needs_certificate = auth == AgentAuth::Certificate && !peer.is_unencrypted();
        if needs_certificate || !headers.contains_key(header::AUTHORIZATION) {
            return match auth {
                AgentAuth::Certificate => refuse(
                    "(unknown)",
                    "it presents no certificate, which this server requires of agents",
                    ADVICE,
                ),
                _ => refuse(
                    "(unknown)",
                    "it presents neither a certificate nor a token",
                    &format!("{ADVICE}, or with --token-file (`lockstep token create --scope agent`)"),
                ),
            };
        }
        return Ok(None);
    };
    let who = certificate.who();
    if let Err(why) = trust.check(certificate) {
        return refuse(&who, &why, "have another certificate issued");
    }
    let Some(name) = &certificate.name else {
        return refuse(
            &who,
            "its certificate has no name (common name)",
            "request a certificate that has the agent's name",
        );
    };
    match http.auth.access.authenticate_certificate(name, certificate.facts.not_before) {
        Ok(caller) => Ok(Some(caller)),
        Err(Denied::Revoked) => refuse(
            &who,
            "an admin has revoked the access of this name after its certificate was issued",
            &format!(
                "a certificate that is issued from now on is accepted; `lockstep token list` shows the revocation as {}",
                certificate_id(name)
            ),
        ),
        Err(_) => refuse(&who, "this name may not join", "ask an admin"),
    }
}
