//! The end of an attempt: verifies that no process of its ranks is left, and writes the last records for the server.

use super::{
    agent_events_path,
    watch::{RecordSummary, Watch},
};
use crate::{
    rank::{EXIT_PAUSED, EXIT_STOPPED},
    report::Records,
    supervisor::{Exit, RankEnd, RankGroup},
};
use lockstep_protocol::{
    agent::{AttemptEvent, CheckpointInfo, Ending, LogLine},
    reason::ReasonKind,
};
use std::{fs, io, path::Path, time::Duration};

impl Watch {
    /// Writes the remaining records after every rank has ended. The last record tells how the attempt ended.
    pub(super) async fn conclude(self, mut ranks: RankGroup<RecordSummary>) {
        for rank in &mut ranks.ranks {
            // An error is ignored here, because `damage` is reported below.
            let _ = rank.read();
        }
        let survivors = ranks.kill_remaining().await;
        let unreported = self.unreported_checkpoints(&ranks).await;

        let mut events = Vec::new();
        for watched in &ranks.ranks {
            let rank = watched.end.rank;
            let mut texts = Vec::new();
            if !watched.end.is_success()
                && !matches!(watched.end.exit(), Some(Exit::Status(EXIT_STOPPED | EXIT_PAUSED)))
            {
                texts = watched.stderr_lines();
            }
            texts.extend(watched.damage.clone());
            if rank == 0 {
                let describe = |c: &CheckpointInfo| {
                    format!("checkpoint {}-{} was written while the rank ended", c.epoch, c.step)
                };
                texts.extend(unreported.iter().map(describe));
            }
            if rank == 0 && matches!(self.decided, Some(Ending::Stopped)) {
                texts.extend(watched.sink.reported.describe_lost_steps(watched.end.step, &unreported));
            }
            if !texts.is_empty() {
                let at = jiff::Timestamp::now();
                let line = |(number, text)| LogLine { number, at, text };
                let lines = (watched.sink.lines + 1..).zip(texts).map(line).collect();
                events.push(AttemptEvent::Log { rank, lines });
            }
        }
        events.extend(unreported.into_iter().map(AttemptEvent::Checkpoint));

        let ends: Vec<_> = ranks.ends().cloned().collect();
        let ending = if self.decided.is_none() && !ends.is_empty() && ends.iter().all(RankEnd::has_paused) {
            Ending::Stopped
        } else if !ends.is_empty() && ends.iter().all(RankEnd::is_success) {
            Ending::Succeeded { step: ends.iter().map(|r| r.step).max().unwrap_or(0) }
        } else {
            let unexplained = || Ending::Failed { reason: ReasonKind::Unexplained.into(), retriable: true };
            let is_shared = self.stored.start.is_shared();
            let cause = || {
                let cause = ranks.failure_cause()?;
                Some(match cause.rank.ending() {
                    // The end of a rank on another machine may explain this failure.
                    Ending::Failed { reason, .. } if cause.is_provisional && is_shared => {
                        Ending::Secondary { reason }
                    }
                    ending => ending,
                })
            };
            self.decided.clone().or_else(cause).unwrap_or_else(unexplained)
        };

        let ending = self.add_machine_facts(ending, &ends, survivors);
        tracing::info!(job = %self.stored.start.attempt.job, attempt = self.stored.start.attempt.attempt, "{ending}");
        events.push(AttemptEvent::Ended(ending));
        self.write(&events).await;
    }

    /// Complete checkpoints of this attempt that no rank has reported.
    async fn unreported_checkpoints(&self, ranks: &RankGroup<RecordSummary>) -> Vec<CheckpointInfo> {
        let Some(first) = ranks.ranks.iter().find(|rank| rank.end.rank == 0) else { return Vec::new() };
        let reported = first.sink.reported.clone();
        let recorded_step = ranks.ends().map(|end| end.step).min().unwrap_or(0);
        let directory = self.stored.checkpoints_dir();
        // Checking large checkpoints takes time.
        tokio::task::spawn_blocking(move || reported.unreported(&directory, recorded_step))
            .await
            .unwrap_or_default()
    }

    /// Adds to the reason what only this machine knows, such as an out-of-memory kill.
    fn add_machine_facts(&self, ending: Ending, ends: &[RankEnd], survivors: Option<String>) -> Ending {
        // A rank that has reported its failure may have killed itself.
        let was_killed = |end: &RankEnd| {
            end.exit == Some(Exit::Signal(9)) && !end.was_asked_to_end && end.failure.is_none()
        };
        let has_kernel_killed =
            self.oom_kills.zip(lockstep_host::oom_kills()).is_some_and(|(before, now)| now > before);
        let by_kernel = has_kernel_killed && ends.iter().any(was_killed);
        let has_refused_memory = ends.iter().any(RankEnd::was_refused_memory);
        match (ending, survivors) {
            (ending, Some(survivors)) => {
                let prefix = match ending {
                    Ending::Failed { reason, .. } => format!("{reason}; "),
                    _ => String::new(),
                };
                let (agent, detail) =
                    (lockstep_host::hostname().into(), format!("{prefix}{survivors}").into());
                Ending::Failed { reason: ReasonKind::Unkillable { agent, detail }.into(), retriable: false }
            }
            (Ending::Failed { reason, .. }, None) if by_kernel || has_refused_memory => {
                let how = if by_kernel {
                    "the kernel killed it to free memory"
                } else {
                    "it reached its memory limit (ulimit -v)"
                };
                // The signal that ended the rank named in the reason. A program that cannot allocate memory aborts (signal 6).
                let signal = match reason.kind() {
                    ReasonKind::RankKilled { signal, .. } => *signal,
                    _ if by_kernel => 9,
                    _ => 6,
                };
                let (rank, step) = reason.rank_and_step();
                let detail = format!("{reason}; {how}").into();
                let kind = ReasonKind::OutOfMemory { rank, step, signal: Some(signal), detail };
                Ending::Failed { reason: kind.into(), retriable: false }
            }
            (ending, None) => ending,
        }
    }

    /// Writes the last records. A full disk delays the write, but no record is lost.
    async fn write(&self, events: &[AttemptEvent]) {
        let path = agent_events_path(&self.stored);
        let open = || fs::create_dir_all(self.stored.attempt_dir()).and_then(|()| Records::append_to(&path));
        let mut records = retry(&path, open).await;
        for event in events {
            // `records` keeps bytes that cannot be written now, and writes them in the next call.
            if let Err(error) = records.append(event) {
                tracing::warn!(%error, path = %path.display(), "a record of the end of an attempt is not written yet");
            }
        }
        retry(&path, || records.sync()).await;
    }
}

/// Calls `write`, which writes to `path`, once a second until it succeeds.
async fn retry<T>(path: &Path, mut write: impl FnMut() -> io::Result<T>) -> T {
    let mut failures = 0_u64;
    loop {
        match write() {
            Ok(written) => {
                if failures > 0 {
                    tracing::info!(failures, path = %path.display(), "the file with the end of an attempt can be written again");
                }
                return written;
            }
            Err(error) => {
                if failures == 0 {
                    tracing::error!(%error, path = %path.display(), "the end of an attempt cannot be written; retrying every second");
                }
                failures += 1;
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        }
    }
}
