//! A rank's reports to its agent: a file of records. One process appends records, and other processes read them from any record
//! onwards.
//! Because the reports are in a file, nothing is lost or reported twice, whichever process dies.
//!
//! A record is `u32` length, `u32` CRC-32 of the payload (both little-endian), then the payload: an
//! [`AttemptEvent`] as MessagePack with named fields. The log lines are also in a text file next to it.

use jiff::Timestamp;
use lockstep_host::{lock, with_path};
use lockstep_protocol::{
    agent::{AttemptEvent, LogLine},
    metric::MetricColumn,
};
use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, MutexGuard},
    thread::JoinHandle,
    time::{Duration, Instant},
};

mod sampler;
mod tail;

pub(crate) use sampler::Sampler;
pub use tail::{Tail, TailError};

/// How long a point or a line may wait before it is written, so that several are written together. A live chart is
/// still updated 50 times per second, and a fast job does not write a record per point.
const FLUSH_AFTER: Duration = Duration::from_millis(20);
/// Number of pending points and lines from which on they are written at once.
const FLUSH_AT: usize = 4096;
/// Maximum length of a log line in bytes, as documented for `LogLine`.
const MAX_LINE_BYTES: usize = 4096;
/// Maximum size of a record's payload. A larger record is considered damaged.
const MAX_RECORD_BYTES: u32 = 64 << 20;
const HEADER_BYTES: usize = 8;

/// The file of records of `rank` in an attempt's folder.
pub fn events_path(attempt_dir: &Path, rank: u32) -> PathBuf {
    attempt_dir.join(format!("rank.{rank}.events"))
}

/// The writer of a file of records. A file has only one writer.
#[derive(Debug)]
pub struct Records {
    file: File,
    path: PathBuf,
    /// The size of the complete records in the file.
    length: u64,
    /// Records that could not be written yet (the disk may be full for a while).
    pending: Vec<u8>,
}

impl Records {
    /// Opens or creates the file for appending. An incomplete last record, left by a killed writer, is removed.
    ///
    /// # Errors
    /// The file cannot be opened, or is damaged before its end ([`io::ErrorKind::InvalidData`]).
    pub fn append_to(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).append(true).create(true).open(path)?;
        let mut tail = Tail::open(path, 0);
        loop {
            match tail.poll() {
                Ok(events) if events.is_empty() => break,
                Ok(_) => {}
                Err(TailError::Io { error, .. }) => return Err(error),
                Err(damage) => return Err(io::Error::new(io::ErrorKind::InvalidData, damage)),
            }
        }
        file.set_len(tail.offset())?;
        Ok(Self { file, path: path.into(), length: tail.offset(), pending: Vec::new() })
    }

    /// Appends a record.
    ///
    /// # Errors
    /// The file cannot be written. The record stays pending and is written before the next record.
    pub fn append(&mut self, event: &AttemptEvent) -> io::Result<()> {
        let payload = lockstep_protocol::wire::encode(event).map_err(io::Error::other)?;
        let length = u32::try_from(payload.len()).ok().filter(|l| *l <= MAX_RECORD_BYTES);
        let length = length.ok_or_else(|| io::Error::other("a record of more than 64 MiB"))?;
        self.pending.extend_from_slice(&length.to_le_bytes());
        self.pending.extend_from_slice(&crc32fast::hash(&payload).to_le_bytes());
        self.pending.extend_from_slice(&payload);
        self.retry()
    }

    /// Writes the records that could not be written before.
    ///
    /// # Errors
    /// The file still cannot be written.
    pub fn retry(&mut self) -> io::Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        match self.file.write_all(&self.pending) {
            Ok(()) => {
                self.length += self.pending.len() as u64;
                self.pending.clear();
                Ok(())
            }
            Err(error) => {
                // An incomplete record must not stay in the middle of the file.
                self.file.set_len(self.length)?;
                Err(with_path(&self.path, error))
            }
        }
    }

    /// Syncs the written records, so that they survive a power failure.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn sync(&mut self) -> io::Result<()> {
        self.retry()?;
        self.file.sync_data()
    }
}

pub trait Observer: Send + Sync {
    /// A point of a metric, whose name is in [`lockstep_protocol::metric::NAMES`]. NaN and infinities both arrive as
    /// NaN.
    fn metric(&self, name: &str, step: u64, value: f32);
    /// A log line, or several if `line` contains line feeds. Lines are truncated to 4096 bytes.
    fn log(&self, line: &str);
    /// Any other event. It is written at once, after everything that came before it.
    fn event(&self, event: &AttemptEvent);
}

/// A rank's reporter: writes metrics, log lines and events, in the order of the calls.
///
/// Metrics and lines are collected, and written by a separate thread after at most 20 ms. While the disk is full, they
/// stay in memory, and [`Reporter::flush`] returns an error.
#[derive(Debug)]
pub struct Reporter {
    shared: Arc<Shared>,
    flusher: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    /// A thread that panics with the lock leaves only complete columns and lines behind. The state is still used,
    /// because the panic must be reported.
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Debug)]
struct State {
    rank: u32,
    records: Records,
    log: File,
    pending_log: Vec<u8>,
    columns: Vec<MetricColumn>,
    lines: Vec<LogLine>,
    line_count: u64,
    /// When the oldest entry of `columns` and `lines` was added. `None` if both are empty.
    pending_since: Option<Instant>,
    is_closed: bool,
}

impl Reporter {
    /// Creates the files `rank.<rank>.events` and `rank.<rank>.log` in `attempt_dir`.
    ///
    /// # Errors
    /// The files already exist (a rank of an attempt runs only once), or cannot be created.
    pub fn create(attempt_dir: &Path, rank: u32) -> io::Result<Self> {
        let events = events_path(attempt_dir, rank);
        File::create_new(&events).map_err(|e| with_path(&events, e))?;
        let records = Records::append_to(&events).map_err(|e| with_path(&events, e))?;
        let log = attempt_dir.join(format!("rank.{rank}.log"));
        let log = OpenOptions::new().append(true).create(true).open(&log).map_err(|e| with_path(&log, e))?;
        let state = State {
            rank,
            records,
            log,
            pending_log: Vec::new(),
            columns: Vec::new(),
            lines: Vec::new(),
            line_count: 0,
            pending_since: None,
            is_closed: false,
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), wake: Condvar::new() });
        let flusher = std::thread::Builder::new().name("report".into()).spawn({
            let shared = shared.clone();
            move || flush_in_time(&shared)
        })?;
        Ok(Self { shared, flusher: Some(flusher) })
    }

    /// Writes all pending reports.
    ///
    /// # Errors
    /// The file cannot be written (the disk is full or gone). Reports stay pending, and later calls retry.
    pub fn flush(&self) -> io::Result<()> {
        lock(&self.shared.state).flush()
    }

    fn flush_or_wake(&self, mut state: MutexGuard<'_, State>) {
        let pending = state.lines.len() + state.columns.iter().map(|c| c.steps.len()).sum::<usize>();
        if pending >= FLUSH_AT {
            log_error(state.flush());
        } else if state.pending_since.is_none() && pending > 0 {
            state.pending_since = Some(Instant::now());
            self.shared.wake.notify_one();
        }
    }
}

impl Observer for Reporter {
    fn metric(&self, name: &str, step: u64, value: f32) {
        let mut state = lock(&self.shared.state);
        match state.columns.iter_mut().find(|c| c.name == name) {
            Some(column) => {
                column.steps.push(step);
                column.values.push(value);
            }
            None => {
                state.columns.push(MetricColumn {
                    name: name.into(),
                    steps: vec![step],
                    values: vec![value],
                });
            }
        }
        self.flush_or_wake(state);
    }
    fn log(&self, text: &str) {
        let mut state = lock(&self.shared.state);
        for line in text.lines() {
            let line = &line[..line.floor_char_boundary(MAX_LINE_BYTES)];
            state.pending_log.extend_from_slice(line.as_bytes());
            state.pending_log.push(b'\n');
            state.line_count += 1;
            let number = state.line_count;
            state.lines.push(LogLine { number, at: Timestamp::now(), text: line.into() });
        }
        self.flush_or_wake(state);
    }
    fn event(&self, event: &AttemptEvent) {
        let mut state = lock(&self.shared.state);
        let flushed = state.flush();
        let written = state.records.append(event);
        log_error(flushed.and(written));
    }
}

impl Drop for Reporter {
    /// Writes all pending reports and syncs them, so that they survive a power failure.
    fn drop(&mut self) {
        let Some(flusher) = self.flusher.take() else { return };
        {
            let mut state = lock(&self.shared.state);
            state.is_closed = true;
            self.shared.wake.notify_one();
            log_error(state.flush().and_then(|()| state.records.sync()));
        }
        let _ = flusher.join();
    }
}

impl State {
    fn flush(&mut self) -> io::Result<()> {
        self.pending_since = None;
        let rank = self.rank;
        // The text is written first, so that the log file is never behind the page.
        let logged = match self.log.write(&self.pending_log) {
            Ok(written) => {
                self.pending_log.drain(..written);
                Ok(())
            }
            Err(error) => Err(error),
        };
        let mut recorded = Ok(());
        if !self.columns.is_empty() {
            let columns = std::mem::take(&mut self.columns);
            recorded = self.records.append(&AttemptEvent::Metrics { rank, columns });
        }
        if !self.lines.is_empty() {
            let lines = std::mem::take(&mut self.lines);
            recorded = recorded.and(self.records.append(&AttemptEvent::Log { rank, lines }));
        }
        recorded.and(self.records.retry()).and(logged)
    }
}

/// Logs an error to the rank's stderr, a file that the agent shows if the rank dies.
fn log_error(result: io::Result<()>) {
    if let Err(error) = result {
        tracing::warn!(%error, "reports cannot be written yet");
    }
}

fn flush_in_time(shared: &Shared) {
    let mut state = lock(&shared.state);
    while !state.is_closed {
        let wait = match state.pending_since {
            None => Duration::from_secs(3600),
            Some(since) => FLUSH_AFTER.saturating_sub(since.elapsed()),
        };
        if wait.is_zero() {
            log_error(state.flush());
            continue;
        }
        state = match shared.wake.wait_timeout(state, wait) {
            Ok((state, _)) => state,
            Err(poisoned) => poisoned.into_inner().0,
        };
    }
}

/// Decides which steps get a loss line in the log (`log.every_steps`).
#[derive(Debug)]
pub struct LossLines {
    every_steps: u64,
    /// When the last line was due by time.
    last_line_at: Option<Instant>,
}

impl LossLines {
    /// The rule of a job: every `every_steps`-th step or, if `every_steps` is 0, at most 10 lines per second and the last step of
    /// each epoch.
    pub fn new(every_steps: u64) -> Self {
        Self { every_steps, last_line_at: None }
    }

    /// The line of a step. `None` if the step gets no line. `step` counts from the beginning of the run.
    pub fn line_if_due(&mut self, epoch: u32, step: u64, steps_per_epoch: u64, loss: f32) -> Option<String> {
        let is_due = match self.every_steps {
            0 => {
                let now = Instant::now();
                let is_pause_over = self.last_line_at.is_none_or(|at| now - at >= Duration::from_millis(100));
                if is_pause_over {
                    self.last_line_at = Some(now);
                }
                is_pause_over || step.is_multiple_of(steps_per_epoch)
            }
            n => step.is_multiple_of(n),
        };
        is_due.then(|| format!("epoch: {epoch} step: {step}, loss is {loss}"))
    }
}

#[cfg(test)]
mod tests;
