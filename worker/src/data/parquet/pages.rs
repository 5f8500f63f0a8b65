//! The pages of a column, none larger than can be meant: a page of a few kilobytes may say that it holds two gigabytes, and
//! one that is compressed with gzip may hold more than it says.
//!
//! Not bounded here is how deep a schema's groups lie in each other, which `parquet` reads by recursion: it parses the footer
//! in one go and lets nobody look at it before.

use super::source::{Cursor, Source};
use ::parquet::{
    errors::ParquetError,
    file::reader::{ChunkReader, Length},
};
use bytes::Bytes;
use flate2::read::MultiGzDecoder;
use std::{
    fmt,
    io::{self, BufReader, Read},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// Of a page, decompressed: the largest picture that is read and as much again. pyarrow's pages are of 1 MB or of 1024
/// pictures.
pub(super) const MAX_PAGE_BYTES: u64 = 2 * crate::data::picture::MAX_BYTES;
/// How a stream of gzip begins (RFC 1952), and at how many such places in a page one is looked for.
const GZIP: [u8; 3] = [0x1f, 0x8b, 8];
const BEGINS: usize = 16;
/// The sizes stand at a header's beginning.
const SIZES_BYTES: usize = 32;

/// A page that is too large, in the words of a file's trouble.
#[derive(Debug)]
pub(super) struct TooLarge {
    /// As far as is known.
    bytes: u64,
    most: u64,
}

impl fmt::Display for TooLarge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bytes, most } = self;
        write!(
            f,
            "has a page of {bytes} bytes or more, decompressed; up to {most} are read: write smaller pages \
             (pyarrow's write_batch_size or data_page_size) or row groups"
        )
    }
}

impl std::error::Error for TooLarge {}

/// What a column's pages are read from.
pub(super) struct Pages {
    source: Arc<Source>,
    /// Pages are read in one go with their headers, as an offset index tells where they are.
    indexed: bool,
    gzip: bool,
    most: u64,
    /// Of the page whose header was read last, decompressed.
    told: AtomicU64,
}

impl Pages {
    pub(super) fn new(source: Arc<Source>, indexed: bool, gzip: bool, most: u64) -> Self {
        Self { source, indexed, gzip, most, told: AtomicU64::new(0) }
    }

    /// Checks the sizes that a page's header tells: decompressed and compressed.
    fn check_header(&self, head: &[u8]) -> Result<Sizes, ParquetError> {
        let Some(sizes) = Sizes::of(head) else {
            return Err(ParquetError::General("a page's header tells no sizes".into()));
        };
        if sizes.uncompressed > self.most {
            return Err(self.too_large(sizes.uncompressed));
        }
        self.told.store(sizes.uncompressed, Ordering::Relaxed);
        Ok(sizes)
    }

    /// gzip is decompressed to its end, whatever the header says. In pages of the second version levels lie before it.
    fn check_gzip(&self, data: &[u8], told: u64) -> Result<(), ParquetError> {
        let begins = data.windows(GZIP.len()).enumerate().filter(|(_, bytes)| *bytes == GZIP);
        for (begin, _) in begins.take(BEGINS) {
            let mut decoder = MultiGzDecoder::new(&data[begin..]).take(told + 1);
            // What is wrong with it is said by who decompresses it.
            if io::copy(&mut decoder, &mut io::sink()).unwrap_or(0) > told || decoder.limit() == 0 {
                let detail = format!("a page holds more than the {told} bytes that it says");
                return Err(ParquetError::General(detail));
            }
            // All of it was one stream.
            if begin == 0 {
                break;
            }
        }
        Ok(())
    }

    fn too_large(&self, bytes: u64) -> ParquetError {
        ParquetError::External(Box::new(TooLarge { bytes, most: self.most }))
    }
}

impl Length for Pages {
    fn len(&self) -> u64 {
        self.source.len()
    }
}

impl ChunkReader for Pages {
    type T = BufReader<Cursor>;

    /// Whose header is read from here.
    fn get_read(&self, start: u64) -> Result<Self::T, ParquetError> {
        let mut head = [0; SIZES_BYTES];
        let mut filled = 0;
        let mut read = self.source.get_read(start)?.take(SIZES_BYTES as u64);
        while filled < SIZES_BYTES {
            match read.read(&mut head[filled..])? {
                0 => break,
                n => filled += n,
            }
        }
        self.check_header(&head[..filled])?;
        self.source.get_read(start)
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes, ParquetError> {
        let bytes = self.source.get_bytes(start, length)?;
        if self.indexed {
            let sizes = self.check_header(&bytes)?;
            if self.gzip {
                let data = bytes.len().saturating_sub(usize::try_from(sizes.compressed).unwrap_or(0));
                self.check_gzip(&bytes[data..], sizes.uncompressed)?;
            }
        } else if self.gzip {
            self.check_gzip(&bytes, self.told.load(Ordering::Relaxed))?;
        }
        Ok(bytes)
    }
}

/// What a page's header says of its size, in bytes.
#[derive(Debug, PartialEq)]
struct Sizes {
    uncompressed: u64,
    compressed: u64,
}

impl Sizes {
    /// Reads the first fields of a PageHeader (parquet.thrift) in Thrift's compact protocol: 1 the type, 2 and 3 the sizes,
    /// 32-bit numbers all. `None` where something else stands there.
    fn of(head: &[u8]) -> Option<Self> {
        let mut bytes = head.iter().copied();
        let mut number = || -> Option<i64> {
            let mut value = 0u64;
            for shift in (0..35).step_by(7) {
                let byte = bytes.next()?;
                value |= u64::from(byte & 0x7f) << shift;
                if byte & 0x80 == 0 {
                    return Some((value >> 1).cast_signed() ^ -(value & 1).cast_signed());
                }
            }
            None
        };
        let mut values = [0; 3];
        for value in &mut values {
            // One further than the field before (0x10), an i32 (5); as a number that is zigzag, 0x15 reads -11.
            if number()? != -11 {
                return None;
            }
            *value = number()?;
        }
        Some(Self { uncompressed: u64::try_from(values[1]).ok()?, compressed: u64::try_from(values[2]).ok()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs::File, io::Write};

    /// A page's header: a dictionary page (2) of these sizes.
    fn header(uncompressed: u32, compressed: u32) -> Vec<u8> {
        let mut head = vec![0x15, 4];
        for size in [uncompressed, compressed] {
            head.push(0x15);
            let mut value = u64::from(size) << 1;
            while value >= 0x80 {
                head.push((value & 0x7f) as u8 | 0x80);
                value >>= 7;
            }
            head.push(value as u8);
        }
        head
    }

    fn pages(content: &[u8], indexed: bool, gzip: bool, most: u64) -> Pages {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(content).unwrap();
        let file: File = file;
        Pages::new(Arc::new(Source::new(file, content.len() as u64)), indexed, gzip, most)
    }

    #[test]
    fn sizes_are_read_as_thrift_writes_them_and_nothing_else_is_taken_for_them() {
        for (a, b) in [(0, 0), (1, 63), (64, 8192), (i32::MAX as u32, 300)] {
            let sizes = Sizes { uncompressed: a.into(), compressed: b.into() };
            assert_eq!(Sizes::of(&header(a, b)), Some(sizes));
        }
        let whole = header(70_000, 300);
        for cut in 0..whole.len() {
            assert_eq!(Sizes::of(&whole[..cut]), None, "{cut}");
        }
        // Below zero, and another type.
        assert_eq!(Sizes::of(&[0x15, 4, 0x15, 1, 0x15, 2]), None);
        assert_eq!(Sizes::of(&[0x15, 4, 0x16, 2, 0x15, 2]), None);
    }

    #[test]
    fn a_page_at_the_limit_is_read_and_one_past_it_is_not() {
        for indexed in [false, true] {
            let read = |size: u32| {
                let content = [header(size, 5), b"bytes".to_vec()].concat();
                let pages = pages(&content, indexed, false, 1000);
                let all = || pages.get_bytes(0, content.len()).map(drop);
                if indexed { all() } else { pages.get_read(0).map(drop) }
            };
            assert!(read(1000).is_ok());
            let words = read(1001).unwrap_err().to_string();
            assert!(words.contains("has a page of 1001 bytes") && words.contains("up to 1000"), "{words}");
        }
    }

    #[test]
    fn a_gzip_page_that_holds_more_than_it_says_is_not_decompressed() {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        gzip.write_all(&[0; 5000]).unwrap();
        let data = gzip.finish().unwrap();
        for indexed in [false, true] {
            let read = |says: u32| {
                let head = header(says, data.len() as u32);
                let content = [&head[..], &data].concat();
                let pages = pages(&content, indexed, true, 1 << 20);
                let start = if indexed { 0 } else { head.len() };
                if !indexed {
                    pages.get_read(0).unwrap();
                }
                pages.get_bytes(start as u64, content.len() - start).map(drop)
            };
            assert!(read(5000).is_ok());
            let words = read(4999).unwrap_err().to_string();
            assert!(words.contains("more than the 4999 bytes"), "{words}");
        }
    }
}
