//! What a rank has to say, on its way to the agent: a file of records that one process appends and
//! others read from any record on. The file is the spool: whoever dies, nothing is lost or told twice.
//!
//! A record is `u32` length, `u32` CRC-32 of the payload (both little-endian), then the payload: an
//! [`AttemptEvent`] as MessagePack with named fields. Beside it the same log lines lie as plain text.

use jiff::Timestamp;
use lockstep_protocol::{
    agent::{AttemptEvent, LogLine},
    metric::MetricColumn,
};
use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, MutexGuard},
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// How long a point or a line may wait for others before it is written: a live chart moves at
/// 50 frames a second, and a fast job does not write a record a point.
const FLUSH_AFTER: Duration = Duration::from_millis(20);
/// Points and lines that are written without waiting further.
const FLUSH_AT: usize = 4096;
/// Longest text of a log line, in bytes; `LogLine` promises it.
const LONGEST_LINE: usize = 4096;
/// A longer record is taken for damage.
const LONGEST_RECORD: u32 = 64 << 20;
/// What [`Tail::poll`] returns at once, so that a message made of it stays small.
const POLL_BYTES: u64 = 1 << 20;
const HEADER: usize = 8;

/// The file of records of `rank` in an attempt's folder.
pub fn events_path(attempt_dir: &Path, rank: u32) -> PathBuf {
    attempt_dir.join(format!("rank.{rank}.events"))
}

/// The plain text log of `rank` in an attempt's folder.
pub fn log_path(attempt_dir: &Path, rank: u32) -> PathBuf {
    attempt_dir.join(format!("rank.{rank}.log"))
}

/// A file of records under the hands of its one writer.
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
        file.set_len(tail.offset)?;
        Ok(Self { file, path: path.into(), length: tail.offset, pending: Vec::new() })
    }

    /// Appends a record.
    ///
    /// # Errors
    /// The disk does not take it: it is kept and written before the next record.
    pub fn append(&mut self, event: &AttemptEvent) -> io::Result<()> {
        let payload = rmp_serde::to_vec_named(event).map_err(io::Error::other)?;
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
    /// It still does not.
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

    /// Makes what is written survive a power failure.
    ///
    /// # Errors
    /// The disk says no.
    pub fn sync(&mut self) -> io::Result<()> {
        self.retry()?;
        self.file.sync_data()
    }
}

/// A rank's pen: metrics, log lines and events, in the order they were given.
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
        // A panic of another thread in here leaves whole columns and whole lines: go on, the
        // reason of that panic has to get out.
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

    /// A point of a metric (a name of [`lockstep_protocol::metric::NAMES`]). NaN and infinities are
    /// kept: both arrive as NaN.
    pub fn metric(&self, name: &str, step: u64, value: f32) {
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

    /// A line of the log; several when `text` has several. Longer ones are cut at 4096 bytes.
    pub fn log(&self, text: &str) {
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

    /// Any other event, after what came before it; written at once.
    pub fn event(&self, event: &AttemptEvent) {
        let mut state = self.shared.lock();
        let flushed = state.flush();
        let written = state.records.append(event);
        complain(flushed.and(written));
    }

    /// Writes all that waits.
    ///
    /// # Errors
    /// The disk does not take it (full, gone): it stays waiting and later calls try again.
    pub fn flush(&self) -> io::Result<()> {
        self.shared.lock().flush()
    }

    /// Writes all that waits and makes it survive a power failure.
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

/// Reads a file of records while it grows.
#[derive(Debug)]
pub struct Tail {
    path: PathBuf,
    file: Option<File>,
    /// Of the next record in the file.
    offset: u64,
    next: u64,
    /// Records below this one are passed over.
    from: u64,
}

/// Why a file of records cannot be read on.
#[derive(Debug, thiserror::Error)]
pub enum TailError {
    /// The file cannot be read.
    #[error("{path}: {error}")]
    Io {
        /// Of the file.
        path: PathBuf,
        /// What the system says.
        error: io::Error,
    },
    /// A record that is followed by others is not what was written.
    #[error("{path}: record {record} at byte {offset} is damaged: {detail}")]
    Damaged {
        /// Of the file.
        path: PathBuf,
        /// Its number, from 0.
        record: u64,
        /// Where it begins.
        offset: u64,
        /// What is wrong with it.
        detail: String,
    },
}

impl Tail {
    /// Reads `path` from record number `from_record` (from 0) on. The file need not exist yet.
    pub fn open(path: &Path, from_record: u64) -> Self {
        Self { path: path.into(), file: None, offset: 0, next: 0, from: from_record }
    }

    /// The number of the record that the next [`Tail::poll`] begins with.
    pub fn next_record(&self) -> u64 {
        self.next.max(self.from)
    }

    /// The records that have come, at most about a mebibyte of them at once; empty when there are
    /// none now. A last record that is not whole yet is left for later.
    ///
    /// # Errors
    /// The file cannot be read, or a record before its end is damaged (after all records before it
    /// were handed out): then every further call says so.
    pub fn poll(&mut self) -> Result<Vec<AttemptEvent>, TailError> {
        let mut events = Vec::new();
        let read = self.read_on(&mut events);
        if read.is_err() {
            // What stands at the path may be another file by the next time (a disk that came back).
            self.file = None;
        }
        match read {
            Err(error) if events.is_empty() => Err(error),
            _ => Ok(events),
        }
    }

    fn read_on(&mut self, events: &mut Vec<AttemptEvent>) -> Result<(), TailError> {
        let path = self.path.clone();
        let io = |error| TailError::Io { path: path.clone(), error };
        let file = match &mut self.file {
            Some(file) => file,
            None => match File::open(&self.path) {
                Ok(file) => self.file.insert(file),
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
                Err(e) => return Err(io(e)),
            },
        };
        let length = file.metadata().map_err(io)?.len();
        let mut read = 0;
        let mut payload = Vec::new();
        while self.offset + HEADER as u64 <= length && read < POLL_BYTES {
            let damaged = |detail: String| TailError::Damaged {
                path: path.clone(),
                record: self.next,
                offset: self.offset,
                detail,
            };
            file.seek(SeekFrom::Start(self.offset)).map_err(io)?;
            let mut header = [0; HEADER];
            if !filled(file.read_exact(&mut header)).map_err(io)? {
                break;
            }
            let [a, b, c, d, e, f, g, h] = header;
            let size = u32::from_le_bytes([a, b, c, d]);
            let crc = u32::from_le_bytes([e, f, g, h]);
            let end = self.offset + HEADER as u64 + u64::from(size);
            if size > LONGEST_RECORD {
                return Err(damaged(format!("it claims {size} bytes")));
            }
            if end > length {
                break;
            }
            payload.resize(size as usize, 0);
            if !filled(file.read_exact(&mut payload)).map_err(io)? {
                break;
            }
            if size == 0 || crc32fast::hash(&payload) != crc {
                // After a power failure a file may end in bytes that were never written.
                if end == length || size == 0 && rest_is_zero(file).map_err(io)? {
                    break;
                }
                return Err(damaged("its checksum does not match".into()));
            }
            if self.next >= self.from {
                events.push(rmp_serde::from_slice(&payload).map_err(|e| damaged(e.to_string()))?);
                read += u64::from(size);
            }
            self.offset = end;
            self.next += 1;
        }
        Ok(())
    }
}

/// Whether all of it was there. A writer whose disk is full takes half a record back, also while it is read.
fn filled(read: io::Result<()>) -> io::Result<bool> {
    match read {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

fn rest_is_zero(file: &mut File) -> io::Result<bool> {
    let mut rest = Vec::new();
    file.read_to_end(&mut rest)?;
    Ok(rest.iter().all(|b| *b == 0))
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

    /// The line of a step (from 1; within its epoch, as is the custom), if it gets one.
    pub fn line(&mut self, epoch: u32, step: u64, steps_per_epoch: u64, loss: f32) -> Option<String> {
        let due = match self.every_steps {
            0 => {
                let now = Instant::now();
                let rested = self.last.is_none_or(|last| now - last >= Duration::from_millis(100));
                if rested {
                    self.last = Some(now);
                }
                rested || step == steps_per_epoch
            }
            n => step.is_multiple_of(n),
        };
        due.then(|| format!("epoch: {epoch} step: {step}, loss is {loss}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drain(tail: &mut Tail) -> Vec<AttemptEvent> {
        let mut all = Vec::new();
        loop {
            let events = tail.poll().unwrap();
            if events.is_empty() {
                return all;
            }
            all.extend(events);
        }
    }

    fn removed(step: u64) -> AttemptEvent {
        AttemptEvent::CheckpointRemoved { epoch: 1, step }
    }

    #[test]
    fn a_record_that_a_full_disk_takes_back_while_it_is_read_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = events_path(dir.path(), 0);
        let mut records = Records::append_to(&path).unwrap();
        records.append(&removed(1)).unwrap();
        let whole = records.length;
        let mut half = rmp_serde::to_vec_named(&removed(2)).unwrap();
        let (length, crc) = (u32::try_from(half.len()).unwrap(), crc32fast::hash(&half));
        half.splice(0..0, [length.to_le_bytes(), crc.to_le_bytes()].concat());
        let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
        // The writer as it is while the disk is full: half a record, taken back, again and again.
        let writer = std::thread::spawn({
            let (path, stop) = (path.clone(), stop.clone());
            move || {
                let mut file = OpenOptions::new().append(true).open(path).unwrap();
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    file.write_all(&half[..half.len() - 1]).unwrap();
                    file.set_len(whole).unwrap();
                }
                file.write_all(&half).unwrap();
            }
        });
        let mut tail = Tail::open(&path, 0);
        assert_eq!(tail.poll().unwrap().len(), 1);
        for _ in 0..20_000 {
            assert!(tail.poll().expect("nothing is wrong with the file").is_empty());
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        writer.join().unwrap();
        assert_eq!(drain(&mut tail).len(), 1);
    }

    #[test]
    fn what_is_reported_is_read_in_order_with_nan() {
        let dir = tempfile::tempdir().unwrap();
        let reporter = Reporter::create(dir.path(), 3).unwrap();
        reporter.metric("loss", 1, 2.5);
        reporter.metric("loss", 2, f32::NAN);
        reporter.metric("lr", 2, 0.1);
        reporter.log("epoch: 1 step: 1, loss is 2.5\nsecond");
        reporter.event(&removed(7));
        reporter.log(&"ä".repeat(3000));
        reporter.close().unwrap();

        let events = drain(&mut Tail::open(&events_path(dir.path(), 3), 0));
        let AttemptEvent::Metrics { rank: 3, columns } = &events[0] else { panic!("{events:?}") };
        assert_eq!(columns[0].name, "loss");
        assert_eq!(columns[0].steps, [1, 2]);
        assert_eq!(columns[0].values[0], 2.5);
        assert!(columns[0].values[1].is_nan());
        assert_eq!((columns[1].name.as_str(), columns[1].values[0]), ("lr", 0.1));
        let AttemptEvent::Log { lines, .. } = &events[1] else { panic!("{events:?}") };
        assert_eq!(lines.iter().map(|l| l.number).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(events[2], removed(7));
        let AttemptEvent::Log { lines, .. } = &events[3] else { panic!("{events:?}") };
        assert_eq!((lines[0].number, lines[0].text.len()), (3, 4096));
        let text = std::fs::read_to_string(log_path(dir.path(), 3)).unwrap();
        assert!(text.starts_with("epoch: 1 step: 1, loss is 2.5\nsecond\n"));
        // Only what follows an acknowledged number is read again.
        let mut tail = Tail::open(&events_path(dir.path(), 3), 2);
        assert_eq!((tail.next_record(), drain(&mut tail).len(), tail.next_record()), (2, 2, 4));
    }

    #[test]
    fn a_point_is_readable_soon_without_a_flush() {
        let dir = tempfile::tempdir().unwrap();
        let reporter = Reporter::create(dir.path(), 0).unwrap();
        let mut tail = Tail::open(&events_path(dir.path(), 0), 0);
        reporter.metric("loss", 1, 1.0);
        let began = Instant::now();
        while tail.poll().unwrap().is_empty() {
            assert!(began.elapsed() < Duration::from_secs(10), "the point never came");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_rank_of_an_attempt_runs_once() {
        let dir = tempfile::tempdir().unwrap();
        Reporter::create(dir.path(), 0).unwrap().close().unwrap();
        let error = Reporter::create(dir.path(), 0).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
    }

    #[test]
    fn a_torn_end_waits_and_is_cut_by_the_next_writer() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent.events");
        let mut records = Records::append_to(&path).unwrap();
        records.append(&removed(1)).unwrap();
        records.append(&removed(2)).unwrap();
        drop(records);
        let whole = std::fs::read(&path).unwrap();
        let one = whole.len() / 2;
        for cut in one..whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let mut tail = Tail::open(&path, 0);
            assert_eq!(drain(&mut tail), [removed(1)], "cut at {cut}");
            let mut records = Records::append_to(&path).unwrap();
            records.append(&removed(3)).unwrap();
            assert_eq!(drain(&mut tail), [removed(3)], "cut at {cut}");
        }
        // Zeros after the last record, as a power failure leaves them.
        let mut padded = whole.clone();
        padded.extend_from_slice(&[0; 100]);
        std::fs::write(&path, &padded).unwrap();
        assert_eq!(drain(&mut Tail::open(&path, 0)), [removed(1), removed(2)]);
    }

    #[test]
    fn damage_in_the_middle_is_named_not_skipped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rank.0.events");
        let mut records = Records::append_to(&path).unwrap();
        for step in 0..3 {
            records.append(&removed(step)).unwrap();
        }
        let mut bytes = std::fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        let mut tail = Tail::open(&path, 0);
        assert_eq!(tail.poll().unwrap(), [removed(0)]);
        let error = tail.poll().unwrap_err().to_string();
        assert!(error.contains("record 1 ") && error.contains("checksum"), "{error}");
        assert_eq!(tail.poll().unwrap_err().to_string(), error);
        assert_eq!(Records::append_to(&path).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn loss_lines_follow_the_rule() {
        let mut every_third = LossLines::new(3);
        let lines: Vec<_> = (1..=7).filter_map(|s| every_third.line(1, s, 7, 2.302_585_4)).collect();
        assert_eq!(lines, ["epoch: 1 step: 3, loss is 2.3025854", "epoch: 1 step: 6, loss is 2.3025854"]);
        let mut seldom = LossLines::new(0);
        let lines: Vec<_> = (1..=1000).filter_map(|s| seldom.line(2, s, 1000, f32::NAN)).collect();
        assert!(lines.len() < 200, "{}", lines.len());
        assert_eq!(lines[0], "epoch: 2 step: 1, loss is NaN");
        assert_eq!(lines[lines.len() - 1], "epoch: 2 step: 1000, loss is NaN");
    }
}
