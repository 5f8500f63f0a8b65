//! Checks whether an agent is the one to which its token or certificate belongs.

use crate::{
    auth::{
        Auth,
        access::{Caller, is_certificate},
    },
    http::{
        ingress::{Ingress, Peer},
        tls::{AgentTrust, ClientCertificate},
    },
    store::AgentRow,
};
use lockstep_protocol::access::Token;
use std::sync::Arc;

/// The certificate of an agent that has joined with one.
pub(super) struct AgentCertificate(Option<(Arc<AgentTrust>, Arc<ClientCertificate>)>);

impl AgentCertificate {
    pub(super) fn of(ingress: &Ingress, caller: &Caller, peer: &Peer, agent: &AgentRow) -> Self {
        let came_with_it = caller.token().is_some_and(is_certificate);
        let both = ingress.agents().cloned().zip(peer.certificate.clone()).filter(|_| came_with_it);
        if let Some(trust) = ingress.agents() {
            trust.note_join(&agent.id, &agent.name, both.as_ref().map(|(_, certificate)| &**certificate));
            if let Some(warning) = trust.warning_of(&agent.id) {
                tracing::warn!(agent = agent.name, "{warning}");
            }
        }
        Self(both)
    }

    /// Waits until the certificate is revoked or expires, and returns the reason.
    pub(super) async fn wait_until_refused(&self) -> String {
        match &self.0 {
            Some((trust, certificate)) => trust.wait_until_refused(certificate).await,
            None => std::future::pending().await,
        }
    }
}

/// Checks an agent's id against its token. A token without an id is bound to the first new agent that joins with the token's name. It
/// cannot be bound to a known agent, so a token cannot be used to take over an agent. A certificate is bound in the same way, but may also
/// be bound to the known agent of its name, because the authority has issued it for that name.
///
/// # Errors
/// Why the agent is refused, for the agent's user.
pub(super) async fn check(auth: &Auth, caller: &Caller, agent: &AgentRow) -> Result<(), String> {
    let Some(token) = caller.token() else { return Ok(()) };
    let _one_at_a_time = auth.access.changing.lock().await;
    // Reads the token again, because an earlier connection may have bound it.
    let mut bound = auth.access.token(&token.id).ok_or("its token is no longer known")?;
    let failed = |error: crate::store::StoreError| error.to_string();
    let others = auth.store.agents_called(&agent.name, &agent.id).await.map_err(failed)?;
    match &bound.token.agent_id {
        Some(id) if *id == agent.id => {
            let has_name = |row: &AgentRow| row.name == agent.name && row.id != agent.id;
            // An admin made the token for this name, or no other agent has the name.
            let is_free = bound.token.agent.as_deref() == Some(&agent.name) || !others.iter().any(has_name);
            return is_free.then_some(()).ok_or_else(|| {
                format!(
                    "{:?} is the name of another machine; give this agent another with --name",
                    agent.name
                )
            });
        }
        Some(_) => return Err(other_agents(token, agent)),
        None => {}
    }
    if bound.token.revoked_at.is_some() {
        return Err("its token was revoked".into());
    }
    let known = others.iter().find(|row| row.id == agent.id);
    let name = bound.token.agent.as_deref();
    let is_free = if is_certificate(token) {
        let is_named = |row: &AgentRow| name == Some(row.name.as_str()) || name == Some(row.id.as_str());
        is_named(agent) && known.is_none_or(is_named)
    } else {
        known.is_none() && !auth.access.has_agent(&agent.id) && name == Some(agent.name.as_str())
    };
    if !is_free {
        return Err(other_agents(token, agent));
    }
    if is_certificate(token) {
        for past in auth.access.past_of(bound.token.agent.as_deref().unwrap_or_default()) {
            auth.store.put_token(&past).await.map_err(failed)?;
        }
    }
    bound.token.agent_id = Some(agent.id.clone());
    auth.store.put_token(&bound).await.map_err(failed)?;
    auth.access.put_token(bound);
    Ok(())
}

fn other_agents(token: &Token, agent: &AgentRow) -> String {
    let (name, id) = (&agent.name, &agent.id);
    if !is_certificate(token) {
        return format!(
            "the token {:?} is for another agent than this one, which is {name} with the id {id}; make a token for it: lockstep token create \
             --scope agent --agent {id}",
            token.name
        );
    }
    let bound = token.agent.as_deref().unwrap_or_default();
    if token.agent_id.is_none() && bound != name {
        return format!(
            "its certificate is for an agent named {bound:?}, and this one is {name}; start it with --name {bound}, or have a certificate \
             issued for it: lockstep ca issue {name} --agent"
        );
    }
    format!(
        "the name {bound:?} of its certificate is bound to another agent than this one, which has the id {id}; start it with the \
         --data-dir of that agent, or have a certificate with another name issued, or, if that agent no longer exists, an admin frees the \
         name (lockstep token revoke {}) and issues its certificate again",
        token.id
    )
}
