//! Pictures in Parquet files (parquet.apache.org), as written by Hugging Face's `datasets` and by pyarrow. A row
//! contains a picture and its class. A picture is identified by its row. To read a picture, only its page is decoded.

mod columns;
mod pages;
mod rows;
mod source;
#[cfg(test)]
mod tests;

pub(super) use rows::{NO_LABEL, read_members};

use super::index::UnusableFile;
use ::parquet::{
    basic::CompressionCodec::{GZIP, SNAPPY, UNCOMPRESSED, ZSTD},
    column::{page::PageReader, reader::ColumnReaderImpl},
    data_type::ByteArrayType,
    errors::ParquetError,
    file::{
        metadata::{
            ColumnChunkMask, PageIndexPolicy, ParquetMetaData, ParquetMetaDataOptions, ParquetMetaDataReader,
            ParquetStatisticsPolicy,
        },
        serialized_reader::SerializedPageReader,
    },
};
use columns::Columns;
use lockstep_host::files;
use pages::{MAX_PAGE_BYTES, Pages, TooLarge};
use source::Source;
use std::{
    fs::File,
    io::{self, ErrorKind},
    os::unix::fs::FileExt,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::Arc,
};

/// The bytes at the beginning and end of a file.
const MAGIC: &[u8; 4] = b"PAR1";
/// Size of the end of a file: the length of the footer, and the magic bytes.
const TAIL_BYTES: u64 = 8;
/// Minimum size of a row with a picture and a class.
const MIN_ROW_BYTES: u64 = 8;
/// Size limit of a footer. A million pictures in row groups of a hundred have a footer of 10 MB.
const MAX_FOOTER_BYTES: u64 = 256 << 20;

/// A file's footer: where its pictures are, and the names of its classes.
#[derive(Debug)]
pub(crate) struct ParquetFile {
    metadata: ParquetMetaData,
    columns: Columns,
    /// The index of the first row of each row group, and finally the number of all rows.
    first_rows: Vec<u64>,
}

impl From<ParquetError> for UnusableFile {
    fn from(error: ParquetError) -> Self {
        if let ParquetError::External(inner) = &error
            && let Some(io) = inner.downcast_ref::<io::Error>()
        {
            if let Some(code) = io.raw_os_error() {
                return io::Error::from_raw_os_error(code).into();
            }
            if let Some(page) = io.get_ref().and_then(|inner| inner.downcast_ref::<TooLarge>()) {
                return Self::permanent(page.to_string());
            }
        }
        Self::permanent(format!("is damaged: {error}; get it again"))
    }
}

/// Runs `work` and turns a panic into an error: the decoder asserts some conditions that a damaged file violates.
fn guard<T>(work: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, UnusableFile> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(done) => Ok(done?),
        Err(_) => Err(UnusableFile::permanent("is damaged: its pages do not fit together; get it again")),
    }
}

impl ParquetFile {
    /// Reads the footer of the file at `path`.
    pub(super) fn open(path: &Path) -> Result<Self, UnusableFile> {
        let (file, size) = files::open(path).map_err(UnusableFile::transient)?;
        Self::of(&Source::new(file, size))
    }

    fn of(source: &Source) -> Result<Self, UnusableFile> {
        check_tail(source)?;
        let options = ParquetMetaDataOptions::new()
            .with_column_stats_policy(ParquetStatisticsPolicy::SkipAll)
            .with_size_stats_policy(ParquetStatisticsPolicy::SkipAll);
        let reader = ParquetMetaDataReader::new().with_metadata_options(Some(options));
        let metadata = guard(|| reader.parse_and_finish(source))?;
        let columns = columns::choose(metadata.file_metadata()).map_err(UnusableFile::permanent)?;
        let mut first_rows = vec![0u64];
        for group in metadata.row_groups() {
            for column in [columns.picture, columns.label] {
                let codec = group.column(column).compression_codec();
                if !matches!(codec, UNCOMPRESSED | SNAPPY | GZIP | ZSTD) {
                    return Err(UnusableFile::permanent(format!(
                        "is compressed with {}, which is not supported; write it with snappy, zstd, gzip or none",
                        format!("{codec:?}").to_lowercase()
                    )));
                }
            }
            let rows = u64::try_from(group.num_rows()).ok();
            let end = rows.and_then(|rows| first_rows.last()?.checked_add(rows));
            first_rows.push(end.ok_or_else(|| {
                UnusableFile::permanent("is damaged: its numbers of rows are inconsistent")
            })?);
        }
        // A null takes almost no space, so a footer could claim any number of rows.
        if first_rows.last().is_some_and(|rows| *rows > source.size / MIN_ROW_BYTES) {
            return Err(UnusableFile::permanent("is damaged: it has too many rows for its size"));
        }
        // With an offset index, pages are found directly.
        let mut indexed = ParquetMetaDataReader::new_with_metadata(metadata.clone())
            .with_offset_index_policy(PageIndexPolicy::Optional)
            .with_offset_index_mask(ColumnChunkMask::columns([columns.picture]));
        let metadata =
            guard(|| indexed.read_page_indexes(source).and_then(|()| indexed.finish())).unwrap_or(metadata);
        Ok(Self { metadata, columns, first_rows })
    }

    /// The names of the classes, if the file has them.
    pub(super) fn class_names(&self) -> Option<&[String]> {
        self.columns.names.as_deref()
    }

    fn row_count(&self) -> u64 {
        self.first_rows.last().copied().unwrap_or(0)
    }

    /// The bytes of the picture in `row`. `size` is the size of `file` in bytes.
    /// The error is a phrase to follow the picture's name.
    pub(super) fn read(&self, file: File, size: u64, row: u64) -> Result<Vec<u8>, String> {
        if row >= self.row_count() {
            return Err(format!("no longer exists: its file now has {} rows", self.row_count()));
        }
        let found = self.read_run(file, size, row, 1);
        let found = found.map_err(|detail| format!("cannot be read, as its file {detail}"))?;
        found.into_iter().next().flatten().ok_or_else(|| rows::NO_PICTURE.into())
    }

    /// As [`ParquetFile::read`], for `count` rows from `first` on. Fails if they are not in one row group. An entry is `None` if
    /// its picture is null.
    pub(super) fn read_run(
        &self,
        file: File,
        size: u64,
        first: u64,
        count: u64,
    ) -> Result<Vec<Option<Vec<u8>>>, String> {
        let group = self.first_rows.partition_point(|row| *row <= first).saturating_sub(1);
        let end = self.first_rows.get(group + 1).copied().unwrap_or(0);
        if first.checked_add(count).is_none_or(|last| last > end) {
            return Err("has these rows in several row groups".into());
        }
        let source = Arc::new(Source::new(file, size));
        let read = || {
            let mut column = self.pictures(&source, group)?;
            column.skip_records((first - self.first_rows[group]) as usize)?;
            rows::read_values(&mut column, count as usize)
        };
        let values = guard(read).map_err(|error| error.detail)?;
        Ok(values.into_iter().map(|value| value.map(|value| value.data().to_vec())).collect())
    }

    /// A reader of the pictures of a row group.
    fn pictures(
        &self,
        source: &Arc<Source>,
        group: usize,
    ) -> Result<ColumnReaderImpl<ByteArrayType>, ParquetError> {
        let descr = self.metadata.row_group(group).column(self.columns.picture).column_descr_ptr();
        Ok(ColumnReaderImpl::new(descr, self.pages(source, group, self.columns.picture)?))
    }

    /// A reader of the pages of a column of a row group.
    fn pages(
        &self,
        source: &Arc<Source>,
        group: usize,
        column: usize,
    ) -> Result<Box<dyn PageReader>, ParquetError> {
        let row_group = self.metadata.row_group(group);
        let index = self.metadata.page_index().and_then(|index| index.offset_index(group, column));
        let locations = index.map(|index| index.page_locations().clone());
        let rows = usize::try_from(row_group.num_rows()).unwrap_or(0);
        let chunk = row_group.column(column);
        let pages = Pages {
            source: Arc::clone(source),
            has_offset_index: locations.is_some(),
            is_gzip: chunk.compression_codec() == GZIP,
            max_bytes: MAX_PAGE_BYTES,
        };
        Ok(Box::new(SerializedPageReader::new(Arc::new(pages), chunk, rows, locations)?))
    }
}

/// Fails for files that are not Parquet files, encrypted or truncated.
fn check_tail(source: &Source) -> Result<(), UnusableFile> {
    let (mut head, mut tail) = ([0; 4], [0; TAIL_BYTES as usize]);
    let read_at = |buffer: &mut [u8], offset: u64| match source.file.read_exact_at(buffer, offset) {
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(()),
        read => read.map_err(UnusableFile::from),
    };
    read_at(&mut head, 0)?;
    read_at(&mut tail, source.size.saturating_sub(TAIL_BYTES))?;
    if source.size == 0 {
        return Err(UnusableFile::permanent("is empty"));
    }
    if head == *b"PARE" || tail[4..] == *b"PARE" {
        return Err(UnusableFile::permanent("is encrypted; write it without encryption"));
    }
    if head != *MAGIC {
        return Err(UnusableFile::permanent("is not a Parquet file"));
    }
    if tail[4..] != *MAGIC || source.size < TAIL_BYTES + 4 {
        return Err(UnusableFile::permanent("is cut off: a Parquet file without its footer; get it again"));
    }
    let footer = u64::from(u32::from_le_bytes([tail[0], tail[1], tail[2], tail[3]]));
    if footer > MAX_FOOTER_BYTES {
        return Err(UnusableFile::permanent(format!(
            "has a footer of {footer} bytes; at most {MAX_FOOTER_BYTES} are allowed: write larger row groups, or more files"
        )));
    }
    Ok(())
}
