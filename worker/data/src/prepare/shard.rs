//! Writes one shard of a copy.

use super::{
    Encoder, PrepareSettings, cannot_be_written,
    order::{WINDOW, runs},
    record::sample_checksum,
    unread_detail,
};
use crate::{DataError, copy::FinishedShard, listing::Listing, loader::replaced::too_many};
use lockstep_host::files;
use lockstep_protocol::{dataset::BrokenFile, spec::BrokenFiles};
use rayon::prelude::*;
use std::{
    fs::{self, File},
    io::{self, BufWriter},
    path::Path,
};

/// The block size of tar.
const BLOCK_BYTES: u64 = 512;
/// Number of pictures per thread in a batch. While a batch is written, the next batch is made.
const PICTURES_PER_THREAD: usize = 8;

/// The size of a sample whose picture has `picture` bytes: two headers, the picture and its class.
pub(super) fn sample_bytes(picture: u64) -> u64 {
    picture.next_multiple_of(BLOCK_BYTES) + 3 * BLOCK_BYTES
}

/// A shard to write.
pub(super) struct Task<'a> {
    pub(super) file: &'a str,
    /// The number of the shard's first sample, counted from 0 in the split's copy.
    pub(super) first: usize,
    /// The positions of the shard's pictures in the listing.
    pub(super) order: &'a [u32],
    /// The labels of the whole listing.
    pub(super) labels: &'a [u32],
    pub(super) listing: &'a Listing,
}

/// A sample's number, class and picture.
type Sample = (usize, u32, Vec<u8>);

impl Task<'_> {
    /// Writes the shard under a temporary name, and renames it when it is complete. `left_out` is the number of
    /// broken pictures in earlier shards of the split. `report` is called with the number of completed pictures of this
    /// shard.
    pub(super) fn write(
        &self,
        to: &Path,
        settings: &PrepareSettings,
        left_out: usize,
        report: &impl Fn(usize),
    ) -> Result<FinishedShard, DataError> {
        let (path, temporary) = (to.join(self.file), to.join(format!("{}.part", self.file)));
        let written = self.write_temporary(&temporary, settings, left_out, report).and_then(|finished| {
            fs::rename(&temporary, &path).map_err(|error| cannot_be_written(&path, &error))?;
            Ok(finished)
        });
        if written.is_err() {
            // If the disk is full, the temporary file must not keep it full.
            let _ = fs::remove_file(&temporary);
        }
        written
    }

    fn write_temporary(
        &self,
        path: &Path,
        settings: &PrepareSettings,
        left_out: usize,
        report: &impl Fn(usize),
    ) -> Result<FinishedShard, DataError> {
        let unwritten = |error: io::Error| cannot_be_written(path, &error);
        let file = File::create(path).map_err(unwritten)?;
        let mut tar = tar::Builder::new(BufWriter::with_capacity(1 << 20, file));
        let mut finished = FinishedShard::default();
        let (mut waiting, mut done) = (Vec::new(), 0);
        let at_once = if self.listing.has_parquet_rows() {
            WINDOW
        } else {
            PICTURES_PER_THREAD * rayon::current_num_threads()
        };
        for chunk in self.order.chunks(at_once) {
            let first = self.first + done;
            let (made, written) = rayon::join(
                || self.make(chunk, first, settings),
                || append_samples(&mut tar, std::mem::take(&mut waiting)),
            );
            written.map_err(unwritten)?;
            for sample in made {
                match sample {
                    Ok(sample) => waiting.push(sample),
                    Err(DataError::File(BrokenFile { file, detail })) if files::is_read_error(&detail) => {
                        return Err(DataError::File(BrokenFile { file, detail: unread_detail(&detail) }));
                    }
                    Err(DataError::File(broken)) if settings.broken_files == BrokenFiles::Skip => {
                        finished.broken.push(broken);
                    }
                    Err(error) => return Err(error),
                }
            }
            let broken = left_out + finished.broken.len();
            let total = self.labels.len();
            if let Some(last) = finished.broken.last().filter(|_| too_many(broken, total, total)) {
                return Err(DataError::Invalid(format!(
                    "{broken} of {total} pictures are broken, the last one {}, which {}. Check the dataset's disk",
                    last.file, last.detail
                )));
            }
            finished.pictures += waiting.len() as u64;
            done += chunk.len();
            report(done);
        }
        append_samples(&mut tar, waiting).map_err(unwritten)?;
        let written =
            tar.into_inner().and_then(|file| file.into_inner().map_err(io::IntoInnerError::into_error));
        let file = written.map_err(unwritten)?;
        file.sync_all().map_err(unwritten)?;
        finished.bytes = file.metadata().map_err(unwritten)?.len();
        finished.sampled = File::open(path).and_then(|file| sample_checksum(&file)).map_err(unwritten)?;
        Ok(finished)
    }

    /// Makes the samples of the pictures at `positions`, in this order. `first` is the number of the first sample. The pictures are
    /// read in ascending order.
    fn make(
        &self,
        positions: &[u32],
        first: usize,
        settings: &PrepareSettings,
    ) -> Vec<Result<Sample, DataError>> {
        let mut by_position: Vec<(u32, usize)> = positions.iter().copied().zip(first..).collect();
        by_position.sort_unstable();
        let ascending: Vec<u32> = by_position.iter().map(|(position, _)| *position).collect();
        let runs: Vec<&[u32]> = runs(&ascending).collect();
        let run = |encoder: &mut Encoder, run: &&[u32]| -> Vec<Result<(u32, Vec<u8>), DataError>> {
            let read = self.listing.read_run(run[0] as usize, run.len());
            let convert = |(position, bytes): (&u32, Result<Vec<u8>, DataError>)| {
                let prepared = encoder.convert(bytes?);
                let bytes = prepared.map_err(|detail| self.listing.broken(*position as usize, detail))?;
                Ok((self.labels[*position as usize], bytes))
            };
            run.iter().zip(read).map(convert).collect()
        };
        let made: Vec<Vec<_>> = runs.par_iter().map_init(|| Encoder::new(settings), run).collect();
        let numbers = by_position.into_iter().map(|(_, number)| number);
        let mut made: Vec<_> = numbers.zip(made.into_iter().flatten()).collect();
        made.sort_unstable_by_key(|(number, _)| *number);
        made.into_iter().map(|(number, made)| made.map(|(label, bytes)| (number, label, bytes))).collect()
    }
}

fn append_samples(tar: &mut tar::Builder<BufWriter<File>>, samples: Vec<Sample>) -> io::Result<()> {
    for (number, label, picture) in samples {
        append_member(tar, &format!("{number:09}.jpg"), &picture)?;
        append_member(tar, &format!("{number:09}.cls"), label.to_string().as_bytes())?;
    }
    Ok(())
}

fn append_member(tar: &mut tar::Builder<BufWriter<File>>, name: &str, content: &[u8]) -> io::Result<()> {
    // No owner and no time, so that the same pictures give the same bytes.
    let mut header = tar::Header::new_ustar();
    header.set_mode(0o644);
    header.set_size(content.len() as u64);
    tar.append_data(&mut header, name, content)
}
