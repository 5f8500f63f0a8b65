//! Checks whether the token or certificate that an agent uses belongs to this agent.

use crate::{
    auth::{
        Auth,
        access::{Caller, is_certificate},
    },
    http::{
        peer::{Peer, PeerPolicy},
        tls::{AgentTrust, ClientCertificate},
    },
    store::AgentRow,
};
use lockstep_protocol::access::Token;
use std::sync::Arc;

/// Records how an agent has joined, and logs a warning if its certificate expires soon. Returns the certificate with which the agent has
/// joined; `None` if it has joined with a token.
pub(super) fn record_join(
    peer_policy: &PeerPolicy,
    caller: &Caller,
    peer: &Peer,
    agent: &AgentRow,
) -> Option<(Arc<AgentTrust>, Arc<ClientCertificate>)> {
    let uses_certificate = caller.token().is_some_and(is_certificate);
    let joined =
        peer_policy.agent_trust().cloned().zip(peer.certificate.clone()).filter(|_| uses_certificate);
    if let Some(trust) = peer_policy.agent_trust() {
        trust.note_join(&agent.id, &agent.name, joined.as_ref().map(|(_, certificate)| &**certificate));
        if let Some(warning) = trust.warning_of(&agent.id) {
            tracing::warn!(agent = agent.name, "{warning}");
        }
    }
    joined
}

/// Checks an agent's id against its token. A token without an id is bound to the first new agent that joins with the token's name. Such a
/// token cannot be bound to a known agent, so nobody can take over an agent with a new token. A certificate is bound in the same way, but
/// may also be bound to the known agent with the certificate's name, because the authority has issued the certificate for that name.
///
/// # Errors
/// The reason why the agent is refused, for the agent's user.
pub(super) async fn check(auth: &Auth, caller: &Caller, agent: &AgentRow) -> Result<(), String> {
    let Some(token) = caller.token() else { return Ok(()) };
    let _one_at_a_time = auth.access.change_lock.lock().await;
    // Reads the token again, because an earlier connection may have bound it.
    let mut stored = auth.access.token(&token.id).ok_or("this agent's token is no longer known")?;
    let failed = |error: crate::store::StoreError| error.to_string();
    let known_agents = auth.store.agents_by_name_or_id(&agent.name, &agent.id).await.map_err(failed)?;
    match &stored.token.agent_id {
        Some(id) if *id == agent.id => {
            let has_taken_name = |row: &AgentRow| row.name == agent.name && row.id != agent.id;
            // An admin made the token for this name, or no other agent has the name.
            let is_allowed = stored.token.agent.as_deref() == Some(&agent.name)
                || !known_agents.iter().any(has_taken_name);
            return is_allowed.then_some(()).ok_or_else(|| {
                format!(
                    "{:?} is the name of another machine; give this agent another name with --name",
                    agent.name
                )
            });
        }
        Some(_) => return Err(wrong_agent(token, agent)),
        None => {}
    }
    if stored.token.revoked_at.is_some() {
        return Err("this agent's token was revoked".into());
    }
    let known = known_agents.iter().find(|row| row.id == agent.id);
    let name = stored.token.agent.as_deref();
    let may_bind = if is_certificate(token) {
        let is_named = |row: &AgentRow| name == Some(row.name.as_str()) || name == Some(row.id.as_str());
        is_named(agent) && known.is_none_or(is_named)
    } else {
        known.is_none() && !auth.access.has_agent(&agent.id) && name == Some(agent.name.as_str())
    };
    if !may_bind {
        return Err(wrong_agent(token, agent));
    }
    // Also stores the earlier revocations of the certificate's name, which may be only in memory.
    if is_certificate(token) {
        for row in auth.access.earlier_revocations(stored.token.agent.as_deref().unwrap_or_default()) {
            auth.store.put_token(&row).await.map_err(failed)?;
        }
    }
    stored.token.agent_id = Some(agent.id.clone());
    auth.store.put_token(&stored).await.map_err(failed)?;
    auth.access.put_token(stored);
    Ok(())
}

/// Returns the reason to refuse an agent whose token or certificate belongs to another agent.
fn wrong_agent(token: &Token, agent: &AgentRow) -> String {
    let (name, id) = (&agent.name, &agent.id);
    if !is_certificate(token) {
        return format!(
            "the token {:?} belongs to another agent; make a token for this agent ({name}, id {id}): lockstep token create --scope agent \
             --agent {id}",
            token.name
        );
    }
    let certified = token.agent.as_deref().unwrap_or_default();
    if token.agent_id.is_none() && certified != name {
        return format!(
            "the certificate is for an agent named {certified:?}, but this agent is named {name}; start this agent with --name \
             {certified}, or have a certificate issued for this agent: lockstep ca issue {name} --agent"
        );
    }
    format!(
        "the certificate's name {certified:?} is bound to another agent, not to this agent (id {id}); start this agent with the \
         --data-dir of the other agent, or have a certificate with another name issued. If the other agent no longer exists, an admin \
         frees the name (lockstep token revoke {}) and issues the certificate again",
        token.id
    )
}
