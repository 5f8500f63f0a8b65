//! Reads a file of records.

use super::{HEADER_BYTES, MAX_RECORD_BYTES};
use lockstep_protocol::{agent::AttemptEvent, wire};
use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    time::Duration,
};

/// Maximum number of bytes that [`Tail::poll`] returns at once, so that a message made from them stays small.
const POLL_BYTES: u64 = 1 << 20;

/// How long invalid bytes must stay unchanged before they count as damage. While a writer on a full disk truncates an
/// incomplete record, a reader may briefly see some of its bytes as zeros.
const DAMAGE_CONFIRMATION_DELAY: Duration = Duration::from_millis(2);

/// Reads a file of records while it grows.
#[derive(Debug)]
pub struct Tail {
    path: PathBuf,
    file: Option<File>,
    /// The offset of the next record in the file.
    offset: u64,
    /// The index of the record at `offset`.
    index: u64,
    /// Records with a lower index are skipped.
    first_index: u64,
}

/// Why a file of records cannot be read any further.
#[derive(Debug, thiserror::Error)]
pub enum TailError {
    #[error("{path}: {error}")]
    Io { path: PathBuf, error: io::Error },
    /// A record before the end of the file is damaged.
    #[error("{path}: record {record} at byte {offset} is damaged: {detail}")]
    Damaged { path: PathBuf, record: u64, offset: u64, detail: String },
}

impl Tail {
    /// Reads `path`, starting with the record of index `from_record`. The file need not exist yet.
    pub fn open(path: &Path, from_record: u64) -> Self {
        Self { path: path.into(), file: None, offset: 0, index: 0, first_index: from_record }
    }

    /// The size of the complete records read so far.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// The index of the first record that the next [`Tail::poll`] returns.
    pub fn next_record(&self) -> u64 {
        self.index.max(self.first_index)
    }

    /// The records that have been added, at most about a mebibyte at once. Empty if there are none. An incomplete
    /// last record is left for later.
    ///
    /// # Errors
    /// The file cannot be read, or a record before its end is damaged. The records before the damaged record are returned first.
    /// Every later call then returns this error.
    pub fn poll(&mut self) -> Result<Vec<AttemptEvent>, TailError> {
        let mut events = Vec::new();
        let result = self.read_records(&mut events);
        if result.is_err() {
            // By the next call, the path may name another file (on a remounted disk).
            self.file = None;
        }
        match result {
            Err(error) if events.is_empty() => Err(error),
            _ => Ok(events),
        }
    }

    fn read_records(&mut self, events: &mut Vec<AttemptEvent>) -> Result<(), TailError> {
        let path = self.path.clone();
        let io_error = |error| TailError::Io { path: path.clone(), error };
        let file = match &mut self.file {
            Some(file) => file,
            None => match File::open(&self.path) {
                Ok(file) => self.file.insert(file),
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
                Err(e) => return Err(io_error(e)),
            },
        };
        let mut read_bytes = 0;
        while read_bytes < POLL_BYTES {
            let mut found = record_at(file, self.offset).map_err(io_error)?;
            if let RecordAt::Damage(_) = found {
                // If the bytes change, they are not damaged, because the writer was truncating an incomplete record.
                std::thread::sleep(DAMAGE_CONFIRMATION_DELAY);
                let again = record_at(file, self.offset).map_err(io_error)?;
                if again != found {
                    found = RecordAt::Nothing;
                }
            }
            let damaged = |detail: String| TailError::Damaged {
                path: path.clone(),
                record: self.index,
                offset: self.offset,
                detail,
            };
            let payload = match found {
                RecordAt::Nothing => break,
                RecordAt::Damage(detail) => return Err(damaged(detail)),
                RecordAt::Record(payload) => payload,
            };
            if self.index >= self.first_index {
                events.push(wire::decode(&payload).map_err(|e| damaged(e.to_string()))?);
                read_bytes += payload.len() as u64;
            }
            self.offset += (HEADER_BYTES + payload.len()) as u64;
            self.index += 1;
        }
        Ok(())
    }
}

/// The content of the file at an offset.
#[derive(Debug, PartialEq, Eq)]
enum RecordAt {
    /// No complete record yet.
    Nothing,
    /// The payload of a complete record.
    Record(Vec<u8>),
    /// Invalid bytes, with the reason why they are considered invalid.
    Damage(String),
}

fn record_at(file: &mut File, offset: u64) -> io::Result<RecordAt> {
    let length = file.metadata()?.len();
    if offset + HEADER_BYTES as u64 > length {
        return Ok(RecordAt::Nothing);
    }
    file.seek(SeekFrom::Start(offset))?;
    let mut header = [[0; 4]; 2];
    if !is_complete(file.read_exact(header.as_flattened_mut()))? {
        return Ok(RecordAt::Nothing);
    }
    let [size, crc] = header.map(u32::from_le_bytes);
    if size > MAX_RECORD_BYTES {
        return Ok(RecordAt::Damage(format!("its length is {size} bytes, more than {MAX_RECORD_BYTES}")));
    }
    let end = offset + HEADER_BYTES as u64 + u64::from(size);
    if end > length {
        return Ok(RecordAt::Nothing);
    }
    let mut payload = vec![0; size as usize];
    if !is_complete(file.read_exact(&mut payload))? {
        return Ok(RecordAt::Nothing);
    }
    if size != 0 && crc32fast::hash(&payload) == crc {
        return Ok(RecordAt::Record(payload));
    }
    // After a power failure, the file may end in a record whose bytes were not all written, or in zeros. Neither counts as damage.
    if end == length || size == 0 && rest_is_zero(file)? {
        return Ok(RecordAt::Nothing);
    }
    Ok(RecordAt::Damage("its checksum does not match".into()))
}

/// Whether all bytes could be read. A writer whose disk is full truncates an incomplete record, possibly during the
/// read.
fn is_complete(read: io::Result<()>) -> io::Result<bool> {
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
