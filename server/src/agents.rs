//! The agents that are connected now: what they have, how to tell them something, and what was asked of them.

use crate::store::AgentRow;
use jiff::Timestamp;
use lockstep_protocol::{
    agent::{Answer, Question, ToAgent},
    job::JobId,
};
use std::{
    collections::{HashMap, HashSet},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::sync::{mpsc, oneshot};

/// A connected agent.
#[derive(Debug, Clone)]
pub(crate) struct Online {
    /// Which connection; a newer one of the same agent replaces it.
    pub(crate) connection: u64,
    pub(crate) row: AgentRow,
    /// It serves this job alone.
    pub(crate) only_job: Option<JobId>,
    /// It is stopping in order, for this reason.
    pub(crate) leaving: Option<String>,
    to: mpsc::UnboundedSender<ToAgent>,
}

/// Why a question has no answer.
#[derive(Debug)]
pub(crate) enum AskError {
    NobodyOnline,
    /// The agent went away, or took too long.
    NoAnswer,
    /// The agent's own words.
    Refused(String),
}

impl AskError {
    /// For people.
    pub(crate) fn in_words(self) -> String {
        match self {
            Self::NobodyOnline => {
                "no agent is online to look at files; start one with `lockstep agent --server URL`".into()
            }
            Self::NoAnswer => "the agent went away or did not answer in time; try again".into(),
            Self::Refused(detail) => detail,
        }
    }
}

type Asker = oneshot::Sender<Result<Answer, String>>;

/// Agents by id.
#[derive(Debug, Default)]
pub(crate) struct Agents {
    online: Mutex<HashMap<String, Online>>,
    /// By request: the connection that was asked, and who waits.
    asked: Mutex<HashMap<u64, (u64, Asker)>>,
    next: AtomicU64,
    /// Ids of those that are to take no new work, connected or not.
    draining: Mutex<HashSet<String>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Agents {
    /// Takes in a connection.
    ///
    /// # Errors
    /// Why it is refused: another agent that is connected has its name.
    pub(crate) fn join(
        &self,
        row: AgentRow,
        only_job: Option<JobId>,
        to: mpsc::UnboundedSender<ToAgent>,
    ) -> Result<u64, String> {
        let mut online = lock(&self.online);
        if let Some(other) = online.values().find(|o| o.row.name == row.name && o.row.id != row.id) {
            return Err(format!(
                "an agent named {:?} is connected already, from {}; start this one with another --name",
                row.name, other.row.machine.hostname
            ));
        }
        let connection = self.next.fetch_add(1, Ordering::Relaxed);
        // An earlier connection of the same agent ends as its sender is dropped here.
        online.insert(row.id.clone(), Online { connection, row, only_job, leaving: None, to });
        Ok(connection)
    }

    /// Forgets a connection, unless a newer one has taken its place. Questions to it stay unanswered.
    pub(crate) fn leave(&self, id: &str, connection: u64) -> Option<Online> {
        lock(&self.asked).retain(|_, (asked, _)| *asked != connection);
        let mut online = lock(&self.online);
        let mine = online.get(id).is_some_and(|o| o.connection == connection);
        if mine { online.remove(id) } else { None }
    }

    /// Notes that an agent said something, or is leaving.
    pub(crate) fn heard(&self, id: &str, at: Timestamp, leaving: Option<&str>) {
        if let Some(agent) = lock(&self.online).get_mut(id) {
            agent.row.last_seen_at = at;
            if let Some(reason) = leaving {
                agent.leaving = Some(reason.to_owned());
            }
        }
    }

    /// Replaces the list of those that are to take no new work.
    pub(crate) fn set_draining(&self, agents: impl IntoIterator<Item = String>) {
        *lock(&self.draining) = agents.into_iter().collect();
    }

    /// Whether an agent is to take no new work.
    pub(crate) fn is_draining(&self, id: &str) -> bool {
        lock(&self.draining).contains(id)
    }

    /// Those connected now, by name.
    pub(crate) fn online(&self) -> Vec<Online> {
        let mut all: Vec<_> = lock(&self.online).values().cloned().collect();
        all.sort_by(|a, b| a.row.name.cmp(&b.row.name));
        all
    }

    /// Tells an agent something; false when it is not connected.
    pub(crate) fn tell(&self, id: &str, message: ToAgent) -> bool {
        lock(&self.online).get(id).is_some_and(|o| o.to.send(message).is_ok())
    }

    /// Asks any agent.
    pub(crate) async fn ask(&self, question: Question, patience: Duration) -> Result<Answer, AskError> {
        let agent = self.online().into_iter().find(|o| o.leaving.is_none()).ok_or(AskError::NobodyOnline)?;
        let request = self.next.fetch_add(1, Ordering::Relaxed);
        let (to, answer) = oneshot::channel();
        lock(&self.asked).insert(request, (agent.connection, to));
        let told = agent.to.send(ToAgent::Ask { request, question }).is_ok();
        let answer = if told { tokio::time::timeout(patience, answer).await.ok() } else { None };
        lock(&self.asked).remove(&request);
        match answer {
            Some(Ok(answer)) => answer.map_err(AskError::Refused),
            _ => Err(AskError::NoAnswer),
        }
    }

    /// An agent's answer.
    pub(crate) fn answered(&self, connection: u64, request: u64, answer: Result<Answer, String>) {
        let mut asked = lock(&self.asked);
        if asked.get(&request).is_some_and(|(of, _)| *of == connection)
            && let Some((_, to)) = asked.remove(&request)
        {
            // Whoever asked may have gone away.
            let _ = to.send(answer);
        }
    }
}
