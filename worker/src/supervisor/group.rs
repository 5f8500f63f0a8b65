//! The ranks of one attempt on this machine, watched and ended together.

use super::{
    cause::{FailureCause, RankEnd, failure_cause},
    process::Exit,
    rank::{Rank, RecordSink},
};
use crate::rank::{EXIT_FINISHED, EXIT_PAUSED, EXIT_STOPPED};
use rustix::process::Signal;
use std::time::{Duration, Instant};

/// Interval between two SIGKILLs.
const KILL_EVERY: Duration = Duration::from_secs(1);
/// How often to check whether processes left behind by ranks have ended.
const CHECK_REMAINING_EVERY: Duration = Duration::from_millis(20);
/// Ranks that still exist this long after the first SIGKILL are reported as unkillable and no longer awaited.
const UNKILLABLE_AFTER: Duration = Duration::from_secs(30);

/// How ranks are asked to end, from the least to the most urgent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// SIGUSR1: finish the step and write a checkpoint. Becomes [`Stop::Terminate`] after the time `within`, or when a
    /// rank fails.
    Save { within: Duration },
    /// SIGTERM. Becomes [`Stop::Kill`] after the caller's grace period.
    Terminate,
    /// SIGKILL, once a second.
    Kill,
}

impl Stop {
    fn signal(self) -> Signal {
        match self {
            Stop::Save { .. } => Signal::USR1,
            Stop::Terminate => Signal::TERM,
            Stop::Kill => Signal::KILL,
        }
    }

    fn urgency(self) -> u8 {
        match self {
            Stop::Save { .. } => 0,
            Stop::Terminate => 1,
            Stop::Kill => 2,
        }
    }
}

/// What happens to ranks whose supervisor is dropped before they have ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Orphans {
    /// The ranks continue to run, and the next supervisor adopts them.
    Stay,
    Terminate,
}

/// How long ranks may take to end by themselves after one of them has failed. A report that arrives meanwhile may
/// explain the failure better than the known cause.
#[derive(Debug, Clone, Copy)]
pub struct EndDelays {
    /// The delay if the cause is certain.
    pub certain: Duration,
    /// The delay if the end of another rank may be a better explanation.
    pub provisional: Duration,
    /// The delay if the ranks are stopping without a failure, although this supervisor has not asked them to stop. Rank 0 may then
    /// still be writing their checkpoint.
    pub stopping: Duration,
}

/// A stop in progress.
#[derive(Debug, Clone, Copy)]
struct Stopping {
    how: Stop,
    since: Instant,
    kill_count: u32,
}

/// The ranks, in rank order.
pub struct RankGroup<N: RecordSink> {
    pub ranks: Vec<Rank<N>>,
    stopping: Option<Stopping>,
    /// The time since which a failure of a rank is known. `None` if no rank has failed.
    failure_since: Option<Instant>,
    /// Whether suspended ranks get SIGKILL instead of SIGTERM, because a suspended process does not react to SIGTERM.
    pub kills_suspended: bool,
    orphans: Orphans,
}

impl<N: RecordSink> RankGroup<N> {
    pub fn new(orphans: Orphans) -> Self {
        Self { ranks: Vec::new(), stopping: None, failure_since: None, kills_suspended: false, orphans }
    }

    /// Checks which ranks have ended.
    pub fn poll(&mut self) {
        self.ranks.iter_mut().for_each(Rank::poll);
    }

    /// Whether all ranks have ended, according to the last [`RankGroup::poll`].
    pub fn has_ended(&self) -> bool {
        self.ranks.iter().all(|rank| rank.end.exit.is_some())
    }

    /// How each rank has ended, or its state so far.
    pub fn ends(&self) -> impl Iterator<Item = &RankEnd> {
        self.ranks.iter().map(|rank| &rank.end)
    }

    pub fn failure_cause(&self) -> Option<FailureCause<'_>> {
        failure_cause(self.ends())
    }

    /// Whether a rank failed so long ago that the other ranks must be asked to end.
    pub fn must_end(&mut self, delays: EndDelays) -> bool {
        let Some(cause) = failure_cause(self.ranks.iter().map(|rank| &rank.end)) else { return false };
        let limit = if !cause.is_provisional {
            delays.certain
        } else if self.ends().all(RankEnd::is_stopping) {
            delays.stopping
        } else {
            delays.provisional
        };
        self.failure_since.get_or_insert_with(Instant::now).elapsed() >= limit
    }

    /// Whether the ranks have been asked to end.
    pub fn is_stopping(&self) -> bool {
        self.stopping.is_some()
    }

    /// Asks all ranks to end. After an earlier order, only a more urgent order has an effect.
    pub fn stop(&mut self, how: Stop) {
        match self.stopping {
            None => {
                for rank in &mut self.ranks {
                    rank.poll();
                    rank.end.was_asked_to_end = rank.end.exit.is_none();
                }
            }
            Some(before) if how.urgency() <= before.how.urgency() => return,
            Some(_) => {}
        }
        self.stopping =
            Some(Stopping { how, since: Instant::now(), kill_count: u32::from(how == Stop::Kill) });
        self.signal(how.signal());
    }

    /// Enforces an earlier order to end. `grace` is the time from SIGTERM to SIGKILL.
    pub(super) fn escalate(&mut self, grace: Duration) {
        let Some(Stopping { how, since, kill_count }) = self.stopping else { return };
        match how {
            Stop::Save { within } => {
                let is_orderly =
                    |exit| matches!(exit, Exit::Status(EXIT_STOPPED | EXIT_PAUSED | EXIT_FINISHED));
                let has_failed = self.ends().any(|end| end.exit().is_some_and(|exit| !is_orderly(exit)));
                if has_failed || since.elapsed() >= within {
                    self.stop(Stop::Terminate);
                }
            }
            Stop::Terminate if since.elapsed() >= grace => self.stop(Stop::Kill),
            Stop::Kill if since.elapsed() >= KILL_EVERY * kill_count => {
                self.stopping = Some(Stopping { how, since, kill_count: kill_count + 1 });
                self.signal(Signal::KILL);
            }
            Stop::Terminate | Stop::Kill => {}
        }
    }

    /// Whether ranks still exist although they were killed repeatedly.
    pub fn is_unkillable(&self) -> bool {
        self.stopping
            .is_some_and(|stopping| stopping.how == Stop::Kill && stopping.since.elapsed() > UNKILLABLE_AFTER)
    }

    /// Kills processes that the ranks have left behind, and waits until they have ended. Returns a description of processes that
    /// cannot be killed, if there are any.
    pub async fn kill_remaining(&mut self) -> Option<String> {
        let until = Instant::now() + UNKILLABLE_AFTER;
        loop {
            let mut all_ended = true;
            for rank in &mut self.ranks {
                all_ended &= rank.process.kill_remaining();
            }
            if all_ended {
                return None;
            }
            if self.is_unkillable() || Instant::now() > until {
                break;
            }
            tokio::time::sleep(CHECK_REMAINING_EVERY).await;
        }
        let remaining = self.ranks.iter().flat_map(|rank| {
            let rank_id = rank.end.rank;
            rank.process.remaining_processes().into_iter().map(move |(pid, state)| {
                let why = if state == 'D' { ", blocked in the kernel" } else { "" };
                format!("rank {rank_id} (process {pid}, state {state}{why})")
            })
        });
        let remaining: Vec<_> = remaining.collect();
        (!remaining.is_empty()).then(|| remaining.join(", "))
    }

    fn signal(&mut self, signal: Signal) {
        for rank in &mut self.ranks {
            let needs_kill = self.kills_suspended && signal == Signal::TERM && rank.process.is_suspended();
            rank.process.signal(if needs_kill { Signal::KILL } else { signal });
        }
    }
}

impl<N: RecordSink> Drop for RankGroup<N> {
    fn drop(&mut self) {
        match self.orphans {
            Orphans::Stay => {}
            Orphans::Terminate => self.ranks.iter_mut().for_each(|rank| rank.process.signal(Signal::TERM)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{proc_fs::stat, process::RankProcess},
        *,
    };
    use crate::testkit::wait_until;
    use lockstep_protocol::agent::AttemptEvent;
    use rustix::process::{Pid, kill_process};
    use std::{path::Path, process::Command};

    /// A group of one rank that sleeps, and its process id.
    fn sleeping_group(orphans: Orphans) -> (RankGroup<Vec<AttemptEvent>>, i32) {
        let mut command = Command::new("sleep");
        let process = RankProcess::spawn(0, command.arg("1000")).unwrap();
        let pid = process.identity.pid;
        let mut ranks = RankGroup::new(orphans);
        ranks.ranks.push(Rank::of_attempt(process, Path::new("/nonexistent"), Vec::new()));
        (ranks, pid)
    }

    fn runs(pid: i32) -> bool {
        stat(pid).is_some_and(|stat| !stat.has_ended())
    }

    #[test]
    fn dropping_a_group_treats_orphans_as_configured() {
        let (ranks, pid) = sleeping_group(Orphans::Terminate);
        drop(ranks);
        wait_until("the rank was not asked to end", || !runs(pid));
        let (ranks, pid) = sleeping_group(Orphans::Stay);
        drop(ranks);
        assert!(runs(pid));
        kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    }

    #[test]
    fn only_a_more_urgent_stop_counts_and_ends_after_it_are_no_cause() {
        let (mut ranks, pid) = sleeping_group(Orphans::Stay);
        ranks.stop(Stop::Kill);
        // A less urgent order is ignored. Otherwise the group would wait for the checkpoint of a killed rank.
        ranks.stop(Stop::Save { within: Duration::from_secs(1000) });
        wait_until(&format!("process {pid} still runs"), || {
            ranks.poll();
            ranks.has_ended()
        });
        assert_eq!(ranks.ends().map(|end| end.exit).collect::<Vec<_>>(), [Some(Exit::Signal(9))]);
        assert_eq!(ranks.failure_cause(), None);
        assert!(ranks.is_stopping() && !ranks.is_unkillable());
    }
}
