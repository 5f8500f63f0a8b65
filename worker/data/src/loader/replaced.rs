//! Replaces pictures that are found to be broken during training (`data.broken_files = "skip"`). In training, another
//! picture of the split is used. In validation, the picture is left out.
//!
//! The replacement depends only on the split and the set of its broken pictures, not on the order in which a rank met
//! them. So the replacement does not depend on the number of ranks, or on when a rank reads a file.

use super::{
    batch::Batch,
    part::{Opener, Part},
};
use crate::{DataError, Random};
use lockstep_host::lock;
use rayon::prelude::*;
use std::{
    collections::BTreeSet,
    sync::{Mutex, MutexGuard},
};

/// Purpose number of the random stream (see `shard.rs` for others).
const REPLACEMENT: u64 = 10;
/// Number of pictures that may be broken in a split of any size, unless all its pictures are broken.
const MIN_ALLOWED: usize = 16;
/// One in this many pictures of a larger split may be broken. If more are broken, the disk has probably failed, and
/// training on the rest is useless.
const ALLOWED_ONE_IN: usize = 10;
/// Maximum number of draws for one replacement. With at most a tenth of the pictures broken, a few suffice.
const MAX_DRAWS: usize = 1000;

/// Whether more pictures are broken than allowed, in training or in preparing a copy. `seen` of a split's `total`
/// pictures have been read.
pub fn too_many(broken: usize, seen: usize, total: usize) -> bool {
    broken > MIN_ALLOWED.max(seen / ALLOWED_ONE_IN) || (broken > 0 && broken >= total)
}

/// The broken pictures of a part.
#[derive(Debug)]
pub(super) struct Broken {
    /// Whether broken files are allowed (`data.broken_files = "skip"`). Otherwise the first broken file is an error.
    pub(super) is_allowed: bool,
    counts: Mutex<BrokenCounts>,
}

#[derive(Debug, Default)]
pub(super) struct BrokenCounts {
    /// Number of pictures requested so far, at most the number of the part's pictures.
    pub(super) requested: usize,
    /// Positions of broken pictures in the split.
    pub(super) broken: BTreeSet<u32>,
    /// Log lines that have not been returned yet.
    pub(super) unlogged: Vec<String>,
}

impl Broken {
    pub(super) fn new(is_allowed: bool) -> Self {
        Self { is_allowed, counts: Mutex::default() }
    }

    /// Log lines for the pictures found since the last call, and the number of all broken pictures.
    pub(super) fn take_unlogged(&self) -> (Vec<String>, usize) {
        let mut counts = self.counts();
        (std::mem::take(&mut counts.unlogged), counts.broken.len())
    }

    pub(super) fn counts(&self) -> MutexGuard<'_, BrokenCounts> {
        lock(&self.counts)
    }
}

impl Part {
    /// Makes a batch of the pictures at the positions `chosen`. Each broken picture is replaced by another readable
    /// picture of the part. Fails if too many of the pictures that this rank has read are broken. A rank reads pictures in random
    /// order, so these pictures are representative.
    pub(super) fn with_replacements(
        &self,
        chosen: &[u32],
        make: impl Fn(&[u32]) -> Result<Batch, DataError>,
    ) -> Result<Batch, DataError> {
        let requested = {
            let mut counts = self.broken.counts();
            counts.requested = (counts.requested + chosen.len()).min(self.chosen.len());
            counts.requested
        };
        let replaced = |broken: &BTreeSet<u32>| -> Vec<u32> {
            chosen.iter().map(|position| replacement(self, *position, broken)).collect()
        };
        self.retry(replaced, make, Some(requested))
    }

    /// Makes a batch of the pictures at the positions `chosen`, without the broken pictures. Too many broken pictures
    /// are noticed when the pictures of all ranks are counted, because the pictures of one rank are consecutive and not
    /// representative.
    pub(super) fn without_broken(
        &self,
        chosen: &[u32],
        make: impl Fn(&[u32]) -> Result<Batch, DataError>,
    ) -> Result<Batch, DataError> {
        let readable = |broken: &BTreeSet<u32>| -> Vec<u32> {
            chosen.iter().copied().filter(|position| !broken.contains(position)).collect()
        };
        self.retry(readable, make, None)
    }

    /// Makes a batch of the pictures at `positions`, which depend on the broken pictures, and makes it again if more
    /// pictures are found to be broken. Fails if too many of `requested` pictures are broken.
    fn retry(
        &self,
        positions: impl Fn(&BTreeSet<u32>) -> Vec<u32>,
        make: impl Fn(&[u32]) -> Result<Batch, DataError>,
        requested: Option<usize>,
    ) -> Result<Batch, DataError> {
        loop {
            let positions = positions(&self.broken.counts().broken);
            match make(&positions) {
                Err(error) if self.broken.is_allowed => self.record_broken(&positions, error)?,
                made => return made,
            }
            let counts = self.broken.counts();
            if let Some(requested) = requested
                && too_many(counts.broken.len(), requested, self.chosen.len())
            {
                let text = too_many_text(counts.broken.len(), requested, counts.unlogged.last());
                return Err(DataError::Invalid(text));
            }
        }
    }

    /// Records which of `positions` are broken. All of them are examined, because broken pictures often come in runs (a
    /// lost shard), and after each discovery the batch is made again.
    fn record_broken(&self, positions: &[u32], error: DataError) -> Result<(), DataError> {
        let (DataError::File(broken), Some(files)) = (&error, self.files()) else {
            return Err(error);
        };
        let examine = |opener: &mut Opener, position: &u32| match self.picture(*position as usize, opener) {
            Err(DataError::File(broken)) => Some((*position, broken.to_string())),
            _ => None,
        };
        let mut found: Vec<_> =
            positions.par_iter().map_init(Opener::default, examine).filter_map(|found| found).collect();
        if found.is_empty() {
            // The picture could be read this time. It still counts as broken, because every epoch reads it.
            let named = positions.iter().find(|position| files.name(**position as usize) == broken.file);
            found.extend(named.map(|position| (*position, broken.to_string())));
        }
        if found.is_empty() {
            return Err(error);
        }
        let mut counts = self.broken.counts();
        for (position, words) in found {
            if counts.broken.insert(position) {
                counts.unlogged.push(words);
            }
        }
        Ok(())
    }
}

/// The error text if `broken` of the `seen` pictures are broken, which is too many. `last` names a broken picture and the reason.
pub fn too_many_text(broken: usize, seen: usize, last: Option<&String>) -> String {
    let last = last.map(|words| format!(", the last one {words}")).unwrap_or_default();
    format!(
        "{broken} of {seen} pictures cannot be read any more{last}. Is the dataset's disk still there? Bring it back and retry \
         the job"
    )
}

/// The picture used for `position`: the picture at this position or, if it is broken, the first readable picture of several
/// random draws. Using the neighbour instead would give pictures of the same class, and one picture for a whole run of
/// broken pictures.
fn replacement(part: &Part, position: u32, broken: &BTreeSet<u32>) -> u32 {
    if !broken.contains(&position) {
        return position;
    }
    let mut random = Random::new(&[REPLACEMENT, position.into()]);
    let mut drawn = (0..MAX_DRAWS).map(|_| part.chosen[random.below(part.chosen.len() as u64) as usize]);
    drawn.find(|replacement| !broken.contains(replacement)).unwrap_or(position)
}

#[cfg(test)]
mod tests {
    use crate::{
        loader::{DataSource, EpochPlan},
        test_catalog::{self, assert_contains},
    };
    use lockstep_protocol::spec::{BrokenFiles, DataSpec, Validation};
    use std::{collections::BTreeMap, fs, path::Path};
    use tempfile::TempDir;

    const PER_CLASS: u32 = 20;

    /// Index, label and first pixel of a sample.
    type Sample = (u64, u32, [u32; 3]);

    /// A dataset of two classes in which all pictures differ.
    fn folder() -> TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (c, class) in (0..).zip(["cat", "dog"]) {
            test_catalog::write_class(&dir.path().join("train").join(class), 0..PER_CLASS, |number| {
                image::RgbImage::from_pixel(8, 8, image::Rgb([c * 90, number as u8 * 9, 7]))
            });
        }
        dir
    }

    fn open(dir: &Path, broken_files: BrokenFiles, validation: Validation) -> DataSource {
        let (mean, std) = (Some(vec![0.0]), Some(vec![1.0 / 255.0]));
        let spec = DataSpec {
            validation,
            broken_files,
            crop_padding: 0,
            horizontal_flip: false,
            mean,
            std,
            ..DataSpec::default()
        };
        DataSource::of_catalog(test_catalog::open(dir).unwrap(), dir, &spec, 3, 0).unwrap()
    }

    fn no_validation() -> Validation {
        Validation::Split("none".into())
    }

    /// The samples that all ranks read in two epochs, by epoch and step.
    fn read_samples(dir: &Path, world_size: u32) -> BTreeMap<(u32, usize), Vec<Sample>> {
        let mut all: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for rank in 0..world_size {
            let source = open(dir, BrokenFiles::Skip, no_validation());
            // As if the pictures had been readable when the job began.
            break_some(dir);
            for epoch in 0..2 {
                let batch_size = 8 / world_size as usize;
                let plan = EpochPlan { epoch, rank, world_size, threads: 2, ..EpochPlan::of(batch_size) };
                for (step, batch) in source.epoch(plan).enumerate() {
                    let batch = batch.unwrap();
                    assert_eq!(batch.global_samples, 8);
                    let picture = batch.images.len() / batch.labels.len();
                    let samples = (0..batch.labels.len()).map(|i| {
                        let pixel = &batch.images[i * picture..];
                        let colour = [pixel[0], pixel[1], pixel[2]].map(|v| v.round() as u32);
                        (batch.indices[i], batch.labels[i], colour)
                    });
                    all.entry((epoch, step)).or_default().extend(samples);
                }
            }
            repair(dir);
        }
        all
    }

    /// Breaks two consecutive pictures and the last one: two files are removed, and one is no picture any more.
    fn break_some(dir: &Path) {
        for name in ["cat/004.png", "cat/005.png", "dog/019.png"] {
            let path = dir.join("train").join(name);
            fs::rename(&path, path.with_extension("away")).unwrap();
        }
        fs::write(dir.join("train/cat/005.png"), "I am no picture").unwrap();
    }

    fn repair(dir: &Path) {
        for name in ["cat/004.png", "cat/005.png", "dog/019.png"] {
            let path = dir.join("train").join(name);
            fs::rename(path.with_extension("away"), &path).unwrap();
        }
    }

    #[test]
    fn replacements_do_not_depend_on_the_number_of_ranks() {
        let dir = folder();
        let single = read_samples(dir.path(), 1);
        assert_eq!(single.len(), 10, "five steps in each of two epochs");
        assert_eq!(read_samples(dir.path(), 2), single);
        assert_eq!(read_samples(dir.path(), 4), single);
        for epoch in 0..2 {
            let mut counts = BTreeMap::new();
            for samples in single.iter().filter(|((e, _), _)| *e == epoch).map(|(_, samples)| samples) {
                for (index, label, colour) in samples {
                    let class = index / u64::from(PER_CLASS);
                    assert_eq!((u64::from(*label), colour[0], colour[2]), (class, class as u32 * 90, 7));
                    assert_eq!(u64::from(colour[1]), index % u64::from(PER_CLASS) * 9);
                    *counts.entry(*index).or_insert(0) += 1;
                }
            }
            assert_eq!(counts.values().sum::<i32>(), 40, "all steps are full");
            let missing: Vec<u64> = (0..40).filter(|i| !counts.contains_key(i)).collect();
            assert_eq!(missing, [4, 5, 39]);
        }
    }

    #[test]
    fn consecutive_broken_pictures_have_different_replacements() {
        let dir = folder();
        let source = open(dir.path(), BrokenFiles::Skip, no_validation());
        for number in 2..16 {
            fs::remove_file(dir.path().join(format!("train/cat/{number:03}.png"))).unwrap();
        }
        let plan = EpochPlan { threads: 2, ..EpochPlan::of(40) };
        let batch = source.epoch(plan).next().unwrap().unwrap();
        let mut counts = BTreeMap::new();
        batch.indices.iter().for_each(|index| *counts.entry(*index).or_insert(0) += 1);
        assert!(counts.values().all(|times| *times <= 5), "{counts:?}");
        assert!(
            batch.labels.iter().filter(|label| **label == 1).count() > 20,
            "replacements have other classes, too"
        );
        assert_eq!(source.take_newly_broken().1, 14);
    }

    #[test]
    fn each_broken_picture_is_logged_once_and_left_out_of_validation() {
        let dir = folder();
        let source = open(dir.path(), BrokenFiles::Skip, Validation::Fraction(0.5));
        let count_validated = || -> usize {
            let batches = source.validation(0, 1, 1, 2).map(|batch| batch.unwrap().labels.len());
            batches.inspect(|count| assert_eq!(*count, 1)).sum()
        };
        let all = source.shape.validation_samples as usize;
        assert_eq!((count_validated(), source.take_newly_broken()), (all, (vec![], 0)));
        let (rank, world_size, batch_size, threads) = (0, 1, 40, 1);
        let held_out =
            source.validation(rank, world_size, batch_size, threads).next().unwrap().unwrap().indices;
        let index = held_out[7];
        let class = ["cat", "dog"][index as usize / 20];
        fs::remove_file(dir.path().join(format!("train/{class}/{:03}.png", index % 20))).unwrap();
        assert_eq!(count_validated(), all - 1);
        let (messages, count) = source.take_newly_broken();
        assert!(
            count == 1 && messages[0].contains(&format!("{class}/{:03}.png cannot be read", index % 20)),
            "{messages:?}"
        );
        assert_eq!((count_validated(), source.take_newly_broken()), (all - 1, (vec![], 1)));
    }

    #[test]
    fn broken_pictures_are_fatal_without_skip_or_if_too_many() {
        let dir = folder();
        let plan = EpochPlan::of(8);
        let first_error =
            |source: &DataSource| source.epoch(plan).find_map(Result::err).map(|e| e.to_string());
        let strict = open(dir.path(), BrokenFiles::Fail, no_validation());
        let (few, many) = (
            open(dir.path(), BrokenFiles::Skip, no_validation()),
            open(dir.path(), BrokenFiles::Skip, no_validation()),
        );
        break_some(dir.path());
        assert_contains(first_error(&strict).expect("an error"), &[".png "]);
        // Sixteen pictures may break in any split; seventeen are too many.
        repair(dir.path());
        let remove =
            |number: usize| fs::remove_file(dir.path().join(format!("train/cat/{number:03}.png"))).unwrap();
        (0..16).for_each(remove);
        assert_eq!(first_error(&few), None);
        remove(16);
        assert_contains(
            first_error(&many).expect("an error"),
            &["17 of ", "pictures cannot be read any more"],
        );
    }
}
