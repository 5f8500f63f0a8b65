//! Why ranks failed: finds the primary cause in their records and in how they ended.

use super::process::Exit;
use crate::rank::{EXIT_FINISHED, EXIT_PAUSED, EXIT_STOPPED};
use lockstep_protocol::{
    agent::Ending,
    reason::{FailureCode, ReasonKind},
};

#[derive(Debug, Clone, Default, PartialEq)]
pub struct RankEnd {
    pub rank: u32,
    /// How the rank ended. `None` while the rank runs.
    pub exit: Option<Exit>,
    /// Whether the rank was still running when it was asked to end. Its exit status is then not a cause.
    pub was_asked_to_end: bool,
    /// Number of optimizer steps done, according to the rank's records.
    pub step: u64,
    /// The exit status that follows from the rank's last record: its training is complete or has paused.
    pub recorded_status: Option<i32>,
    /// The first failure that the rank reported.
    pub failure: Option<Failure>,
    /// The last line that the rank printed outside its log, such as a panic or an error of the dynamic linker.
    pub last_stderr_line: Option<String>,
    /// Whether the rank printed that memory could not be allocated.
    pub has_run_out_of_memory: bool,
}

/// A rank's report of its own failure.
#[derive(Debug, Clone, PartialEq)]
pub struct Failure {
    pub reason: String,
    pub code: FailureCode,
    /// Whether the next attempt may succeed.
    pub retriable: bool,
    /// Whether the rank failed only because it lost another rank.
    pub secondary: bool,
}

/// How a rank's end explains the end of its attempt, from the best explanation to the worst.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Explanation {
    OwnReason,
    Killed,
    Vanished,
    Exited,
    Stopped,
    LostAnotherRank,
}

impl RankEnd {
    /// How the rank ended. If its agent was not running then, the rank's last record tells.
    pub fn exit(&self) -> Option<Exit> {
        match self.recorded_status.filter(|_| self.failure.is_none()) {
            Some(status) if self.exit == Some(Exit::Unseen) => Some(Exit::Status(status)),
            _ => self.exit,
        }
    }

    pub fn is_success(&self) -> bool {
        self.exit() == Some(Exit::Status(EXIT_FINISHED))
    }

    pub fn has_paused(&self) -> bool {
        self.exit() == Some(Exit::Status(EXIT_PAUSED)) && self.failure.is_none()
    }

    /// Whether the rank has reported no failure, and is running or has finished, stopped or paused.
    pub fn is_stopping(&self) -> bool {
        let is_orderly =
            matches!(self.exit(), None | Some(Exit::Status(EXIT_STOPPED | EXIT_PAUSED | EXIT_FINISHED)));
        is_orderly && self.failure.is_none()
    }

    /// Whether the rank was killed or its end was not observed, and no report explains it.
    pub fn is_death(&self) -> bool {
        let unexplained = !self.is_success() && self.failure.is_none();
        unexplained && matches!(self.exit(), Some(Exit::Signal(_) | Exit::Unseen))
    }

    /// Whether the rank reported a failure of its own, rather than only the loss of another rank.
    pub fn has_own_reason(&self) -> bool {
        self.failure.as_ref().is_some_and(|failure| !failure.secondary)
    }

    /// Whether the rank ended because it could not allocate memory. Rust's runtime then prints a message and aborts.
    pub fn was_refused_memory(&self) -> bool {
        self.exit == Some(Exit::Signal(6)) && self.has_run_out_of_memory
    }

    /// How this rank's end explains the end of the attempt. `None` if it explains nothing.
    fn explanation(&self) -> Option<Explanation> {
        if self.is_success() {
            return None;
        }
        match (&self.failure, self.exit()) {
            (Some(failure), _) if !failure.secondary => Some(Explanation::OwnReason),
            (Some(_), _) => Some(Explanation::LostAnotherRank),
            (None, Some(_)) if self.was_asked_to_end => None,
            (None, Some(Exit::Signal(_))) => Some(Explanation::Killed),
            (None, Some(Exit::Unseen)) => Some(Explanation::Vanished),
            (None, Some(Exit::Status(EXIT_STOPPED | EXIT_PAUSED))) => Some(Explanation::Stopped),
            (None, Some(Exit::Status(_))) => Some(Explanation::Exited),
            (None, None) => None,
        }
    }

    /// The ending of an attempt whose cause is this rank's end.
    pub fn ending(&self) -> Ending {
        let (rank, step) = (self.rank, self.step);
        let kind = match (&self.failure, self.exit()) {
            (Some(failure), _) => failure.code.reason_kind(rank, step, failure.reason.as_str().into()),
            (None, Some(Exit::Signal(signal))) => ReasonKind::RankKilled { rank, step, signal },
            (None, Some(Exit::Status(EXIT_STOPPED | EXIT_PAUSED))) => ReasonKind::RankStopped { rank, step },
            (None, Some(Exit::Status(exit_status))) => {
                let detail = self.last_stderr_line.as_deref().map(Into::into);
                ReasonKind::RankExited { rank, step, exit_status, detail }
            }
            (None, Some(Exit::Unseen) | None) => ReasonKind::RankVanished { rank, step },
        };
        let retriable = self.failure.as_ref().is_none_or(|failure| failure.retriable);
        Ending::Failed { reason: kind.into(), retriable }
    }
}

/// The rank whose end explains the ends of the other ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FailureCause<'a> {
    pub rank: &'a RankEnd,
    /// Whether a better explanation may still arrive.
    pub is_provisional: bool,
}

/// The cause among `ranks`: a rank that has ended, or that has reported why it cannot continue.
pub fn failure_cause<'a>(ranks: impl IntoIterator<Item = &'a RankEnd>) -> Option<FailureCause<'a>> {
    let (explanation, rank) = ranks
        .into_iter()
        .filter_map(|rank| Some((rank.explanation()?, rank)))
        .min_by_key(|(explanation, rank)| (*explanation, rank.step, rank.rank))?;
    let is_provisional = matches!(explanation, Explanation::Stopped | Explanation::LostAnotherRank);
    Some(FailureCause { rank, is_provisional })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reason(ranks: &[RankEnd]) -> String {
        match failure_cause(ranks).map(|cause| cause.rank.ending()) {
            Some(Ending::Failed { reason, .. }) => reason.words().to_owned(),
            other => panic!("{other:?}"),
        }
    }

    fn lost_connection(rank: u32) -> RankEnd {
        let failure = Failure {
            reason: "all_reduce: lost the connection to rank 1".into(),
            code: FailureCode::Other,
            retriable: true,
            secondary: true,
        };
        RankEnd { rank, exit: Some(Exit::Status(1)), step: 41, failure: Some(failure), ..Default::default() }
    }

    #[test]
    fn a_killed_rank_precedes_the_ranks_that_lost_it() {
        let killed = RankEnd { rank: 1, exit: Some(Exit::Signal(9)), step: 41, ..Default::default() };
        let ranks = [lost_connection(0), killed];
        assert_eq!(reason(&ranks), "rank 1 was killed by signal 9 at step 41");
        // Even before the other rank's death is observed, this cause is known to be secondary.
        assert!(failure_cause(&ranks[..1]).unwrap().is_provisional);
        assert!(!failure_cause(&ranks).unwrap().is_provisional);
    }

    #[test]
    fn a_rank_s_own_reason_precedes_signals() {
        let failure = Failure {
            reason: "the loss is NaN".into(),
            code: FailureCode::Diverged,
            retriable: false,
            secondary: false,
        };
        let explained = RankEnd {
            rank: 2,
            exit: Some(Exit::Status(1)),
            step: 7,
            failure: Some(failure),
            ..Default::default()
        };
        let killed = RankEnd { rank: 1, exit: Some(Exit::Signal(9)), step: 7, ..Default::default() };
        let ranks = [lost_connection(0), killed, explained];
        assert_eq!(reason(&ranks), "the loss is NaN");
        let Ending::Failed { reason, .. } = failure_cause(&ranks).unwrap().rank.ending() else { panic!() };
        assert!(matches!(reason.kind(), ReasonKind::Diverged { rank: 2, .. }), "{reason:?}");
    }

    #[test]
    fn an_ordered_stop_is_not_a_cause() {
        let ended = RankEnd {
            rank: 0,
            exit: Some(Exit::Signal(15)),
            was_asked_to_end: true,
            step: 9,
            ..Default::default()
        };
        let panicked = RankEnd {
            rank: 1,
            exit: Some(Exit::Status(101)),
            step: 3,
            last_stderr_line: Some("index out of bounds".into()),
            ..Default::default()
        };
        assert_eq!(failure_cause(std::slice::from_ref(&ended)), None);
        assert_eq!(
            reason(&[ended, panicked]),
            "rank 1 ended with exit status 101 at step 3: index out of bounds"
        );
    }
}
