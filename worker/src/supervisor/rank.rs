//! A supervisor's view of one rank: its process and its records.

use super::{
    cause::{Failure, RankEnd},
    launch::rank_file,
    process::RankProcess,
};
use crate::{
    rank::{EXIT_FINISHED, EXIT_PAUSED},
    report::{Tail, TailError, events_path},
};
use lockstep_host::files;
use lockstep_protocol::agent::AttemptEvent;
use std::{
    path::{Path, PathBuf},
    time::Instant,
};

/// How much of an ended rank's standard error is shown in addition to its log.
const MAX_STDERR_LINES: usize = 20;
const MAX_STDERR_BYTES: u64 = 64 << 10;
const MAX_STDERR_LINE_BYTES: usize = 4096;

/// Stores records of a rank for a supervisor's caller. The supervisor itself stores only a [`RankEnd`].
pub trait RecordSink {
    /// Receives each record of the rank, in order.
    fn record(&mut self, event: AttemptEvent);
}

/// Stores all records, until the caller takes them.
impl RecordSink for Vec<AttemptEvent> {
    fn record(&mut self, event: AttemptEvent) {
        self.push(event);
    }
}

pub struct Rank<N> {
    pub process: RankProcess,
    attempt_dir: PathBuf,
    tail: Tail,
    pub end: RankEnd,
    /// When the rank last recorded anything.
    pub last_report: Instant,
    /// Where the caller stores the rank's records.
    pub sink: N,
    /// Describes the damage if the records are damaged and cannot be read any further.
    pub damage: Option<String>,
}

impl<N: RecordSink> Rank<N> {
    pub fn of_attempt(process: RankProcess, attempt_dir: &Path, sink: N) -> Self {
        let tail = Tail::open(&events_path(attempt_dir, process.rank), 0);
        let end = RankEnd { rank: process.rank, ..RankEnd::default() };
        let attempt_dir = attempt_dir.to_owned();
        Self { process, attempt_dir, tail, end, last_report: Instant::now(), sink, damage: None }
    }

    /// Reads the new records of the rank.
    ///
    /// # Errors
    /// The records cannot be read. If they are damaged, every further call returns this error.
    pub fn read(&mut self) -> Result<(), TailError> {
        loop {
            match self.tail.poll() {
                Ok(events) if events.is_empty() => return Ok(()),
                Ok(events) => {
                    self.last_report = Instant::now();
                    for event in events {
                        self.end.record(&event);
                        self.sink.record(event);
                    }
                }
                Err(error) => {
                    if matches!(error, TailError::Damaged { .. }) {
                        self.damage = Some(error.to_string());
                    }
                    return Err(error);
                }
            }
        }
    }

    /// Checks whether the process has ended. The last records are read before the end is reported.
    pub fn poll(&mut self) {
        if self.end.exit.is_none()
            && let Some(exit) = self.process.poll()
        {
            // An error is ignored here, because the next call of `read` returns it.
            let _ = self.read();
            self.end.exit = Some(exit);
            let stderr = self.stderr_text();
            self.end.last_stderr_line = last_lines(&stderr).pop();
            self.end.has_run_out_of_memory = stderr.contains("memory allocation of");
        }
    }

    /// The last lines printed outside the log.
    pub fn stderr_lines(&self) -> Vec<String> {
        last_lines(&self.stderr_text())
    }

    /// The end of the output outside the log.
    fn stderr_text(&self) -> String {
        let path = rank_file(&self.attempt_dir, self.end.rank, "stderr");
        String::from_utf8_lossy(&files::read_end(&path, MAX_STDERR_BYTES)).into_owned()
    }
}

/// The last non-empty lines of a text, truncated to the limits.
fn last_lines(text: &str) -> Vec<String> {
    let lines: Vec<_> = text.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    let truncate = |line: &&str| line[..line.floor_char_boundary(MAX_STDERR_LINE_BYTES)].to_owned();
    lines[lines.len().saturating_sub(MAX_STDERR_LINES)..].iter().map(truncate).collect()
}

impl RankEnd {
    /// Updates the rank's progress and failure from a record.
    fn record(&mut self, event: &AttemptEvent) {
        let step = &mut self.step;
        match event {
            AttemptEvent::Running { start_step, .. } => *step = (*step).max(*start_step),
            AttemptEvent::Metrics { columns, .. } => {
                *step = columns.iter().filter_map(|c| c.steps.last().copied()).fold(*step, u64::max);
            }
            AttemptEvent::Rank { report, .. } => {
                *step = (*step).max(report.step);
                self.recorded_status = match report.status.as_str() {
                    "finished" => Some(EXIT_FINISHED),
                    "paused" => Some(EXIT_PAUSED),
                    _ => None,
                };
            }
            AttemptEvent::RankFailed { step: last_step, reason, code, retriable, secondary, .. } => {
                *step = (*step).max(*last_step);
                let (reason, code) = (reason.clone(), *code);
                let (retriable, secondary) = (*retriable, *secondary);
                self.failure.get_or_insert(Failure { reason, code, retriable, secondary });
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_twenty_lines_of_stderr_are_shown() {
        let text = |lines: usize| (1..=lines).map(|n| format!("line {n}  \n\n")).collect::<String>();
        let all: Vec<_> = (1..=20).map(|n| format!("line {n}")).collect();
        assert_eq!(last_lines(&text(20)), all);
        assert_eq!(last_lines(&text(21))[..], [&all[1..], &["line 21".to_owned()]].concat());
        for (bytes, shown) in [(4096, 4096), (4097, 4096)] {
            assert_eq!(last_lines(&"x".repeat(bytes))[0].len(), shown);
        }
    }
}
