//! How the ranks of an attempt ended on one of several agents, and how good an explanation that is.

use lockstep_protocol::{
    agent::Ending,
    reason::{Reason, ReasonKind},
};
use serde::{Deserialize, Serialize};

/// How the ranks of an attempt ended on one agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PlaceEnd {
    /// As the agent says, which may be stopping in order.
    Ended {
        /// What its ranks came to.
        ending: Ending,
        /// Why the agent is stopping, if it is.
        leaving: Option<Reason>,
    },
    /// Its lease ran out.
    Lost(Reason),
    /// It was stopped in order, or went away before it started anything.
    Left(Reason),
}

impl PlaceEnd {
    /// How good an explanation of the attempt's end it is: lowest first.
    fn precedence(&self) -> u8 {
        match self {
            Self::Ended { ending: Ending::Failed { reason, .. }, .. } => match reason.kind() {
                // Each agent sees its own ranks wait for another one's.
                ReasonKind::Stalled { detail: Some(_), .. } => 2,
                ReasonKind::Stalled { detail: None, .. } => 3,
                _ => 0,
            },
            Self::Lost(_) => 1,
            Self::Left(_) | Self::Ended { ending: Ending::Stopped, leaving: Some(_) } => 4,
            Self::Ended { ending: Ending::Secondary { .. }, .. } => 5,
            // On the server's order, because of another one.
            Self::Ended { ending: Ending::Stopped, leaving: None } => 6,
            Self::Ended { ending: Ending::Succeeded { .. }, .. } => 7,
        }
    }

    /// Whether the ranks of other agents can do nothing more: not where those of this one are done, or were asked to end.
    pub(super) fn ends_others(&self) -> bool {
        !matches!(self, Self::Ended { ending: Ending::Succeeded { .. } | Ending::Stopped, .. })
    }

    /// The step of a rank that did not continue: of several, the one that is furthest behind held up the others.
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

/// Of all agents' ends, in the order in which they were heard, the one that explains the others.
pub(super) fn explanation(ends: Vec<PlaceEnd>) -> Option<PlaceEnd> {
    // The first of those that explain it equally well.
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
    fn causes_come_before_what_they_bring_about() {
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
    fn of_ranks_that_stand_still_the_suspended_one_holds_up_the_others_or_the_one_furthest_behind() {
        let waits = |step| stalled(step, None);
        let suspended = stalled(8, Some("its process is suspended"));
        explains(&[waits(7), suspended, waits(7)], 1);
        explains(&[waits(8), waits(7)], 1);
        explains(&[waits(7), killed(9)], 1);
    }

    #[test]
    fn only_ranks_that_are_done_or_had_to_stop_leave_the_others_alone() {
        assert!(!succeeded().ends_others() && !stopped().ends_others());
        assert!(secondary().ends_others() && PlaceEnd::Lost("silent".into()).ends_others());
    }
}
