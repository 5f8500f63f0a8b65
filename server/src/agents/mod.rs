//! The connected agents: their machines, their connections, and requests that wait for a reply.

pub(crate) mod inbox;
pub(crate) mod leases;
pub(crate) mod machines;
pub(crate) mod refusals;
pub(crate) mod requests;
pub(crate) mod rows;
pub(crate) mod shared_requests;

use crate::{store::AgentRow, util::lock};
use inbox::Inbox;
use jiff::Timestamp;
use leases::Leases;
use lockstep_protocol::{
    agent::{AgentReply, AgentRequest, MachineWarning, RequestQueue, ToAgent},
    inspect::was_killed,
    job::JobId,
};
use machines::Machines;
use refusals::Refusals;
use rows::AgentRows;
use std::{
    cmp::Ordering as Order,
    collections::{BTreeMap, HashMap, HashSet},
    net::IpAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::sync::{mpsc, oneshot};

/// A connected agent.
#[derive(Debug, Clone)]
pub(crate) struct OnlineAgent {
    /// The id of the connection. A newer connection of the same agent replaces this connection.
    pub(crate) connection: u64,
    pub(crate) row: Arc<AgentRow>,
    /// The job for which the agent was started. `None`: the agent serves all jobs.
    pub(crate) only_job: Option<JobId>,
    /// The reason that the agent gave when it began to shut down.
    pub(crate) leave_reason: Option<String>,
    /// The reason why the agent accepts no work now.
    pub(crate) no_work_reason: Option<String>,
    /// The random id of the agent's process, from its `Hello`.
    process: String,
    /// A refused process with the same id: its address, and when it last tried to join.
    pub(crate) twin: Option<(IpAddr, Timestamp)>,
    /// When the agent connected.
    pub(crate) connected_at: Timestamp,
    /// The findings of `doctor` at the agent's start.
    pub(crate) findings: Vec<MachineWarning>,
    sender: mpsc::UnboundedSender<ToAgent>,
}

/// An agent that wants to join.
#[derive(Debug)]
pub(crate) struct JoiningAgent {
    pub(crate) row: AgentRow,
    pub(crate) only_job: Option<JobId>,
    pub(crate) no_work_reason: Option<String>,
    /// The random id of the agent's process, from its `Hello`.
    pub(crate) process: String,
    /// The address of the connection's client.
    pub(crate) address: IpAddr,
}

/// Why an agent may not join, as text for the person who runs the agent.
#[derive(Debug)]
pub(crate) struct JoinError {
    pub(crate) why: String,
    /// Whether the reason may be temporary, so that the agent should retry.
    pub(crate) is_temporary: bool,
}

impl From<String> for JoinError {
    fn from(why: String) -> Self {
        Self { why, is_temporary: false }
    }
}

/// Why a request has no reply.
#[derive(Debug, Clone)]
pub(crate) enum RequestError {
    NobodyOnline,
    /// No online agent has all files of the request.
    NobodyHasFiles {
        /// A file that an agent lacks.
        path: String,
        /// The names of the agents.
        asked: Vec<String>,
    },
    /// The agent disconnected, or took too long with `ahead` other requests before this request.
    NoReply {
        agent: String,
        ahead: usize,
    },
    /// The process in which the agent handled the request was killed. `detail` is the agent's text.
    Killed {
        agent: String,
        detail: String,
    },
    /// The agent refused the request, with this text.
    Refused(String),
    /// The server has no result, for the reason in this text. Another request may succeed.
    Unavailable(String),
}

impl RequestError {
    /// The error as text for people.
    pub(crate) fn in_words(self) -> String {
        match self {
            Self::NobodyOnline => {
                "no agent is online, and only agents read files; start one with `lockstep agent --server URL`"
                    .into()
            }
            Self::NobodyHasFiles { path, asked } => {
                format!(
                    "no machine that is online has {path} (asked: {}): copy it to one of them, or start the agent of a machine that has it",
                    asked.join(", ")
                )
            }
            Self::NoReply { agent, ahead: 0 } => {
                format!("{agent} disconnected or did not respond in time; try again")
            }
            Self::NoReply { agent, ahead } => {
                format!(
                    "{agent} did not respond in time, because {ahead} other requests were ahead; try again"
                )
            }
            Self::Killed { agent, detail } => {
                format!(
                    "{agent}: {detail}. It may have run out of memory, or stopped with its agent; try again"
                )
            }
            Self::Refused(detail) | Self::Unavailable(detail) => detail,
        }
    }
}

/// A request without a reply.
#[derive(Debug)]
struct PendingRequest {
    connection: u64,
    queue: RequestQueue,
    reply_to: oneshot::Sender<Result<AgentReply, String>>,
}

/// The connected agents, and what the server knows of agents in general.
#[derive(Debug)]
pub(crate) struct Agents {
    /// The slots that attempts occupy on the agents.
    pub(crate) leases: Leases,
    pub(crate) machines: Machines,
    /// Refused agents, for the log.
    pub(crate) refusals: Refusals,
    pub(crate) rows: AgentRows,
    /// The agents' reports.
    pub(crate) inbox: Inbox,
    /// By the agent's id.
    online: Mutex<HashMap<String, OnlineAgent>>,
    /// By the request's id, the oldest first.
    pending: Mutex<BTreeMap<u64, PendingRequest>>,
    /// The id of the next connection or request.
    next_id: AtomicU64,
    /// The time of each agent's last message since this server's start (monotonic clock), by the agent's id.
    last_message_at: Mutex<HashMap<String, Instant>>,
    /// Ids of drained agents, connected or not. Drained agents get no new work.
    draining: Mutex<HashSet<String>>,
}

/// Compares numbers in names by their values: node-2 comes before node-10. Names that differ only in leading zeros are compared as text.
fn natural_order(a: &str, b: &str) -> Order {
    natural_parts(a).cmp(natural_parts(b)).then_with(|| a.cmp(b))
}

/// The numbers and texts of a name. Each number has its length without leading zeros, because the longer of two numbers is larger.
fn natural_parts(name: &str) -> impl Iterator<Item = (bool, usize, &[u8])> {
    let parts = name.as_bytes().chunk_by(|a, b| a.is_ascii_digit() == b.is_ascii_digit());
    parts.map(|part| {
        let is_text = !part[0].is_ascii_digit();
        let zeros = part.iter().take_while(|byte| **byte == b'0').count();
        let length = if is_text { 0 } else { part.len() - zeros };
        (is_text, length, &part[zeros..])
    })
}

impl Agents {
    /// `lease`: time for which an attempt continues without a message from its agent.
    pub(crate) fn new(lease: Duration, inbox: Inbox) -> Self {
        Self {
            leases: Leases::new(lease),
            machines: Machines::default(),
            refusals: Refusals::default(),
            rows: AgentRows::default(),
            inbox,
            online: Mutex::default(),
            pending: Mutex::default(),
            next_id: AtomicU64::default(),
            last_message_at: Mutex::default(),
            draining: Mutex::default(),
        }
    }

    /// Adds a connection, and returns its id. An earlier connection of the same process is closed. A connection of another process is
    /// replaced only if it was silent for `max_silence`; until then, the new connection is refused.
    ///
    /// # Errors
    /// Another agent has the name, or the id.
    pub(crate) fn join(
        &self,
        joining: JoiningAgent,
        max_silence: Duration,
        sender: mpsc::UnboundedSender<ToAgent>,
    ) -> Result<u64, JoinError> {
        let JoiningAgent { row, only_job, no_work_reason, process, address } = joining;
        let mut online = lock(&self.online);
        if let Some(other) = online.values().find(|o| o.row.name == row.name && o.row.id != row.id) {
            let why = format!(
                "an agent named {:?} is connected already, from {}; start this one with another --name",
                row.name, other.row.machine.hostname
            );
            return Err(why.into());
        }
        let is_alive = self.silence(&row.id).is_some_and(|silence| silence < max_silence);
        if let Some(first) = online.get_mut(&row.id).filter(|first| is_alive && first.process != process) {
            first.twin = Some((address, crate::now()));
            let why = format!(
                "an agent with the id of this folder is still connected, from {}. After a crash of this machine, wait: this agent is accepted \
                 once that connection has been silent for {} s. If the folder is a copy, remove its file agent_id and start this agent with \
                 its own token and another --name",
                first.row.machine.hostname,
                max_silence.as_secs_f64()
            );
            return Err(JoinError { why, is_temporary: true });
        }
        let connection = self.next_id.fetch_add(1, Ordering::Relaxed);
        let joined = OnlineAgent {
            connection,
            row: Arc::new(row),
            only_job,
            leave_reason: None,
            no_work_reason,
            process,
            twin: None,
            connected_at: crate::now(),
            findings: Vec::new(),
            sender,
        };
        // This drops the sender of an earlier connection of the same agent, which closes that connection.
        online.insert(joined.row.id.clone(), joined);
        Ok(connection)
    }

    /// Removes a connection, whose requests then get no reply. Returns the agent, or `None` if a newer connection has replaced this one.
    pub(crate) fn disconnect(&self, id: &str, connection: u64) -> Option<OnlineAgent> {
        lock(&self.pending).retain(|_, pending| pending.connection != connection);
        let mut online = lock(&self.online);
        online.get(id).filter(|agent| agent.connection == connection)?;
        online.remove(id)
    }

    /// Notes that a message came from an agent.
    pub(crate) fn note_message(&self, id: &str) {
        lock(&self.last_message_at).insert(id.to_owned(), Instant::now());
    }

    /// The time since the last message of an agent; `None` if no message came.
    pub(crate) fn silence(&self, id: &str) -> Option<Duration> {
        lock(&self.last_message_at).get(id).map(Instant::elapsed)
    }

    /// Updates an agent after a heartbeat, or when it shuts down.
    pub(crate) fn note_heartbeat(&self, id: &str, at: Timestamp, leave_reason: Option<&str>) {
        if let Some(agent) = lock(&self.online).get_mut(id) {
            // Copied only if a reader still uses the old value.
            Arc::make_mut(&mut agent.row).last_seen_at = at;
            if let Some(reason) = leave_reason {
                agent.leave_reason = Some(reason.to_owned());
            }
        }
    }

    /// Notes why an agent accepts no work (`None`: it accepts work). Returns whether the reason has changed.
    pub(crate) fn set_no_work(&self, id: &str, no_work_reason: Option<String>) -> bool {
        let mut online = lock(&self.online);
        let Some(agent) = online.get_mut(id).filter(|agent| agent.no_work_reason != no_work_reason) else {
            return false;
        };
        agent.no_work_reason = no_work_reason;
        true
    }

    /// Notes the findings of an agent's `doctor`.
    pub(crate) fn set_findings(&self, id: &str, findings: Vec<MachineWarning>) {
        if let Some(agent) = lock(&self.online).get_mut(id) {
            agent.findings = findings;
        }
    }

    /// Sets the drained agents, as stored at the server's start.
    pub(crate) fn set_draining(&self, agents: impl IntoIterator<Item = String>) {
        *lock(&self.draining) = agents.into_iter().collect();
    }

    /// Drains or undrains an agent.
    pub(crate) fn drain(&self, id: &str, is_draining: bool) {
        let mut draining = lock(&self.draining);
        if is_draining {
            draining.insert(id.to_owned());
        } else {
            draining.remove(id);
        }
    }

    pub(crate) fn is_draining(&self, id: &str) -> bool {
        lock(&self.draining).contains(id)
    }

    /// The connected agents, by name.
    pub(crate) fn online(&self) -> Vec<OnlineAgent> {
        let mut agents: Vec<_> = lock(&self.online).values().cloned().collect();
        agents.sort_by(|a, b| natural_order(&a.row.name, &b.row.name));
        agents
    }

    pub(crate) fn is_connected(&self, id: &str) -> bool {
        lock(&self.online).contains_key(id)
    }

    /// Sends a message to an agent; false if it is not connected.
    pub(crate) fn send(&self, id: &str, message: ToAgent) -> bool {
        lock(&self.online).get(id).is_some_and(|agent| agent.sender.send(message).is_ok())
    }

    /// Sends a request to an agent; the reply is awaited with [`Agents::wait_for_reply`].
    pub(crate) fn send_request(&self, agent: &OnlineAgent, request: AgentRequest) -> PendingReply {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (reply_to, reply) = oneshot::channel();
        let pending = PendingRequest { connection: agent.connection, queue: request.queue(), reply_to };
        lock(&self.pending).insert(id, pending);
        if agent.sender.send(ToAgent::Request { id, request }).is_err() {
            // The agent's connection is closed, so no reply will come.
            lock(&self.pending).remove(&id);
        }
        PendingReply { id, agent: agent.row.name.clone(), reply }
    }

    /// Waits for the reply.
    ///
    /// # Errors
    /// No reply within `timeout`, a closed connection, or the agent's refusal.
    pub(crate) async fn wait_for_reply(
        &self,
        pending: PendingReply,
        timeout: Duration,
    ) -> Result<AgentReply, RequestError> {
        let PendingReply { id, agent, reply } = pending;
        let reply = tokio::time::timeout(timeout, reply).await;
        let ahead = self.requests_ahead(id).unwrap_or(0);
        lock(&self.pending).remove(&id);
        match reply {
            Ok(Ok(Err(detail))) if was_killed(&detail) => Err(RequestError::Killed { agent, detail }),
            Ok(Ok(reply)) => reply.map_err(RequestError::Refused),
            _ => Err(RequestError::NoReply { agent, ahead }),
        }
    }

    /// Number of requests of the same kind that the request's agent handles before this request; `None` after the reply.
    pub(crate) fn requests_ahead(&self, id: u64) -> Option<usize> {
        let pending = lock(&self.pending);
        let request = pending.get(&id)?;
        let before = pending.range(..id).map(|(_, other)| other);
        Some(before.filter(|o| o.connection == request.connection && o.queue == request.queue).count())
    }

    /// Number of requests of a queue to which a connection has not replied.
    pub(crate) fn pending_requests(&self, connection: u64, queue: RequestQueue) -> usize {
        lock(&self.pending).values().filter(|p| p.connection == connection && p.queue == queue).count()
    }

    /// Passes an agent's reply on to the caller that waits for it.
    pub(crate) fn deliver_reply(&self, connection: u64, id: u64, reply: Result<AgentReply, String>) {
        let mut requests = lock(&self.pending);
        if requests.get(&id).is_some_and(|pending| pending.connection == connection)
            && let Some(pending) = requests.remove(&id)
        {
            // The caller may no longer wait.
            let _ = pending.reply_to.send(reply);
        }
    }
}

/// A request that was sent; its reply is awaited with [`Agents::wait_for_reply`].
#[derive(Debug)]
pub(crate) struct PendingReply {
    pub(crate) id: u64,
    agent: String,
    reply: oneshot::Receiver<Result<AgentReply, String>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_in_the_order_of_their_numbers() {
        let counted: Vec<_> = (1..=12).map(|n| format!("host-{n}")).collect();
        let mut names = counted.clone();
        names.sort();
        assert_ne!(names, counted, "as text 10 comes before 2");
        names.sort_by(|a, b| natural_order(a, b));
        assert_eq!(names, counted);
        for (first, second) in
            [("a", "b"), ("a", "a1"), ("a2", "a10"), ("a1b2", "a1b10"), ("a02", "a2"), ("9", "a")]
        {
            assert_eq!(natural_order(first, second), Order::Less, "{first}, {second}");
            assert_eq!(natural_order(second, first), Order::Greater, "{second}, {first}");
        }
        assert_eq!(natural_order("a7", "a7"), Order::Equal);
    }
}
