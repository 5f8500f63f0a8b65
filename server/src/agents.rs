//! The agents that are connected now: what they have, how to tell them something, and what was asked of them.

use crate::store::AgentRow;
use jiff::Timestamp;
use lockstep_protocol::{
    agent::{Answer, Question, ToAgent},
    job::JobId,
    look::was_killed,
};
use std::{
    collections::{BTreeMap, HashMap, HashSet},
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
#[derive(Debug, Clone)]
pub(crate) enum AskError {
    NobodyOnline,
    /// No agent that is online has these files.
    NobodyHasFiles {
        path: String,
        asked: Vec<String>,
    },
    /// The agent went away, or took too long, with so many questions before this one.
    NoAnswer(Place),
    /// The agent's process for the question was killed, in the agent's words.
    Killed {
        agent: String,
        detail: String,
    },
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
            Self::NobodyHasFiles { path, asked } => {
                format!("no machine that is online has {path} (asked: {})", asked.join(", "))
            }
            Self::NoAnswer(Place { agent, ahead: 0 }) => {
                format!("{agent} went away or did not answer in time; try again")
            }
            Self::NoAnswer(Place { agent, ahead }) => {
                format!("{agent} did not answer in time, as it had {ahead} such questions before; try again")
            }
            Self::Killed { agent, detail } => {
                format!(
                    "{agent}: {detail}; try again. It may have run out of memory, or stopped with its agent"
                )
            }
            Self::Refused(detail) => detail,
        }
    }
}

/// Who answers a question, and how many of its kind come before it there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) agent: String,
    pub(crate) ahead: usize,
}

/// A question that was sent and not answered.
#[derive(Debug)]
struct Asked {
    connection: u64,
    agent: String,
    is_long: bool,
    asker: Asker,
}

type Asker = oneshot::Sender<Result<Answer, String>>;

/// Agents by id.
#[derive(Debug, Default)]
pub(crate) struct Agents {
    online: Mutex<HashMap<String, Online>>,
    /// By request, the oldest first.
    asked: Mutex<BTreeMap<u64, Asked>>,
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
        lock(&self.asked).retain(|_, asked| asked.connection != connection);
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

    /// Sends a question to an agent; the answer is awaited with [`Agents::answer`].
    pub(crate) fn ask(&self, agent: &Online, question: Question) -> Waiting {
        let request = self.next.fetch_add(1, Ordering::Relaxed);
        let (asker, answer) = oneshot::channel();
        let asked = Asked {
            connection: agent.connection,
            agent: agent.row.name.clone(),
            is_long: question.is_long(),
            asker,
        };
        lock(&self.asked).insert(request, asked);
        if agent.to.send(ToAgent::Ask { request, question }).is_err() {
            // Its connection is gone; so is whoever would answer.
            lock(&self.asked).remove(&request);
        }
        Waiting { request, agent: agent.row.name.clone(), answer }
    }

    /// Waits for the answer.
    pub(crate) async fn answer(&self, waiting: Waiting, patience: Duration) -> Result<Answer, AskError> {
        let Waiting { request, agent, answer } = waiting;
        let answer = tokio::time::timeout(patience, answer).await;
        let place = self.place_of(request).unwrap_or(Place { agent, ahead: 0 });
        lock(&self.asked).remove(&request);
        match answer {
            Ok(Ok(Err(detail))) if was_killed(&detail) => {
                Err(AskError::Killed { agent: place.agent, detail })
            }
            Ok(Ok(answer)) => answer.map_err(AskError::Refused),
            _ => Err(AskError::NoAnswer(place)),
        }
    }

    /// Where a question waits; none when it is answered.
    pub(crate) fn place_of(&self, request: u64) -> Option<Place> {
        let asked = lock(&self.asked);
        let mine = asked.get(&request)?;
        let before = asked.range(..request).map(|(_, other)| other);
        let ahead = before.filter(|o| o.connection == mine.connection && o.is_long == mine.is_long).count();
        Some(Place { agent: mine.agent.clone(), ahead })
    }

    /// Questions of a kind that a connection has not answered.
    pub(crate) fn unanswered(&self, connection: u64, is_long: bool) -> usize {
        lock(&self.asked).values().filter(|a| a.connection == connection && a.is_long == is_long).count()
    }

    /// An agent's answer.
    pub(crate) fn answered(&self, connection: u64, request: u64, answer: Result<Answer, String>) {
        let mut asked = lock(&self.asked);
        if asked.get(&request).is_some_and(|asked| asked.connection == connection)
            && let Some(asked) = asked.remove(&request)
        {
            // Whoever asked may have gone away.
            let _ = asked.asker.send(answer);
        }
    }
}

/// A question on its way.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) request: u64,
    agent: String,
    answer: oneshot::Receiver<Result<Answer, String>>,
}
