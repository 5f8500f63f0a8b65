//! A file that several threads read at different offsets.

use ::parquet::{
    errors::ParquetError,
    file::reader::{ChunkReader, Length},
};
use bytes::Bytes;
use std::{
    fs::File,
    io::{self, BufReader, Read},
    os::unix::fs::FileExt,
    sync::Arc,
};

/// Number of bytes read for a page header.
const HEADER_BYTES: usize = 4 << 10;

/// A file and its size in bytes. Unlike in `parquet`'s own file reader, threads share no file offset.
pub(super) struct Source {
    pub(super) file: Arc<File>,
    pub(super) size: u64,
}

impl Source {
    pub(super) fn new(file: File, size: u64) -> Self {
        Self { file: Arc::new(file), size }
    }
}

/// Reads a file sequentially from an offset.
pub(super) struct Cursor {
    file: Arc<File>,
    offset: u64,
}

impl Read for Cursor {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(buffer, self.offset)?;
        self.offset += read as u64;
        Ok(read)
    }
}

impl Length for Source {
    fn len(&self) -> u64 {
        self.size
    }
}

impl ChunkReader for Source {
    type T = BufReader<Cursor>;

    fn get_read(&self, start: u64) -> Result<Self::T, ParquetError> {
        Ok(BufReader::with_capacity(HEADER_BYTES, Cursor { file: Arc::clone(&self.file), offset: start }))
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes, ParquetError> {
        if start.checked_add(length as u64).is_none_or(|end| end > self.size) {
            return Err(ParquetError::EOF(format!(
                "{length} bytes at {start} of a file of {} bytes",
                self.size
            )));
        }
        let mut bytes = vec![0; length];
        self.file.read_exact_at(&mut bytes, start)?;
        Ok(bytes.into())
    }
}
