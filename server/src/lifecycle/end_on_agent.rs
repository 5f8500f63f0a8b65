//! The end of an attempt whose ranks are on several agents. The attempt ends when the ranks have ended on all agents, so that no GPU memory
//! is in use when the next attempt starts. The end with the best explanation gives the reason.

use super::{ChangeResult, JobRow, end_lost_attempt, reports::end_attempt, requeue};
use jiff::Timestamp;
use lockstep_protocol::{
    agent::Ending,
    reason::{Reason, ReasonKind},
};
use serde::{Deserialize, Serialize};

/// How the ranks of an attempt ended on one agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EndOnAgent {
    /// The agent has reported the end.
    Ended {
        /// The end of the agent's ranks.
        ending: Ending,
        /// Why the agent is leaving; `None` if the agent continues.
        agent_leaving: Option<Reason>,
    },
    /// The agent's lease has expired.
    Lost(Reason),
    /// The agent left or declined the start, and has reported no end of its ranks. The job is requeued.
    LeftUnreported(Reason),
}

impl EndOnAgent {
    /// Sort key: the end with the lowest key explains the attempt's end best. The second number is the step of a stalled rank, because the
    /// stalled rank with the lowest step delayed the other ranks.
    fn sort_key(&self) -> (u8, u64) {
        match self {
            Self::Ended { ending: Ending::Failed { reason, .. }, .. } => match reason.kind() {
                // A stall with a detail, such as a suspended process, is a cause. A rank without one may only have waited for other ranks.
                ReasonKind::Stalled { detail: Some(_), step, .. } => (2, *step),
                ReasonKind::Stalled { detail: None, step, .. } => (3, *step),
                _ => (0, 0),
            },
            Self::Lost(_) => (1, 0),
            Self::LeftUnreported(_) | Self::Ended { ending: Ending::Stopped, agent_leaving: Some(_) } => {
                (4, 0)
            }
            Self::Ended { ending: Ending::Secondary { .. }, .. } => (5, 0),
            // Stopped by the server, because ranks of another agent have ended.
            Self::Ended { ending: Ending::Stopped, agent_leaving: None } => (6, 0),
            Self::Ended { ending: Ending::Succeeded { .. }, .. } => (7, 0),
        }
    }

    /// Whether this end stops the ranks of the other agents. A success, and a stop that was requested, do not.
    fn ends_others(&self) -> bool {
        !matches!(self, Self::Ended { ending: Ending::Succeeded { .. } | Ending::Stopped, .. })
    }
}

/// Selects the end that explains the attempt's end best. `ends`: the ends on all agents, in the order of their reports.
fn best_explanation(ends: Vec<EndOnAgent>) -> Option<EndOnAgent> {
    // `min_by_key` selects the first of several equal ends.
    ends.into_iter().min_by_key(EndOnAgent::sort_key)
}

/// Records that the ranks of the live attempt have ended on an agent. When they have ended on all `agent_count` agents, the attempt ends.
pub fn record_end_on_agent(
    row: &mut JobRow,
    agent_count: usize,
    agent_id: &str,
    end: EndOnAgent,
    at: Timestamp,
) -> ChangeResult {
    let ends = &mut row.progress.ends;
    if ends.iter().any(|(known, _)| known == agent_id) {
        return Ok(Vec::new());
    }
    ends.push((agent_id.to_owned(), end));
    if ends.len() < agent_count {
        return Ok(Vec::new());
    }
    let Some(cause) = best_explanation(std::mem::take(ends).into_iter().map(|(_, end)| end).collect()) else {
        return Ok(Vec::new());
    };
    match cause {
        EndOnAgent::Lost(reason) => end_lost_attempt(row, &reason, at),
        EndOnAgent::LeftUnreported(reason) => requeue(row, &reason, at),
        EndOnAgent::Ended { ending, agent_leaving } => end_attempt(row, ending, agent_leaving.as_ref(), at),
    }
}

/// How the ranks of the live attempt have ended on an agent, while ranks on other agents have not. `None` if they have not ended.
pub fn find_end_on_agent<'a>(row: &'a JobRow, agent_id: &str) -> Option<&'a EndOnAgent> {
    row.progress.ends.iter().find(|(known, _)| known == agent_id).map(|(_, end)| end)
}

/// Whether the remaining ranks of the live attempt must end, because ranks on an agent have ended.
pub fn is_ending(row: &JobRow) -> bool {
    row.progress.ends.iter().any(|(_, end)| end.ends_others())
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_protocol::reason::FailureCode;

    fn failed(kind: ReasonKind) -> EndOnAgent {
        let ending = Ending::Failed { reason: kind.into(), retriable: true };
        EndOnAgent::Ended { ending, agent_leaving: None }
    }

    fn killed(step: u64) -> EndOnAgent {
        failed(ReasonKind::RankKilled { rank: 1, step, signal: 9 })
    }

    fn stalled(step: u64, detail: Option<&str>) -> EndOnAgent {
        failed(ReasonKind::Stalled { rank: 1, step, secs: Some(60.0), detail: detail.map(Into::into) })
    }

    fn stopped() -> EndOnAgent {
        EndOnAgent::Ended { ending: Ending::Stopped, agent_leaving: None }
    }

    fn secondary() -> EndOnAgent {
        EndOnAgent::Ended { ending: Ending::Secondary { reason: "lost it".into() }, agent_leaving: None }
    }

    fn succeeded() -> EndOnAgent {
        EndOnAgent::Ended { ending: Ending::Succeeded { step: 9 }, agent_leaving: None }
    }

    #[track_caller]
    fn explains(ends: &[EndOnAgent], first: usize) {
        assert_eq!(best_explanation(ends.to_vec()).as_ref(), ends.get(first), "{ends:#?}");
    }

    #[test]
    fn causes_take_precedence_over_their_consequences() {
        let lost = || EndOnAgent::Lost("it was silent".into());
        let leaving = EndOnAgent::Ended { ending: Ending::Stopped, agent_leaving: Some("it leaves".into()) };
        explains(&[secondary(), stopped(), killed(3), lost()], 2);
        explains(&[secondary(), lost(), stopped()], 1);
        explains(&[secondary(), leaving.clone()], 1);
        explains(&[leaving, lost()], 1);
        explains(&[stopped(), secondary()], 1);
        explains(&[succeeded(), stopped()], 1);
        explains(&[succeeded(), succeeded()], 0);
        let no_memory = FailureCode::OutOfMemory.reason_kind(1, 9, "out of memory".into());
        explains(&[failed(no_memory), killed(3)], 0);
        explains(&[], 0);
    }

    #[test]
    fn a_suspended_rank_or_the_rank_furthest_behind_explains_a_stall() {
        let waits = |step| stalled(step, None);
        let suspended = stalled(8, Some("its process is suspended"));
        explains(&[waits(7), suspended, waits(7)], 1);
        explains(&[waits(8), waits(7)], 1);
        explains(&[waits(7), killed(9)], 1);
    }

    #[test]
    fn ranks_that_succeeded_or_were_stopped_do_not_end_others() {
        assert!(!succeeded().ends_others() && !stopped().ends_others());
        assert!(secondary().ends_others() && EndOnAgent::Lost("silent".into()).ends_others());
    }
}
