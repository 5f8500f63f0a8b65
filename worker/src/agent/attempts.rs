//! The attempts of an agent: starts them, and drops them once the server has all of their records.

use super::{
    Agent, Shutdown,
    attempt::{Attempt, Order, free_port},
    place,
    preflight::Refusal,
    state_dir::StateDirError,
};
use lockstep_protocol::{
    agent::{AttemptRef, StartAttempt},
    job::JobId,
    reason::{Facts, Reason, ReasonCode},
};
use std::time::{Duration, Instant};

/// How often the spool is measured.
const MEASURE_EVERY: Duration = Duration::from_secs(5);

impl Agent {
    pub(super) fn take(&mut self, attempt: Attempt) {
        let AttemptRef { job, attempt: number, fencing_token } = attempt.attempt().clone();
        self.attempts.insert((fencing_token, (job, number)), attempt);
    }

    /// Every attempt whose end the server has not acknowledged, and those that this agent, which is ending, does not start: their leases
    /// last until its connection ends, and the server puts their jobs back into the queue then.
    pub(super) fn attempt_refs(&self) -> Vec<AttemptRef> {
        self.attempts.values().map(|a| a.attempt().clone()).chain(self.given_back.iter().cloned()).collect()
    }

    /// Handles the server's order to start ranks.
    pub(super) fn start(&mut self, mut start: StartAttempt) {
        let key = (start.attempt.fencing_token, (start.attempt.job.clone(), start.attempt.attempt));
        if self.attempts.contains_key(&key) {
            return;
        }
        if self.leaving.is_some() {
            return self.given_back.push(start.attempt);
        }
        let mut no_port = None;
        // With several machines the port is chosen when all of them are ready.
        if start.master_port == 0 && !start.is_shared() {
            match free_port(&start.master_addr) {
                Ok(port) => start.master_port = port,
                Err(error) => {
                    no_port = Some(format!("{} has no free port for them: {error}", start.master_addr))
                }
            }
        }
        let mut context = self.context.clone();
        let mapped = self.datasets.mapped(&start.spec.data.dataset, &start.dataset_path);
        let is_mapped = mapped.is_some();
        if let Some(here) = mapped {
            start.dataset_path = here.to_string_lossy().into_owned();
            // Whoever runs the agent decides where it is.
            start.files.dataset_in = None;
            // An option says where the dataset is, so it is not copied.
            context.copies = None;
        }
        if let Some(network) = &mut start.network {
            network.named_by = Some(self.network.named_by().to_owned());
        }
        let (mut stored, made) = place::place(&self.state_dir, start);
        if !is_mapped && !place::is_own_disk(&stored) {
            // The server's own files, which may have changed since they were registered.
            stored.start.files.registered = None;
        }
        // Ranks that are not recorded on disk could not be adopted after this process ends.
        if let Err(error) = made.and_then(|()| self.state_dir.store(&stored)) {
            self.given_back.push(stored.start.attempt);
            return self.give_up(error);
        }
        let refusal = no_port.map(Refusal::other);
        tracing::info!(job = %stored.start.attempt.job, attempt = stored.start.attempt.attempt, ranks = stored.start.ranks.len(), "starting");
        self.only_job_failed = false;
        self.only_job_over = None;
        self.take(Attempt::start(stored, refusal, context));
    }

    /// Ends the agent in order because its folder cannot be written. Otherwise it would fail one job after the other, each of which another
    /// agent can start. The server puts its jobs back into the queue.
    fn give_up(&mut self, error: std::io::Error) {
        let folder = self.state_dir.dir().display();
        tracing::error!(%folder, %error, "the folder cannot be written: this agent ends, and its jobs go back to the queue");
        self.leave(format!("its folder {folder} cannot be written"));
        self.unwritable = Some(StateDirError::Unwritable { path: self.state_dir.dir().to_owned(), error });
    }

    /// Ends the agent in order: notifies the server, and ranks write a checkpoint.
    pub(super) fn leave(&mut self, reason: String) {
        self.leaving = Some(Shutdown { reason, announced: false, ranks_gone: None });
        for attempt in self.attempts.values() {
            attempt.order(Order::Leave);
        }
    }

    /// A job is over or was deleted. An agent that serves only this job has nothing to wait for, also if it never ran an attempt of it.
    pub(super) fn job_is_final(&mut self, job: &JobId) {
        if self.only_job.as_ref() == Some(job) {
            self.only_job_is_final.get_or_insert_with(Instant::now);
        }
    }

    /// Drops an attempt that is over, once the server has all of its records or refuses them.
    pub(super) fn forget(&mut self, attempt: &AttemptRef) {
        let key = (attempt.fencing_token, (attempt.job.clone(), attempt.attempt));
        if let Some(attempt) = self.attempts.remove(&key) {
            if self.only_job.as_ref() == Some(&attempt.attempt().job) {
                self.only_job_failed = attempt.has_failed();
                self.only_job_is_shared = attempt.stored().start.is_shared();
                self.only_job_over = Some(Instant::now());
            }
            self.state_dir.forget(attempt.attempt());
        }
    }

    /// While no server takes them, records stay on this machine's disk, up to a limit.
    pub(super) fn measure_spool(&mut self) {
        if self.measured.elapsed() < MEASURE_EVERY {
            return;
        }
        self.measured = Instant::now();
        let size = |a: &Attempt| {
            let dir = a.stored().attempt_dir();
            let ranks =
                a.stored().start.ranks.iter().map(|(rank, _)| crate::report::events_path(&dir, *rank));
            ranks.filter_map(|path| path.metadata().ok()).map(|m| m.len()).sum::<u64>()
        };
        let bytes: u64 = self.attempts.values().map(size).sum();
        if bytes > self.spool_bytes {
            let facts = Facts { agent: Some(self.name.clone()), size_bytes: Some(bytes), ..Facts::default() };
            let reason = Reason::new(ReasonCode::SpoolFull, facts);
            tracing::error!(%reason, "the ranks keep a checkpoint and end");
            for attempt in self.attempts.values().filter(|a| !a.is_over()) {
                attempt.order(Order::Full(reason.clone()));
            }
        }
    }
}
