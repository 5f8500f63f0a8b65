//! Requests to agents about models and data: chooses an agent that has the files, the one with the least work, and waits for
//! its reply.

use super::{Agents, Online, PendingReply, RequestError};
use futures_util::future::join_all;
use lockstep_protocol::agent::{AgentReply, AgentRequest};
use std::time::Duration;

/// For the check whether files exist. An agent that does not reply in time, because its disk hangs, is used only when no
/// other agent has them.
const FILES_TIMEOUT: Duration = Duration::from_secs(3);

/// Sends a request and waits for the reply.
///
/// # Errors
/// No agent is online or has the files, or the agent did not reply within `patience` or refused.
pub(crate) async fn call(
    agents: &Agents,
    request: AgentRequest,
    patience: Duration,
) -> Result<AgentReply, RequestError> {
    let waiting = send(agents, request).await?;
    agents.reply(waiting, patience).await
}

/// Sends a request to the agent that suits it best; its reply is awaited with `Agents::reply`.
///
/// # Errors
/// Nobody is online, or nobody has the files.
pub(crate) async fn send(agents: &Agents, request: AgentRequest) -> Result<PendingReply, RequestError> {
    let agent = choose_agent(agents, &request).await?;
    Ok(agents.send_request(&agent, request))
}

/// The agent for a request: one that has its files, with the fewest pending requests of its kind, then the fewest busy slots.
///
/// # Errors
/// Nobody is online, or nobody has the files.
pub(crate) async fn choose_agent(agents: &Agents, request: &AgentRequest) -> Result<Online, RequestError> {
    let mut online = agents.online();
    online.retain(|agent| agent.leaving.is_none());
    if online.len() > 1 {
        online = with_files(agents, online, request.paths()).await?;
    }
    let load = |agent: &Online| {
        (
            // One that is there for a single job, or is to take no work, helps when nobody else can.
            agent.only_job.is_some() || agents.is_draining(&agent.row.id),
            agents.pending_requests(agent.connection, request.queue()),
            agents.leases.slots_in_use(&agent.row.id).len(),
        )
    };
    online.into_iter().min_by_key(load).ok_or(RequestError::NobodyOnline)
}

/// The agents that have all of these files; when none has, those that did not say.
async fn with_files(
    agents: &Agents,
    online: Vec<Online>,
    paths: Vec<String>,
) -> Result<Vec<Online>, RequestError> {
    let checks = online.into_iter().map(|agent| {
        let request = AgentRequest::HasFiles { paths: paths.clone() };
        async {
            let waiting = agents.send_request(&agent, request);
            let there = match agents.reply(waiting, FILES_TIMEOUT).await {
                Ok(AgentReply::Files { there }) => Some(there),
                // Silent, gone, or of an older version.
                _ => None,
            };
            (agent, there)
        }
    });
    let (mut having, mut silent, mut asked) = (Vec::new(), Vec::new(), Vec::new());
    let mut missing = None;
    for (agent, there) in join_all(checks).await {
        match there {
            Some(there) => match there.iter().position(|there| !there) {
                None => having.push(agent),
                Some(first) => {
                    asked.push(agent.row.name.clone());
                    missing = missing.or(Some(first));
                }
            },
            None => silent.push(agent),
        }
    }
    match (having.is_empty(), silent.is_empty(), missing) {
        (false, ..) => Ok(having),
        (true, true, Some(first)) => {
            Err(RequestError::NobodyHasFiles { path: paths.get(first).cloned().unwrap_or_default(), asked })
        }
        _ => Ok(silent),
    }
}
