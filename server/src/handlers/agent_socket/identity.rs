//! Whether the agent that introduces itself is the one whose token it has.

use crate::{access::Caller, app::App, store::AgentRow};

/// Checks an agent's id against its token. The first new agent that joins under the name of a token without an id becomes that
/// token's agent for good. New it must be: a token cannot be used to take over an agent that the server knows.
///
/// # Errors
/// Why it is refused, for the agent's user.
pub(super) async fn check(app: &App, caller: &Caller, agent: &AgentRow) -> Result<(), String> {
    let Some(token) = caller.token() else { return Ok(()) };
    let _one_at_a_time = app.access.changing.lock().await;
    // As it is now: an earlier connection may have bound it.
    let bound = app.access.token(&token.id).ok_or("its token is no longer known")?;
    let failed = |error: crate::store::StoreError| error.to_string();
    let others = app.store.agents().await.map_err(failed)?;
    match &bound.token.agent_id {
        Some(id) if *id == agent.id => {
            let has_name = |row: &AgentRow| row.name == agent.name && row.id != agent.id;
            // An admin gave the token for this name, or nobody else has it.
            let is_free = bound.token.agent.as_deref() == Some(&agent.name) || !others.iter().any(has_name);
            return is_free.then_some(()).ok_or_else(|| {
                format!(
                    "{:?} is the name of another machine; give this agent another with --name",
                    agent.name
                )
            });
        }
        Some(_) => return Err(other_agents(&token.name, agent)),
        None => {}
    }
    if bound.token.revoked_at.is_some() {
        return Err("its token was revoked".into());
    }
    let known = others.iter().any(|row| row.id == agent.id);
    if known || app.access.has_agent(&agent.id) || bound.token.agent.as_deref() != Some(&agent.name) {
        return Err(other_agents(&token.name, agent));
    }
    let mut bound = bound;
    bound.token.agent_id = Some(agent.id.clone());
    app.store.put_token(&bound).await.map_err(failed)?;
    app.access.put_token(bound);
    Ok(())
}

fn other_agents(token: &str, agent: &AgentRow) -> String {
    format!(
        "the token {token:?} is for another agent than this one, which is {} with the id {}; make one for it: lockstep token create \
         --scope agent --agent {}",
        agent.name, agent.id, agent.id
    )
}
