//! The ends of an attempt's ranks on several agents, and which of them explains the attempt's end.

use lockstep_protocol::{
    agent::Ending,
    reason::{Reason, ReasonKind},
};
use serde::{Deserialize, Serialize};

/// How the ranks of an attempt ended on one agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PlaceEnd {
    /// The agent has reported the end.
    Ended {
        /// The end of the agent's ranks.
        ending: Ending,
        /// The reason if the agent itself is stopping.
        leaving: Option<Reason>,
    },
    /// The agent's lease has expired.
    Lost(Reason),
    /// The agent was stopped in an orderly way, or disconnected before it started a rank.
    Left(Reason),
}

impl PlaceEnd {
    /// The precedence of this end as the explanation of the attempt's end. The lowest number is the best explanation.
    fn precedence(&self) -> u8 {
        match self {
            Self::Ended { ending: Ending::Failed { reason, .. }, .. } => match reason.kind() {
                // Each agent only sees its own ranks wait for ranks of other agents.
                ReasonKind::Stalled { detail: Some(_), .. } => 2,
                ReasonKind::Stalled { detail: None, .. } => 3,
                _ => 0,
            },
            Self::Lost(_) => 1,
            Self::Left(_) | Self::Ended { ending: Ending::Stopped, leaving: Some(_) } => 4,
            Self::Ended { ending: Ending::Secondary { .. }, .. } => 5,
            // Stopped by the server, because ranks of another agent have ended.
            Self::Ended { ending: Ending::Stopped, leaving: None } => 6,
            Self::Ended { ending: Ending::Succeeded { .. }, .. } => 7,
        }
    }

    /// Whether the ranks of other agents cannot continue. False if the ranks of this agent have succeeded or were asked to end.
    pub(super) fn ends_others(&self) -> bool {
        !matches!(self, Self::Ended { ending: Ending::Succeeded { .. } | Ending::Stopped, .. })
    }

    /// The step of a stalled rank. Of several stalled ranks, the rank that is furthest behind held up the others.
    fn step(&self) -> u64 {
        match self {
            Self::Ended { ending: Ending::Failed { reason, .. }, .. } => match reason.kind() {
                ReasonKind::Stalled { step, .. } => *step,
                _ => 0,
            },
            _ => 0,
        }
    }
}

/// Selects the end that explains the attempt's end. `ends`: the ends on all agents, in the order of their reports.
pub(super) fn explanation(ends: Vec<PlaceEnd>) -> Option<PlaceEnd> {
    // `min_by_key` selects the first of several equal ends.
    ends.into_iter().min_by_key(|end| (end.precedence(), end.step()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_protocol::reason::FailureCode;

    fn failed(kind: ReasonKind) -> PlaceEnd {
        let ending = Ending::Failed { reason: kind.into(), retriable: true };
        PlaceEnd::Ended { ending, leaving: None }
    }

    fn killed(step: u64) -> PlaceEnd {
        failed(ReasonKind::RankKilled { rank: 1, step, signal: 9 })
    }

    fn stalled(step: u64, detail: Option<&str>) -> PlaceEnd {
        failed(ReasonKind::Stalled { rank: 1, step, secs: Some(60.0), detail: detail.map(Into::into) })
    }

    fn stopped() -> PlaceEnd {
        PlaceEnd::Ended { ending: Ending::Stopped, leaving: None }
    }

    fn secondary() -> PlaceEnd {
        PlaceEnd::Ended { ending: Ending::Secondary { reason: "lost it".into() }, leaving: None }
    }

    fn succeeded() -> PlaceEnd {
        PlaceEnd::Ended { ending: Ending::Succeeded { step: 9 }, leaving: None }
    }

    #[track_caller]
    fn explains(ends: &[PlaceEnd], first: usize) {
        assert_eq!(explanation(ends.to_vec()).as_ref(), ends.get(first), "{ends:#?}");
    }

    #[test]
    fn causes_take_precedence_over_their_consequences() {
        let lost = || PlaceEnd::Lost("it was silent".into());
        let leaving = PlaceEnd::Ended { ending: Ending::Stopped, leaving: Some("it leaves".into()) };
        explains(&[secondary(), stopped(), killed(3), lost()], 2);
        explains(&[secondary(), lost(), stopped()], 1);
        explains(&[secondary(), leaving.clone()], 1);
        explains(&[leaving, lost()], 1);
        explains(&[stopped(), secondary()], 1);
        explains(&[succeeded(), stopped()], 1);
        explains(&[succeeded(), succeeded()], 0);
        let no_memory = FailureCode::OutOfMemory.of_rank(1, 9, "out of memory".into());
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
        assert!(secondary().ends_others() && PlaceEnd::Lost("silent".into()).ends_others());
    }
}
