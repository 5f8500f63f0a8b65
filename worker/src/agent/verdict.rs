//! Why an attempt failed: of all that its ranks recorded and how they ended, the cause that comes first.

use crate::{
    launch::Exit,
    rank::{EXIT_FINISHED, EXIT_STOPPED},
};
use lockstep_protocol::{
    agent::Ending,
    reason::{Facts, Reason, ReasonCode},
};

/// What is known of one rank.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct RankEnd {
    pub(super) rank: u32,
    /// Absent while it runs.
    pub(super) exit: Option<Exit>,
    /// It was still running when its agent told it to end: how it ended then is no cause.
    pub(super) told_to_end: bool,
    /// Optimizer steps done, as far as its records say.
    pub(super) step: u64,
    /// It recorded that its training is done.
    pub(super) finished: bool,
    /// Its last words.
    pub(super) failure: Option<Failure>,
    /// The last line it printed outside its log (a panic, the loader's complaint).
    pub(super) last_stderr_line: Option<String>,
    /// It printed that memory was refused.
    pub(super) no_memory: bool,
}

/// What a rank said of its own failure.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Failure {
    pub(super) reason: String,
    pub(super) code: Option<ReasonCode>,
    pub(super) retriable: bool,
    pub(super) secondary: bool,
}

impl RankEnd {
    /// Whether it ended as a rank should.
    pub(super) fn is_success(&self) -> bool {
        match self.exit {
            Some(Exit::Status(EXIT_FINISHED)) => true,
            Some(Exit::Unseen) => self.finished && self.failure.is_none(),
            _ => false,
        }
    }

    /// Whether it runs, or has ended, as a rank does that was told to stop.
    pub(super) fn is_stopping(&self) -> bool {
        let in_order = matches!(self.exit, None | Some(Exit::Status(EXIT_STOPPED | EXIT_FINISHED)));
        in_order && self.failure.is_none()
    }

    /// Whether it was killed or died unseen, and did not end by itself.
    pub(super) fn is_death(&self) -> bool {
        let unexplained = !self.is_success() && self.failure.is_none();
        unexplained && matches!(self.exit, Some(Exit::Signal(_) | Exit::Unseen))
    }

    /// Whether it ended because the system gave it no more memory: Rust's runtime says so and aborts.
    pub(super) fn was_refused_memory(&self) -> bool {
        self.exit == Some(Exit::Signal(6)) && self.no_memory
    }

    /// How good an explanation this rank's end is of the attempt's: lowest first, none if it is none.
    fn precedence(&self) -> Option<u32> {
        if self.is_success() {
            return None;
        }
        match (&self.failure, self.exit) {
            (Some(failure), _) if !failure.secondary => Some(0),
            (_, Some(_)) if self.told_to_end && self.failure.is_none() => None,
            (Some(_), _) => Some(5),
            (None, Some(Exit::Signal(_))) => Some(1),
            (None, Some(Exit::Unseen)) => Some(2),
            (None, Some(Exit::Status(EXIT_STOPPED))) => Some(4),
            (None, Some(Exit::Status(_))) => Some(3),
            (None, None) => None,
        }
    }

    fn ending(&self) -> Ending {
        let mut facts = Facts { rank: Some(self.rank), step: Some(self.step), ..Facts::default() };
        let (code, retriable) = match (&self.failure, self.exit) {
            (Some(failure), _) => {
                facts.detail = Some(failure.reason.clone());
                (failure.code.clone().unwrap_or(ReasonCode::RankFailed), failure.retriable)
            }
            (None, Some(Exit::Signal(signal))) => {
                facts.signal = Some(signal);
                (ReasonCode::RankKilled, true)
            }
            (None, Some(Exit::Status(EXIT_STOPPED))) => (ReasonCode::RankStopped, true),
            (None, Some(Exit::Status(status))) => {
                facts.exit_status = Some(status);
                facts.detail = self.last_stderr_line.clone();
                (ReasonCode::RankExited, true)
            }
            (None, Some(Exit::Unseen) | None) => (ReasonCode::RankVanished, true),
        };
        Ending::Failed { reason: Reason::new(code, facts), retriable }
    }
}

/// The cause that explains the others, among ranks that ended or said why they cannot go on.
pub(super) fn cause(ranks: &[RankEnd]) -> Option<(Ending, bool)> {
    let (precedence, rank) =
        ranks.iter().filter_map(|r| Some((r.precedence()?, r))).min_by_key(|(p, r)| (*p, r.step, r.rank))?;
    // Whether a better explanation may yet come.
    Some((rank.ending(), precedence >= 4))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reason(ranks: &[RankEnd]) -> String {
        match cause(ranks) {
            Some((Ending::Failed { reason, .. }, _)) => reason.words().to_owned(),
            other => panic!("{other:?}"),
        }
    }

    fn lost_connection(rank: u32) -> RankEnd {
        let failure = Failure {
            reason: "all_reduce: lost the connection to rank 1".into(),
            code: None,
            retriable: true,
            secondary: true,
        };
        RankEnd { rank, exit: Some(Exit::Status(1)), step: 41, failure: Some(failure), ..Default::default() }
    }

    #[test]
    fn a_killed_rank_comes_before_those_that_lost_it() {
        let killed = RankEnd { rank: 1, exit: Some(Exit::Signal(9)), step: 41, ..Default::default() };
        let ranks = [lost_connection(0), killed];
        assert_eq!(reason(&ranks), "rank 1 was killed by signal 9 at step 41");
        // Before its death is seen, the secondary cause is known to be one.
        assert!(cause(&ranks[..1]).unwrap().1);
        assert!(!cause(&ranks).unwrap().1);
    }

    #[test]
    fn a_ranks_own_words_come_before_signals() {
        let failure = Failure {
            reason: "the loss is NaN".into(),
            code: Some(ReasonCode::Diverged),
            retriable: false,
            secondary: false,
        };
        let said = RankEnd {
            rank: 2,
            exit: Some(Exit::Status(1)),
            step: 7,
            failure: Some(failure),
            ..Default::default()
        };
        let killed = RankEnd { rank: 1, exit: Some(Exit::Signal(9)), step: 7, ..Default::default() };
        let ranks = [lost_connection(0), killed, said];
        assert_eq!(reason(&ranks), "rank 2 failed at step 7: the loss is NaN");
        let Some((Ending::Failed { reason, .. }, _)) = cause(&ranks) else { panic!() };
        assert_eq!((reason.code(), reason.facts().rank), (&ReasonCode::Diverged, Some(2)));
    }

    #[test]
    fn what_the_agent_did_itself_is_no_cause() {
        let ended = RankEnd {
            rank: 0,
            exit: Some(Exit::Signal(15)),
            told_to_end: true,
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
        assert_eq!(cause(std::slice::from_ref(&ended)), None);
        assert_eq!(
            reason(&[ended, panicked]),
            "rank 1 ended with exit status 101 at step 3: index out of bounds"
        );
    }

    #[test]
    fn a_rank_that_finished_unseen_has_succeeded() {
        let unseen = RankEnd { rank: 0, exit: Some(Exit::Unseen), step: 9, ..Default::default() };
        assert_eq!(
            reason(std::slice::from_ref(&unseen)),
            "rank 0 died at step 9 while no agent was watching it"
        );
        let finished = RankEnd { finished: true, ..unseen };
        assert!(finished.is_success());
        assert_eq!(cause(&[finished]), None);
    }
}
