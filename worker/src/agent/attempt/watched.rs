//! One rank of an attempt, as its agent sees it: its process and what it records.

use super::super::{
    salvage::Told,
    verdict::{Failure, RankEnd},
};
use crate::{
    launch::{RankProcess, rank_file},
    report::{Tail, TailError, events_path},
};
use lockstep_protocol::agent::AttemptEvent;
use std::{fs, path::Path, time::Instant};

/// What is shown of what a dead rank printed outside its log.
const STDERR_LINES: usize = 20;
const STDERR_BYTES: usize = 64 << 10;

/// What is watched of a rank.
pub(super) struct Watched {
    pub(super) process: RankProcess,
    tail: Tail,
    pub(super) end: RankEnd,
    pub(super) last_news: Instant,
    /// Lines of its log so far.
    pub(super) lines: u64,
    pub(super) told: Told,
    pub(super) unreadable: Option<String>,
}

impl Watched {
    pub(super) fn new(process: RankProcess, dir: &Path) -> Self {
        let rank = process.rank();
        Self {
            process,
            tail: Tail::open(&events_path(dir, rank), 0),
            end: RankEnd { rank, ..RankEnd::default() },
            last_news: Instant::now(),
            lines: 0,
            told: Told::default(),
            unreadable: None,
        }
    }

    /// Reads what the rank has recorded since.
    pub(super) fn read(&mut self) {
        loop {
            match self.tail.poll() {
                Ok(events) if events.is_empty() => return,
                Ok(events) => {
                    self.last_news = Instant::now();
                    events.iter().for_each(|event| self.note(event));
                }
                Err(error) => {
                    if matches!(error, TailError::Damaged { .. }) {
                        self.unreadable = Some(error.to_string());
                    }
                    return;
                }
            }
        }
    }

    fn note(&mut self, event: &AttemptEvent) {
        self.told.note(event);
        let step = &mut self.end.step;
        match event {
            AttemptEvent::Running { start_step, .. } => *step = (*step).max(*start_step),
            AttemptEvent::Metrics { columns, .. } => {
                *step = columns.iter().filter_map(|c| c.steps.last().copied()).fold(*step, u64::max);
            }
            AttemptEvent::Log { lines, .. } => {
                self.lines = lines.iter().map(|l| l.number).fold(self.lines, u64::max);
            }
            AttemptEvent::Rank { report, .. } => {
                *step = (*step).max(report.step);
                self.end.finished |= report.status == "finished";
            }
            AttemptEvent::RankFailed { step: at, reason, code, retriable, secondary, .. } => {
                *step = (*step).max(*at);
                let (reason, code) = (reason.clone(), code.clone());
                let (retriable, secondary) = (*retriable, *secondary);
                self.end.failure.get_or_insert(Failure { reason, code, retriable, secondary });
            }
            _ => {}
        }
    }

    /// Looks whether the process has ended; its last words are read before that is believed.
    pub(super) fn look(&mut self, dir: &Path) {
        if self.end.exit.is_none()
            && let Some(exit) = self.process.poll()
        {
            self.read();
            self.end.exit = Some(exit);
            self.end.last_stderr_line = stderr_lines(dir, self.end.rank).pop();
            self.end.no_memory = stderr_text(dir, self.end.rank).contains("memory allocation of");
        }
    }
}

/// The end of what a rank printed outside its log.
fn stderr_text(dir: &Path, rank: u32) -> String {
    let bytes = fs::read(rank_file(dir, rank, "stderr")).unwrap_or_default();
    String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(STDERR_BYTES)..]).into_owned()
}

/// The last lines of what a rank printed outside its log.
pub(super) fn stderr_lines(dir: &Path, rank: u32) -> Vec<String> {
    let text = stderr_text(dir, rank);
    let lines: Vec<_> = text.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    let cut = |line: &&str| line[..line.floor_char_boundary(4096)].to_owned();
    lines[lines.len().saturating_sub(STDERR_LINES)..].iter().map(cut).collect()
}
