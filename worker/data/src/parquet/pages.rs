//! Access to the pages of a column, with a limit of the decompressed size. A page of a few kilobytes may claim to
//! contain two gigabytes, and a page compressed with gzip may contain more than it claims.
//! The nesting depth of a schema is not limited here, because the crate `parquet` parses the whole footer recursively.

use super::source::{Cursor, Source};
use ::parquet::{
    errors::ParquetError,
    file::reader::{ChunkReader, Length},
};
use bytes::Bytes;
use flate2::read::MultiGzDecoder;
use std::{
    fmt,
    io::{self, BufRead, BufReader, Read},
    sync::Arc,
};

/// Maximum size of a decompressed page: twice the largest picture. pyarrow's pages have 1 MB or 1024 pictures.
pub(super) const MAX_PAGE_BYTES: u64 = 2 * crate::picture::MAX_BYTES;
/// The first bytes of a gzip stream (RFC 1952).
const GZIP_MAGIC: [u8; 3] = [0x1f, 0x8b, 8];
/// Maximum number of occurrences of [`GZIP_MAGIC`] in a page at which decompression is tried.
const MAX_GZIP_STARTS: usize = 16;

/// The error for a page that is too large.
#[derive(Debug)]
pub(super) struct TooLarge {
    /// The size, as far as it is known.
    bytes: u64,
    max_bytes: u64,
}

impl fmt::Display for TooLarge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bytes, max_bytes } = self;
        write!(
            f,
            "has a page of {bytes} bytes or more, decompressed; at most {max_bytes} are allowed: write smaller pages \
             (pyarrow's write_batch_size or data_page_size) or row groups"
        )
    }
}

impl std::error::Error for TooLarge {}

/// The source of a column's pages.
pub(super) struct Pages {
    pub(super) source: Arc<Source>,
    /// Whether an offset index tells where pages are. Pages are then read together with their headers.
    pub(super) has_offset_index: bool,
    pub(super) is_gzip: bool,
    /// Maximum size of a decompressed page.
    pub(super) max_bytes: u64,
}

impl Pages {
    /// Decompresses gzip data to its end, whatever a header says. The stream follows the page header and, in pages of
    /// version 2, the levels.
    fn check_gzip(&self, data: &[u8]) -> Result<(), TooLarge> {
        let begins = data.windows(GZIP_MAGIC.len()).enumerate().filter(|(_, bytes)| *bytes == GZIP_MAGIC);
        for (begin, _) in begins.take(MAX_GZIP_STARTS) {
            let mut decoder = MultiGzDecoder::new(&data[begin..]).take(self.max_bytes + 1);
            // Other errors are reported by the code that decompresses the page.
            let _ = io::copy(&mut decoder, &mut io::sink());
            if decoder.limit() == 0 {
                return Err(TooLarge { bytes: self.max_bytes + 1, max_bytes: self.max_bytes });
            }
        }
        Ok(())
    }
}

/// Checks the size in a page's header, if `head` is a header.
fn check_header(head: &[u8], max_bytes: u64) -> Result<(), TooLarge> {
    match decompressed_bytes(head) {
        Some(bytes) if bytes > max_bytes => Err(TooLarge { bytes, max_bytes }),
        // Other errors are reported by the code that reads the page.
        _ => Ok(()),
    }
}

impl Length for Pages {
    fn len(&self) -> u64 {
        self.source.len()
    }
}

impl ChunkReader for Pages {
    type T = Header;

    fn get_read(&self, start: u64) -> Result<Self::T, ParquetError> {
        Ok(Header { from: self.source.get_read(start)?, max_bytes: Some(self.max_bytes) })
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes, ParquetError> {
        let bytes = self.source.get_bytes(start, length)?;
        let header = if self.has_offset_index { check_header(&bytes, self.max_bytes) } else { Ok(()) };
        let checked = if self.is_gzip { header.and_then(|()| self.check_gzip(&bytes)) } else { header };
        checked.map_err(|page| ParquetError::External(Box::new(io::Error::other(page))))?;
        Ok(bytes)
    }
}

/// A reader that checks the page header before the first read. If the crate `parquet` knows the header, it requests a reader and
/// reads nothing.
pub(super) struct Header {
    from: BufReader<Cursor>,
    /// The limit. `None` after the check.
    max_bytes: Option<u64>,
}

impl Read for Header {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if let Some(max_bytes) = self.max_bytes.take() {
            check_header(self.from.fill_buf()?, max_bytes).map_err(io::Error::other)?;
        }
        self.from.read(buffer)
    }
}

/// The decompressed size of a page: the second field of a PageHeader (parquet.thrift) in Thrift's compact protocol.
/// The first two fields are 32-bit integers. `None` if the bytes are something else.
fn decompressed_bytes(head: &[u8]) -> Option<u64> {
    let mut bytes = head.iter().copied();
    let mut read_number = || -> Option<i64> {
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
    let mut last = 0;
    for _ in 0..2 {
        // A field header: one more than the previous field id (0x10), type i32 (5). Read as a zigzag number, 0x15 is
        // -11.
        if read_number()? != -11 {
            return None;
        }
        last = read_number()?;
    }
    u64::try_from(last).ok()
}

#[cfg(test)]
mod tests {
    use super::{super::UnusableFile, *};
    use crate::test_catalog::assert_contains;
    use std::io::Write;

    /// The beginning of the header of a dictionary page (type 2) with this decompressed size in bytes.
    fn header(uncompressed: u32) -> Vec<u8> {
        let mut head = vec![0x15, 4, 0x15];
        let mut value = u64::from(uncompressed) << 1;
        while value >= 0x80 {
            head.push((value & 0x7f) as u8 | 0x80);
            value >>= 7;
        }
        head.push(value as u8);
        head
    }

    fn pages(content: &[u8], has_offset_index: bool, is_gzip: bool, max_bytes: u64) -> Pages {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(content).unwrap();
        let source = Arc::new(Source::new(file, content.len() as u64));
        Pages { source, has_offset_index, is_gzip, max_bytes }
    }

    #[test]
    fn page_sizes_are_parsed_and_other_bytes_are_not() {
        for size in [0, 1, 63, 64, 8192, i32::MAX as u32] {
            assert_eq!(decompressed_bytes(&header(size)), Some(size.into()));
        }
        let whole = header(70_000);
        for cut in 0..whole.len() {
            assert_eq!(decompressed_bytes(&whole[..cut]), None, "{cut}");
        }
        // A negative size, and a field of another type.
        assert_eq!(decompressed_bytes(&[0x15, 4, 0x15, 1]), None);
        assert_eq!(decompressed_bytes(&[0x15, 4, 0x16, 2]), None);
    }

    #[test]
    fn a_page_at_the_size_limit_is_read_and_a_larger_page_is_refused() {
        for is_indexed in [false, true] {
            let read = |size: u32| {
                let content = [header(size), b"bytes".to_vec()].concat();
                let is_gzip = false;
                let pages = pages(&content, is_indexed, is_gzip, 1000);
                if is_indexed {
                    return pages.get_bytes(0, content.len()).map(drop);
                }
                // Data that looks like a header is not a header.
                pages.get_bytes(0, content.len())?;
                let mut all = Vec::new();
                pages.get_read(0)?.read_to_end(&mut all)?;
                assert_eq!(all, content);
                Ok(())
            };
            assert!(read(1000).is_ok());
            let detail = UnusableFile::from(read(1001).unwrap_err()).detail;
            assert_contains(detail, &["has a page of 1001 bytes", "at most 1000"]);
        }
    }

    #[test]
    fn a_gzip_page_that_decompresses_beyond_the_limit_is_refused() {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        gzip.write_all(&[0; 5000]).unwrap();
        let data = gzip.finish().unwrap();
        let (is_indexed, is_gzip) = (false, true);
        // The stream by itself, after a gzip header that claims fewer bytes, and after levels and the beginning of another stream.
        for before in [&b""[..], &header(9), b"\x03\x1f\x8b\x08"] {
            let content = [before, &data].concat();
            let read = |max_bytes: u64| {
                pages(&content, is_indexed, is_gzip, max_bytes).get_bytes(0, content.len()).map(drop)
            };
            assert!(read(5000).is_ok());
            assert_contains(
                UnusableFile::from(read(4999).unwrap_err()).detail,
                &["has a page of 5000 bytes or more"],
            );
        }
        let twice = [&data[..], &data].concat();
        assert!(pages(&twice, is_indexed, is_gzip, 9999).get_bytes(0, twice.len()).is_err());
        assert!(pages(&twice, is_indexed, is_gzip, 10_000).get_bytes(0, twice.len()).is_ok());
    }
}
