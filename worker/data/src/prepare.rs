//! Prepares a copy of a dataset for training: WebDataset shards of small, upright JPEG pictures in random order.
//!
//! Each shard is written under a temporary name, synced to disk and renamed. The pictures of all shards are planned
//! in advance. So an interrupted copy continues with the interrupted shard, and has the same bytes as an
//! uninterrupted copy.

mod order;
mod picture;
mod record;
mod shard;
#[cfg(test)]
mod tests;

use super::{
    Catalog, DataError, MAX_NAMES_BYTES, Samples, Split, copy::Plan, index::Progress, listing::Listing,
    pattern, shards,
};
use lockstep_host::{files, write_atomically};
use lockstep_protocol::{dataset::BrokenFile, spec::BrokenFiles};
use picture::Encoder;
use rayon::prelude::*;
use record::Destination;
use std::{
    ops::{Range, RangeInclusive},
    path::Path,
};

/// Allowed short sides of a copy, in pixels.
pub const SHORT_SIDES: RangeInclusive<u32> = 16..=4096;
/// Allowed JPEG qualities of a copy, on libjpeg's scale.
pub const QUALITIES: RangeInclusive<u8> = 1..=100;
/// Approximate size of a shard: large enough that there are few files, each of which is read sequentially.
const SHARD_BYTES: u64 = 256 << 20;
/// Seed of the order of pictures ("shuffled" in ASCII), equal in every copy.
const ORDER_SEED: u64 = 0x7368_7566_666c_6564;
/// Maximum number of pictures that are converted in advance to estimate the mean size.
const MAX_MEASURED: usize = 256;

#[derive(Debug, Clone)]
pub struct PrepareSettings {
    /// Larger pictures are resized to a short side of this many pixels; see [`SHORT_SIDES`].
    pub short_side: u32,
    /// The JPEG quality; see [`QUALITIES`].
    pub quality: u8,
    /// Whether a picture that cannot be decoded ends the copy or is left out.
    pub broken_files: BrokenFiles,
    /// The approximate size of a shard in bytes.
    pub shard_bytes: u64,
}

impl Default for PrepareSettings {
    fn default() -> Self {
        Self { short_side: 256, quality: 90, broken_files: BrokenFiles::Fail, shard_bytes: SHARD_BYTES }
    }
}

/// The result of preparing a copy.
#[derive(Debug, Default)]
pub struct Prepared {
    /// The number of pictures in each split.
    pub splits: Vec<(String, u64)>,
    pub shards: u64,
    /// The number of these shards that existed already.
    pub kept_shards: u64,
    /// The size of all shards in bytes.
    pub bytes: u64,
    /// The pictures that were left out, with the reason.
    pub broken: Vec<BrokenFile>,
}

/// Writes a copy of the dataset at `path` to the folder `to`: `train-000000.tar` and so on, which Python's webdataset
/// can read, and `classes.txt`. Pictures are resized as by torchvision's `Resize(short_side, antialias=True)`, but
/// never enlarged. Small upright JPEG files are copied unchanged. All cores are used. `report` is called with the
/// progress.
///
/// # Errors
/// The dataset or the settings cannot be used, `to` has other content, a file cannot be written, or a picture is
/// broken.
pub fn prepare(
    path: &Path,
    to: &Path,
    settings: &PrepareSettings,
    report: impl Fn(Progress),
) -> Result<Prepared, DataError> {
    check_settings(settings)?;
    let catalog = Catalog::open(path)?;
    let sources = splits_to_copy(path, &catalog)?;
    let names = class_lines(path, &catalog.classes)?;
    let broken: Vec<BrokenFile> = catalog.all_broken().cloned().collect();
    if let (BrokenFiles::Fail, Some(first)) = (settings.broken_files, broken.first()) {
        let others = broken.len() - 1;
        let more = if others > 0 { format!(" (and {others} more are broken)") } else { String::new() };
        return Err(DataError::Invalid(format!(
            "{first}{more}; repair it, move it out of the dataset, or leave out broken files (--broken-files skip)"
        )));
    }
    // A file that cannot be read now may be readable later, and a copy without the file would lack the picture permanently.
    if let Some(BrokenFile { file, detail }) = broken.iter().find(|one| files::is_read_error(&one.detail)) {
        return Err(DataError::File(BrokenFile { file: file.clone(), detail: unread_detail(detail) }));
    }
    let PrepareSettings { short_side, quality, .. } = *settings;
    let plan = Plan { short_side, quality, source: catalog.fingerprint(path), per_shard: Vec::new() };
    let measure = || sources.iter().map(|(_, listing)| per_shard(listing, settings)).collect();
    let mut destination = Destination::open(path, to, plan, measure)?;
    let classes = to.join("classes.txt");
    write_atomically(&classes, names.as_bytes()).map_err(|error| cannot_be_written(&classes, &error))?;
    let total: u64 = sources.iter().map(|(_, listing)| listing.len() as u64).sum();
    let mut prepared = Prepared { broken, ..Prepared::default() };
    let mut done = 0;
    for (index, (Split { name, labels, .. }, listing)) in sources.iter().enumerate() {
        let order = order::shuffle(index, listing, destination.per_shard(index));
        let (mut pictures, mut left_out) = (0, 0);
        for (file, range) in planned_shards(name, listing.len(), destination.per_shard(index)) {
            let order = &order[range.clone()];
            let task = shard::Task { file: &file, first: range.start, order, labels, listing };
            let finished = match destination.find_finished(&file) {
                Some(finished) => {
                    prepared.kept_shards += 1;
                    finished
                }
                None => {
                    let report = |pictures: usize| report(Progress { done: done + pictures as u64, total });
                    let finished = task.write(to, settings, left_out, &report)?;
                    destination.add(&file, finished.clone())?;
                    finished
                }
            };
            if let (BrokenFiles::Fail, Some(broken)) = (settings.broken_files, finished.broken.first()) {
                return Err(DataError::File(broken.clone()));
            }
            done += range.len() as u64;
            report(Progress { done, total });
            pictures += finished.pictures;
            left_out += finished.broken.len();
            prepared.shards += 1;
            prepared.bytes += finished.bytes;
            prepared.broken.extend(finished.broken);
        }
        prepared.splits.push((name.clone(), pictures));
    }
    destination.finish()?;
    Ok(prepared)
}

fn check_settings(settings: &PrepareSettings) -> Result<(), DataError> {
    let wrong = |name: &str, given: u64, from: u64, to: u64| {
        Err(DataError::Invalid(format!("{name} must be from {from} to {to}, is {given}")))
    };
    if !SHORT_SIDES.contains(&settings.short_side) {
        let (from, to) = SHORT_SIDES.into_inner();
        return wrong("the short side", settings.short_side.into(), from.into(), to.into());
    }
    if !QUALITIES.contains(&settings.quality) {
        let (from, to) = QUALITIES.into_inner();
        return wrong("the quality", settings.quality.into(), from.into(), to.into());
    }
    Ok(())
}

fn splits_to_copy<'a>(path: &Path, catalog: &'a Catalog) -> Result<Vec<(&'a Split, &'a Listing)>, DataError> {
    let source_of = |split: &'a Split| match &split.samples {
        Samples::Memory { .. } => Err(DataError::Invalid(format!(
            "{} is {}, whose pictures are small and kept in memory: train on it directly",
            path.display(),
            catalog.format
        ))),
        Samples::Listed(_) if !shards::is_split_prefix(&split.name) => Err(DataError::Invalid(format!(
            "{} has a split {:?}, which cannot be the prefix of a shard's name: rename it to val or test, or remove it",
            path.display(),
            split.name
        ))),
        Samples::Listed(listing) => Ok((split, listing)),
    };
    catalog.splits.iter().map(source_of).collect()
}

/// The content of `classes.txt`.
fn class_lines(path: &Path, classes: &[String]) -> Result<String, DataError> {
    let wrong = |what: String| Err(DataError::Invalid(format!("{}: {what}", path.display())));
    if let Some(name) =
        classes.iter().find(|name| name.trim() != **name || name.is_empty() || name.contains('\n'))
    {
        return wrong(format!("class {name:?} cannot be a line of classes.txt; rename it"));
    }
    let text: String = classes.iter().flat_map(|name| [name.as_str(), "\n"]).collect();
    if text.len() as u64 > MAX_NAMES_BYTES {
        return wrong(format!("the names of classes have more than {MAX_NAMES_BYTES} bytes"));
    }
    Ok(text)
}

/// The number of a split's pictures that make a shard of about the requested size.
fn per_shard(listing: &Listing, settings: &PrepareSettings) -> u32 {
    let every = listing.len().div_ceil(MAX_MEASURED).max(1);
    let size = |encoder: &mut Encoder, index: usize| -> Option<u64> {
        let bytes = encoder.convert(listing.read(index).ok()?).ok()?;
        Some(shard::sample_bytes(bytes.len() as u64))
    };
    let sizes: Vec<u64> = (0..listing.len())
        .into_par_iter()
        .step_by(every)
        .map_init(|| Encoder::new(settings), size)
        .flatten()
        .collect();
    let mean = sizes.iter().sum::<u64>() / (sizes.len() as u64).max(1);
    let fitting_pictures = (settings.shard_bytes / mean.max(1)).max(1);
    // All shards get about the same number of pictures, so that the last shard is not small.
    let shards = (listing.len() as u64).div_ceil(fitting_pictures).clamp(1, pattern::MAX_SHARDS as u64);
    (listing.len() as u64).div_ceil(shards).max(1) as u32
}

/// The shards of a split: file name, and range in the order.
fn planned_shards(
    split: &str,
    pictures: usize,
    per_shard: u32,
) -> impl Iterator<Item = (String, Range<usize>)> {
    let per_shard = per_shard.max(1) as usize;
    (0..pictures.div_ceil(per_shard)).map(move |number| {
        let first = number * per_shard;
        (format!("{split}-{number:06}.tar"), first..(first + per_shard).min(pictures))
    })
}

/// The reason why a picture could not be read, as a phrase to follow its name.
fn unread_detail(detail: &str) -> String {
    format!(
        "{detail}. It is not left out of the copy, because it may be intact. Check the dataset's disk. The same command \
         continues from the shards that are finished"
    )
}

fn cannot_be_written(path: &Path, error: &std::io::Error) -> DataError {
    let detail = format!(
        "cannot be written: {error}. Finished shards are kept, and the same command continues after them"
    );
    DataError::file(path, detail)
}
