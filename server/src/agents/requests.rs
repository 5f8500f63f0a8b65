//! Requests to agents about models and data. A request goes to the least busy of the agents that have its files.

use super::{Agents, OnlineAgent, RequestError, shared_requests::Sent};
use futures_util::future::join_all;
use lockstep_protocol::agent::{AgentReply, AgentRequest};
use std::time::Duration;

/// Time limit of the check whether files exist. An agent that does not reply in time, for example because its disk hangs, is only used if
/// no other agent has the files.
const FILES_TIMEOUT: Duration = Duration::from_secs(3);

/// Sends a request and waits for the reply.
///
/// # Errors
/// No agent is online or has the files, or the agent did not reply within `timeout` or refused.
pub(crate) async fn call(
    agents: &Agents,
    request: AgentRequest,
    timeout: Duration,
) -> Result<AgentReply, RequestError> {
    call_shared(agents, request, timeout, &Sent::default()).await
}

/// Same as [`call`], and sets `sent` once the request is sent.
pub(crate) async fn call_shared(
    agents: &Agents,
    request: AgentRequest,
    timeout: Duration,
    sent: &Sent,
) -> Result<AgentReply, RequestError> {
    let agent = choose_agent(agents, &request).await?;
    let waiting = agents.send_request(&agent, request);
    // Cannot fail, because each request has its own `sent`.
    let _ = sent.set((agent, waiting.id));
    agents.wait_for_reply(waiting, timeout).await
}

/// Chooses the agent for a request: of the agents that have the request's files, the agent with the fewest pending requests of the same
/// kind, and of several such agents the one with the fewest busy slots.
///
/// # Errors
/// No agent is online, or no agent has the files.
async fn choose_agent(agents: &Agents, request: &AgentRequest) -> Result<OnlineAgent, RequestError> {
    let mut online = agents.online();
    online.retain(|agent| agent.leave_reason.is_none());
    if online.len() > 1 {
        online = agents_with_files(agents, online, request.paths()).await?;
    }
    let load = |agent: &OnlineAgent| {
        (
            // Agents for a single job, and drained agents, are only used if no other agent can reply.
            agent.only_job.is_some() || agents.is_draining(&agent.row.id),
            agents.pending_requests(agent.connection, request.queue()),
            agents.leases.slots_in_use(&agent.row.id).len(),
        )
    };
    online.into_iter().min_by_key(load).ok_or(RequestError::NobodyOnline)
}

/// The agents that have all of these files. If no agent has all files, returns the agents that did not reply, or an error if all replied.
async fn agents_with_files(
    agents: &Agents,
    online: Vec<OnlineAgent>,
    paths: Vec<String>,
) -> Result<Vec<OnlineAgent>, RequestError> {
    let checks = online.into_iter().map(|agent| {
        let request = AgentRequest::HasFiles { paths: paths.clone() };
        async {
            let waiting = agents.send_request(&agent, request);
            (agents.wait_for_reply(waiting, FILES_TIMEOUT).await, agent)
        }
    });
    let (mut with_files, mut silent, mut without_files) = (Vec::new(), Vec::new(), Vec::new());
    let mut missing = None;
    for (reply, agent) in join_all(checks).await {
        let Ok(AgentReply::Files { there }) = reply else {
            silent.push(agent);
            continue;
        };
        // `there` says for each path whether the agent has the file.
        match there.iter().position(|is_there| !is_there) {
            None => with_files.push(agent),
            Some(index) => {
                without_files.push(agent.row.name.clone());
                missing = missing.or(Some(index));
            }
        }
    }
    if !with_files.is_empty() {
        return Ok(with_files);
    }
    if silent.is_empty()
        && let Some(index) = missing
    {
        let path = paths.get(index).cloned().unwrap_or_default();
        return Err(RequestError::NobodyHasFiles { path, asked: without_files });
    }
    Ok(silent)
}
