//! The rows of a file, for the index.

use super::{ParquetFile, Source, guard};
use crate::{
    index::{Entry, Members, UnusableFile, describe},
    label::{MAX_LABEL_BYTES, class_name},
    picture,
};
use ::parquet::{
    column::reader::{ColumnReader, ColumnReaderImpl, get_column_reader},
    data_type::{ByteArray, ByteArrayType, DataType},
    errors::ParquetError,
};
use lockstep_host::files;
use rayon::prelude::*;
use std::{path::Path, sync::Arc};

/// Number of rows that are read at once.
const BATCH_ROWS: usize = 256;

pub(super) const NO_PICTURE: &str =
    "has no picture: its bytes are null, and paths are not followed; write the pictures into the file";
pub(crate) const NO_LABEL: &str = "has no class: its label is null, negative, empty or too long";

/// Reads all rows of the file at `path`.
pub(crate) fn read_members(file: &ParquetFile, path: &Path) -> Members {
    let (handle, size) = match files::open(path) {
        Ok(found) => found,
        Err(detail) => return UnusableFile::transient(detail).into(),
    };
    let source = Arc::new(Source::new(handle, size));
    let mut members = Members::default();
    let mut failed_groups = 0;
    for group in 0..file.metadata.num_row_groups() {
        // Other row groups may be intact.
        if let Err(error) = file.examine_group(&source, group, &mut members.entries) {
            failed_groups += 1;
            let (first, end) = (file.first_rows[group], file.first_rows[group + 1]);
            let place = format!("row group {group}, rows {first} to {}", end.saturating_sub(1));
            let detail = format!("{} ({place})", error.detail);
            let first_error = members.error.get_or_insert(UnusableFile::permanent(detail));
            first_error.is_transient |= error.is_transient;
        }
    }
    if let Some(error) = members.error.as_mut().filter(|_| failed_groups > 1) {
        error.detail.push_str(&format!("; {failed_groups} row groups cannot be read"));
    }
    members
}

impl ParquetFile {
    /// Adds entries to `entries` until an error occurs.
    fn examine_group(
        &self,
        source: &Arc<Source>,
        group: usize,
        entries: &mut Vec<Entry>,
    ) -> Result<(), UnusableFile> {
        let label = self.metadata.row_group(group).column(self.columns.label).column_descr_ptr();
        let (mut row, end) = (self.first_rows[group], self.first_rows[group + 1]);
        let mut picture_column = guard(|| self.pictures(source, group))?;
        let mut label_column =
            guard(|| Ok(get_column_reader(label, self.pages(source, group, self.columns.label)?)))?;
        while row < end {
            let count = (end - row).min(BATCH_ROWS as u64) as usize;
            let (pictures, labels) = guard(|| {
                let pictures = read_values(&mut picture_column, count)?;
                Ok((pictures, read_labels(&mut label_column, count)?))
            })?;
            let numbered = (row..).zip(pictures).zip(labels).collect::<Vec<_>>();
            let inspected: Vec<Entry> =
                numbered.into_par_iter().map(|((row, picture), label)| entry(row, picture, label)).collect();
            entries.extend(inspected);
            row += count as u64;
        }
        Ok(())
    }
}

/// Reads the next `count` values. A value is `None` if it is null.
pub(super) fn read_values<T: DataType>(
    column: &mut ColumnReaderImpl<T>,
    count: usize,
) -> Result<Vec<Option<T::T>>, ParquetError> {
    let (mut levels, mut values) = (Vec::new(), Vec::new());
    let (records, ..) = column.read_records(count, Some(&mut levels), None, &mut values)?;
    if records != count {
        return Err(ParquetError::EOF(format!("only {records} of {count} rows exist")));
    }
    // No row is null: all values were read, or the column has no definition levels.
    let Some(highest) = levels.iter().max().copied().filter(|_| values.len() < count) else {
        return Ok(values.into_iter().map(Some).collect());
    };
    // The highest level marks a value, unless all rows are null: then no level does.
    let level_of_values = if values.is_empty() { i16::MAX } else { highest };
    let mut values = values.into_iter();
    Ok(levels.iter().map(|level| if *level == level_of_values { values.next() } else { None }).collect())
}

fn read_labels(column: &mut ColumnReader, count: usize) -> Result<Vec<Option<String>>, ParquetError> {
    let number = |value: i64| (value >= 0).then(|| value.to_string());
    let text = |value: ByteArray| {
        let text = std::str::from_utf8(value.data())
            .ok()
            .filter(|text| text.len() as u64 <= MAX_LABEL_BYTES)?
            .trim();
        (!text.is_empty()).then(|| class_name(text))
    };
    Ok(match column {
        ColumnReader::Int32ColumnReader(column) => {
            read_values(column, count)?.into_iter().map(|value| number(value?.into())).collect()
        }
        ColumnReader::Int64ColumnReader(column) => {
            read_values(column, count)?.into_iter().map(|value| number(value?)).collect()
        }
        ColumnReader::ByteArrayColumnReader(column) => {
            read_values::<ByteArrayType>(column, count)?.into_iter().map(|value| text(value?)).collect()
        }
        _ => return Err(ParquetError::General("the labels are neither numbers nor text".into())),
    })
}

fn entry(row: u64, picture: Option<ByteArray>, label: Option<String>) -> Entry {
    let entry = Entry { name: row.to_string().into_bytes(), offset: row, ..Entry::default() };
    let Some(picture) = picture else { return Entry { broken: Some(NO_PICTURE.into()), ..entry } };
    let bytes = picture.data();
    let entry = Entry { size: bytes.len() as u64, label, ..entry };
    if entry.label.is_none() {
        return Entry { broken: Some(NO_LABEL.into()), ..entry };
    }
    if entry.size > picture::MAX_BYTES {
        let detail = format!("has {} bytes; at most {} are allowed", entry.size, picture::MAX_BYTES);
        return Entry { broken: Some(detail), ..entry };
    }
    describe(Path::new(""), bytes, entry)
}
