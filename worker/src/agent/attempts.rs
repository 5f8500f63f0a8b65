//! The attempts of an agent: starts them, and drops them when the server has all of their records.

use super::{
    Agent, Shutdown,
    attempt::{Attempt, Order},
    place,
};
use crate::report::events_path;
use lockstep_protocol::{
    agent::{AttemptRef, StartAttempt},
    job::JobId,
    reason::{Reason, ReasonKind},
    spec::RecoverySpec,
};
use std::time::{Duration, Instant};

/// Interval between two measurements of the spool.
const MEASURE_EVERY: Duration = Duration::from_secs(5);
/// How long an agent that serves only one job waits for the job's next attempt, without `recovery.wait_seconds`. Longer than the
/// server's longest pause before an attempt (60 s).
const MIN_ATTEMPT_WAIT: Duration = Duration::from_secs(90);

/// How long an agent of one job keeps trying to reach the server, if the job may have another attempt.
const UNREACHABLE_TIMEOUT: Duration = Duration::from_secs(3600);

/// Time after an attempt within which the next attempt may begin on this agent. If `min_ranks` is set, the server first waits
/// for slots for all ranks.
fn max_pause_between_attempts(recovery: &RecoverySpec) -> Duration {
    let wait_seconds = recovery.min_ranks.map_or(0, |_| recovery.wait_seconds);
    MIN_ATTEMPT_WAIT + Duration::from_secs(wait_seconds.into())
}

/// The wait for another attempt of the agent's only job.
pub(super) struct NextAttemptWait {
    /// Whether the last attempt failed on this agent.
    pub(super) has_failed: bool,
    ended_at: Instant,
    /// When the wait began: at the end of the attempt, or at a later connection to the server.
    pub(super) since: Instant,
    /// How long to wait while the server is connected. Zero if no attempt may follow.
    length: Duration,
}

impl NextAttemptWait {
    /// How long to wait. Without a connection, the wait is longer, because an unreachable server cannot start an attempt.
    pub(super) fn timeout(&self, is_connected: bool) -> Duration {
        let may_follow = self.length > Duration::ZERO;
        if may_follow && !is_connected { self.length.max(UNREACHABLE_TIMEOUT) } else { self.length }
    }

    /// Restarts the wait after a new connection, because a server that was unreachable could not start an attempt. The
    /// wait ends at most an hour after its original end, so that a connection that breaks every minute does not keep the
    /// agent forever.
    pub(super) fn restart(&mut self) {
        if self.length > Duration::ZERO && self.ended_at.elapsed() <= self.length + UNREACHABLE_TIMEOUT {
            self.since = Instant::now();
        }
    }
}

impl Agent {
    pub(super) fn add_attempt(&mut self, attempt: Attempt) {
        self.attempts.insert(attempt.attempt().fencing_token, attempt);
    }

    pub(super) fn find_attempt(&self, attempt: &AttemptRef) -> Option<&Attempt> {
        self.attempts.get(&attempt.fencing_token)
    }

    /// Every attempt whose end the server has not acknowledged.
    pub(super) fn attempt_refs(&self) -> Vec<AttemptRef> {
        self.attempts.values().map(|a| a.attempt().clone()).collect()
    }

    pub(super) fn start(&mut self, mut start: StartAttempt) {
        if self.attempts.contains_key(&start.attempt.fencing_token) {
            return;
        }
        if self.leaving.is_some() {
            return self.declined.push((start.attempt, "the agent is shutting down".into()));
        }
        let mut context = self.context.clone();
        let mapped = self.options.datasets.local_path(&start.spec.data.dataset, &start.dataset_path);
        let is_mapped = mapped.is_some();
        if let Some(local_path) = mapped {
            start.dataset_path = local_path.to_string_lossy().into_owned();
            // The agent's options, not the server, say where the dataset is, so it is not copied.
            start.files.dataset_in = None;
            context.copies = None;
        }
        if let Some(network) = &mut start.network {
            network.named_by = Some(self.network.named_by.to_owned());
        }
        let (mut stored, created) = place::choose_job_dir(&self.state_dir, start);
        if !is_mapped && !place::is_own_disk(&stored) {
            // The server's own files are not compared with the registration, because they may have changed since.
            stored.start.files.registered = None;
        }
        // Ranks without a record on disk could not be adopted after this process ends.
        if let Err(error) = created.and_then(|()| self.state_dir.store(&stored)) {
            tracing::warn!(job = %stored.start.attempt.job, attempt = stored.start.attempt.attempt, "the attempt is declined: the agent's folder cannot be written");
            let reason = self.refuse_work(&error);
            return self.declined.push((stored.start.attempt, reason));
        }
        tracing::info!(job = %stored.start.attempt.job, attempt = stored.start.attempt.attempt, ranks = stored.start.ranks.len(), "starting");
        self.next_attempt_wait = None;
        // A job that had finished may be retried while its last checkpoint is being uploaded.
        self.only_job_final_at = None;
        self.add_attempt(Attempt::start(stored, context));
    }

    /// Probes the agent's folder, and accepts new work only while the folder is writable. An agent without a writable folder would
    /// fail every job, although other agents could run it.
    pub(super) fn check_folder(&mut self) {
        match self.state_dir.probe() {
            Err(error) => drop(self.refuse_work(&error)),
            Ok(()) if self.no_work.take().is_some() => {
                tracing::info!(folder = %self.state_dir.dir().display(), "the folder can be written again; this agent accepts jobs");
            }
            Ok(()) => {}
        }
    }

    /// Accepts no new work until the folder is writable, and returns the reason. Running ranks continue.
    fn refuse_work(&mut self, error: &std::io::Error) -> String {
        let folder = self.state_dir.dir().display();
        if self.no_work.is_none() {
            tracing::error!(%folder, %error, "the folder cannot be written, so this agent accepts no jobs; free space on its disk, or make the folder writable");
        }
        let reason = format!("its folder {folder} cannot be written: {error}");
        self.no_work = Some(reason.clone());
        reason
    }

    /// Stops the agent in an orderly way: notifies the server, and lets ranks write a checkpoint.
    pub(super) fn leave(&mut self, reason: String) {
        self.leaving = Some(Shutdown { reason, is_announced: false, ranks_ended_at: None });
        self.context.spares.close();
        for attempt in self.attempts.values() {
            attempt.send_order(Order::Leave);
        }
    }

    /// Records that a job has finished or was deleted. An agent that serves only this job then ends, even if it never ran an
    /// attempt of the job.
    pub(super) fn record_final_job(&mut self, job: &JobId) {
        if self.options.only_job.as_ref() == Some(job) {
            self.only_job_final_at.get_or_insert_with(Instant::now);
        }
    }

    /// Drops an attempt that has ended, when the server has all of its records or refuses them. If `is_refused`, the server accepts
    /// no more reports of the attempt, for example because another agent has it.
    pub(super) fn forget(&mut self, attempt: &AttemptRef, is_refused: bool) {
        if let Some(attempt) = self.attempts.remove(&attempt.fencing_token) {
            if self.options.only_job.as_ref() == Some(&attempt.attempt().job) {
                let start = &attempt.stored.start;
                let has_failed = attempt.has_failed();
                // Another attempt may follow if this attempt has failed, was stopped because its ranks on another
                // machine failed, or lost its lease while this agent was unreachable.
                let may_follow = has_failed || start.is_shared() || is_refused;
                let length = if may_follow {
                    max_pause_between_attempts(&start.spec.recovery)
                } else {
                    Duration::ZERO
                };
                let now = Instant::now();
                self.next_attempt_wait =
                    Some(NextAttemptWait { has_failed, ended_at: now, since: now, length });
            }
            self.state_dir.forget(attempt.attempt());
        }
    }

    /// Measures the spool, the records that stay on this machine's disk until the server has stored them. If it exceeds its limit,
    /// the ranks are ended.
    pub(super) fn measure_spool(&mut self) {
        if self.spool_measured_at.elapsed() < MEASURE_EVERY {
            return;
        }
        self.spool_measured_at = Instant::now();
        let size = |a: &Attempt| {
            let dir = a.stored.attempt_dir();
            let files = a.stored.start.ranks.iter().map(|(rank, _)| events_path(&dir, *rank));
            files.filter_map(|path| path.metadata().ok()).map(|m| m.len()).sum::<u64>()
        };
        let bytes: u64 = self.attempts.values().map(size).sum();
        if bytes > self.options.spool_bytes {
            let (agent, size_bytes) = (self.context.remote.name.as_str().into(), bytes);
            let reason: Reason = ReasonKind::SpoolFull { agent, size_bytes }.into();
            tracing::error!(%reason, "the ranks write a checkpoint and end");
            for attempt in self.attempts.values().filter(|a| !a.is_over()) {
                attempt.send_order(Order::SpoolFull(reason.clone()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_of_one_job_waits_longer_than_the_server() {
        let recovery = |min_ranks| RecoverySpec { min_ranks, wait_seconds: 300, ..RecoverySpec::default() };
        assert_eq!(max_pause_between_attempts(&recovery(None)).as_secs(), 90);
        assert_eq!(max_pause_between_attempts(&recovery(Some(1))).as_secs(), 390);
    }
}
