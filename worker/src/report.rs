//! A rank's reports to its agent: a file of records that one process appends and others read from any record on. The file is
//! the spool: whichever process dies, nothing is lost or reported twice.
//!
//! A record is `u32` length, `u32` CRC-32 of the payload (both little-endian), then the payload: an
//! [`AttemptEvent`] as MessagePack with named fields. The same log lines are in a text file next to it.

use jiff::Timestamp;
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

/// How long a point or a line may wait for others before it is written: a live chart moves at
/// 50 frames a second, and a fast job does not write a record a point.
const FLUSH_AFTER: Duration = Duration::from_millis(20);
/// Points and lines that are written without waiting further.
const FLUSH_AT: usize = 4096;
/// Longest text of a log line, in bytes; `LogLine` promises it.
const LONGEST_LINE: usize = 4096;
/// A longer record counts as damage.
const LONGEST_RECORD: u32 = 64 << 20;
const HEADER: usize = 8;

/// The file of records of `rank` in an attempt's folder.
pub fn events_path(attempt_dir: &Path, rank: u32) -> PathBuf {
    attempt_dir.join(format!("rank.{rank}.events"))
}

/// The plain text log of `rank` in an attempt's folder.
pub fn log_path(attempt_dir: &Path, rank: u32) -> PathBuf {
    attempt_dir.join(format!("rank.{rank}.log"))
}

/// A file of records, for its one writer.
#[derive(Debug)]
pub struct Records {
    file: File,
    path: PathBuf,
    /// Bytes of whole records in the file.
    length: u64,
    /// Records that the disk has not taken yet (it may be full for a while).
    pending: Vec<u8>,
}

impl Records {
    /// Opens or creates the file to append to it. A torn last record, left by a writer that was
    /// killed, is cut off.
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
    /// The disk does not take it: it is kept and written before the next record.
    pub fn append(&mut self, event: &AttemptEvent) -> io::Result<()> {
        let payload = lockstep_protocol::wire::encode(event).map_err(io::Error::other)?;
        let length = u32::try_from(payload.len()).ok().filter(|l| *l <= LONGEST_RECORD);
        let length = length.ok_or_else(|| io::Error::other("a record of more than 64 MiB"))?;
        self.pending.extend_from_slice(&length.to_le_bytes());
        self.pending.extend_from_slice(&crc32fast::hash(&payload).to_le_bytes());
        self.pending.extend_from_slice(&payload);
        self.retry()
    }

    /// Writes what the disk did not take before.
    ///
    /// # Errors
    /// It still does not take it.
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
                // Half a record must not stay in the middle of the file.
                self.file.set_len(self.length)?;
                Err(io::Error::new(error.kind(), format!("{}: {error}", self.path.display())))
            }
        }
    }

    /// Syncs what is written, so that it survives a power failure.
    ///
    /// # Errors
    /// The disk does not take it.
    pub fn sync(&mut self) -> io::Result<()> {
        self.retry()?;
        self.file.sync_data()
    }
}

/// Receives what a rank reports while it trains.
pub trait Observer: Send + Sync {
    /// A point of a metric (a name of [`lockstep_protocol::metric::NAMES`]). NaN and infinities are kept: both arrive as NaN.
    fn metric(&self, name: &str, step: u64, value: f32);
    /// A line for people; several when `line` has several. Longer ones are cut at 4096 bytes.
    fn log(&self, line: &str);
    /// Anything else, after what came before it; written at once.
    fn event(&self, event: &AttemptEvent);
}

/// A rank's reporter: metrics, log lines and events, in the order in which they were given.
///
/// Metrics and lines are gathered and written at most 20 ms late by a thread of its own. A disk that
/// is full for a while delays them; [`Reporter::flush`] says so.
#[derive(Debug)]
pub struct Reporter {
    shared: Arc<Shared>,
    flusher: Option<JoinHandle<()>>,
    rank: u32,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Debug)]
struct State {
    rank: u32,
    records: Records,
    log: File,
    log_pending: Vec<u8>,
    columns: Vec<MetricColumn>,
    lines: Vec<LogLine>,
    lines_so_far: u64,
    /// When the oldest of `columns` and `lines` came in.
    since: Option<Instant>,
    closed: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic of another thread leaves whole columns and whole lines behind. Continue: the reason of that panic has to be
        // reported.
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Reporter {
    /// Starts the files `rank.<rank>.events` and `rank.<rank>.log` in `attempt_dir`.
    ///
    /// # Errors
    /// The files exist already (a rank of an attempt runs once) or cannot be made.
    pub fn create(attempt_dir: &Path, rank: u32) -> io::Result<Self> {
        let naming = |path: &Path, e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
        let events = events_path(attempt_dir, rank);
        File::create_new(&events).map_err(|e| naming(&events, e))?;
        let records = Records::append_to(&events).map_err(|e| naming(&events, e))?;
        let log = log_path(attempt_dir, rank);
        let log = OpenOptions::new().append(true).create(true).open(&log).map_err(|e| naming(&log, e))?;
        let state = State {
            rank,
            records,
            log,
            log_pending: Vec::new(),
            columns: Vec::new(),
            lines: Vec::new(),
            lines_so_far: 0,
            since: None,
            closed: false,
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), wake: Condvar::new() });
        let flusher = std::thread::Builder::new().name("report".into()).spawn({
            let shared = shared.clone();
            move || flush_in_time(&shared)
        })?;
        Ok(Self { shared, flusher: Some(flusher), rank })
    }

    /// The rank that reports.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Writes all that waits.
    ///
    /// # Errors
    /// The disk does not take it (full, gone): it stays waiting and later calls try again.
    pub fn flush(&self) -> io::Result<()> {
        self.shared.lock().flush()
    }

    /// Writes all that waits and syncs it, so that it survives a power failure.
    ///
    /// # Errors
    /// As [`Reporter::flush`].
    pub fn close(mut self) -> io::Result<()> {
        self.stop()
    }

    fn noted(&self, mut state: MutexGuard<'_, State>) {
        let waiting = state.lines.len() + state.columns.iter().map(|c| c.steps.len()).sum::<usize>();
        if waiting >= FLUSH_AT {
            complain(state.flush());
        } else if state.since.is_none() && waiting > 0 {
            state.since = Some(Instant::now());
            self.shared.wake.notify_one();
        }
    }

    fn stop(&mut self) -> io::Result<()> {
        let Some(flusher) = self.flusher.take() else { return Ok(()) };
        let result = {
            let mut state = self.shared.lock();
            state.closed = true;
            self.shared.wake.notify_one();
            state.flush().and_then(|()| state.records.sync())
        };
        let _ = flusher.join();
        result
    }
}

impl Observer for Reporter {
    fn metric(&self, name: &str, step: u64, value: f32) {
        let mut state = self.shared.lock();
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
        self.noted(state);
    }
    fn log(&self, text: &str) {
        let mut state = self.shared.lock();
        for line in text.lines() {
            let line = &line[..line.floor_char_boundary(LONGEST_LINE)];
            state.log_pending.extend_from_slice(line.as_bytes());
            state.log_pending.push(b'\n');
            state.lines_so_far += 1;
            let number = state.lines_so_far;
            state.lines.push(LogLine { number, at: Timestamp::now(), text: line.into() });
        }
        self.noted(state);
    }
    fn event(&self, event: &AttemptEvent) {
        let mut state = self.shared.lock();
        let flushed = state.flush();
        let written = state.records.append(event);
        complain(flushed.and(written));
    }
}

impl Drop for Reporter {
    fn drop(&mut self) {
        complain(self.stop());
    }
}

impl State {
    fn flush(&mut self) -> io::Result<()> {
        self.since = None;
        let rank = self.rank;
        // The text first: the file a person reads is never behind the page.
        let logged = match self.log.write(&self.log_pending) {
            Ok(written) => {
                self.log_pending.drain(..written);
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

/// The rank's stderr is a file that its agent shows when the rank dies.
fn complain(result: io::Result<()>) {
    if let Err(error) = result {
        tracing::warn!(%error, "reports wait for the disk");
    }
}

fn flush_in_time(shared: &Shared) {
    let mut state = shared.lock();
    while !state.closed {
        let wait = match state.since {
            None => Duration::from_secs(3600),
            Some(since) => FLUSH_AFTER.saturating_sub(since.elapsed()),
        };
        if wait.is_zero() {
            complain(state.flush());
            continue;
        }
        state = match shared.wake.wait_timeout(state, wait) {
            Ok((state, _)) => state,
            Err(poisoned) => poisoned.into_inner().0,
        };
    }
}

/// Which steps get a loss line in the log (`log.every_steps`).
#[derive(Debug)]
pub struct LossLines {
    every_steps: u64,
    last: Option<Instant>,
}

impl LossLines {
    /// The rule of a job: 0 is at most 10 a second and the last of each epoch, n every n-th step.
    pub fn new(every_steps: u64) -> Self {
        Self { every_steps, last: None }
    }

    /// The line of a step, which counts from the run's beginning as it does everywhere else, if it gets one.
    pub fn line(&mut self, epoch: u32, step: u64, steps_per_epoch: u64, loss: f32) -> Option<String> {
        let due = match self.every_steps {
            0 => {
                let now = Instant::now();
                let rested = self.last.is_none_or(|last| now - last >= Duration::from_millis(100));
                if rested {
                    self.last = Some(now);
                }
                rested || step.is_multiple_of(steps_per_epoch)
            }
            n => step.is_multiple_of(n),
        };
        due.then(|| format!("epoch: {epoch} step: {step}, loss is {loss}"))
    }
}

#[cfg(test)]
mod tests;
