//! The reading end of a file of records.

use super::{HEADER, LONGEST_RECORD};
use lockstep_protocol::{agent::AttemptEvent, wire};
use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    time::Duration,
};

/// Most bytes that [`Tail::poll`] returns at once, so that a message made of them stays small.
const POLL_BYTES: u64 = 1 << 20;

/// How long bytes that make no record must stay the same. While a full disk's writer takes half a record back, a reader
/// sees some of it as zeros for an instant.
const BEFORE_DAMAGE_IS_BELIEVED: Duration = Duration::from_millis(2);

/// Reads a file of records while it grows.
#[derive(Debug)]
pub struct Tail {
    path: PathBuf,
    file: Option<File>,
    /// Where the next record begins in the file.
    offset: u64,
    next: u64,
    /// Records below this one are skipped.
    from: u64,
}

/// Why a file of records cannot be read any further.
#[derive(Debug, thiserror::Error)]
pub enum TailError {
    /// The file cannot be read.
    #[error("{path}: {error}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        error: io::Error,
    },
    /// A record that is followed by others is not what was written.
    #[error("{path}: record {record} at byte {offset} is damaged: {detail}")]
    Damaged {
        /// The file.
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

    /// Bytes of the whole records read so far.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
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
            // The file at the path may be another one by the next time (a disk that returned).
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
        let mut read = 0;
        while read < POLL_BYTES {
            let mut found = record_at(file, self.offset).map_err(io)?;
            if let Found::Damage(_) = found {
                // The writer may have been taking half a record back: what is damaged stays as it is.
                std::thread::sleep(BEFORE_DAMAGE_IS_BELIEVED);
                let again = record_at(file, self.offset).map_err(io)?;
                if again != found {
                    found = Found::Nothing;
                }
            }
            let damaged = |detail: String| TailError::Damaged {
                path: path.clone(),
                record: self.next,
                offset: self.offset,
                detail,
            };
            let payload = match found {
                Found::Nothing => break,
                Found::Damage(detail) => return Err(damaged(detail)),
                Found::Record(payload) => payload,
            };
            if self.next >= self.from {
                events.push(wire::decode(&payload).map_err(|e| damaged(e.to_string()))?);
                read += payload.len() as u64;
            }
            self.offset += (HEADER + payload.len()) as u64;
            self.next += 1;
        }
        Ok(())
    }
}

/// What is at a place of the file.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    /// No whole record yet.
    Nothing,
    /// Its payload, whole.
    Record(Vec<u8>),
    /// Something that nobody wrote, and why it is thought so.
    Damage(String),
}

fn record_at(file: &mut File, offset: u64) -> io::Result<Found> {
    let length = file.metadata()?.len();
    if offset + HEADER as u64 > length {
        return Ok(Found::Nothing);
    }
    file.seek(SeekFrom::Start(offset))?;
    let mut header = [0; HEADER];
    if !filled(file.read_exact(&mut header))? {
        return Ok(Found::Nothing);
    }
    let [a, b, c, d, e, f, g, h] = header;
    let size = u32::from_le_bytes([a, b, c, d]);
    let crc = u32::from_le_bytes([e, f, g, h]);
    if size > LONGEST_RECORD {
        return Ok(Found::Damage(format!("it claims {size} bytes")));
    }
    let end = offset + HEADER as u64 + u64::from(size);
    if end > length {
        return Ok(Found::Nothing);
    }
    let mut payload = vec![0; size as usize];
    if !filled(file.read_exact(&mut payload))? {
        return Ok(Found::Nothing);
    }
    if size != 0 && crc32fast::hash(&payload) == crc {
        return Ok(Found::Record(payload));
    }
    // After a power failure a file may end in bytes that were never written.
    if end == length || size == 0 && rest_is_zero(file)? {
        return Ok(Found::Nothing);
    }
    Ok(Found::Damage("its checksum does not match".into()))
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
