//! Inspects a dataset: counts, sizes, mean and standard deviation, broken files.

use super::{
    Catalog, DataError, Picture, Samples, Split,
    held_out::{identities_of_files, most_even_division},
    label::class_counts,
};
use lockstep_protocol::dataset::{BrokenFile, DatasetInfo, SplitInfo, default_validation, too_few_classes};
use rayon::prelude::*;
use std::path::Path;

/// Height, width and channels of a picture.
type Size = (u32, u32, u32);

/// Maximum number of broken files that are named. All broken files are counted.
const MAX_NAMED_FILES: usize = 100;
/// Mean and standard deviation are computed from at most this many pictures, evenly spread over the split.
pub(super) const STATISTICS_SAMPLES: usize = 10_000;
/// Maximum number of pictures of a split that is decoded completely. In larger splits, only the pictures for the
/// statistics are decoded: all files have been read and have a valid end, and a job finds other damage when it decodes
/// the picture.
const MAX_DECODED: usize = 20_000;

/// The splits with samples, each with the number of samples.
///
/// # Errors
/// The errors of [`inspect`].
pub fn splits(path: &Path) -> Result<Vec<(String, u64)>, DataError> {
    let splits = Catalog::open(path)?.splits.into_iter();
    let counted = splits.map(|split| (split.name, split.labels.len() as u64));
    Ok(counted.filter(|(_, samples)| *samples > 0).collect())
}

/// The classes, in the order of their numbers.
///
/// # Errors
/// The errors of [`inspect`].
pub fn classes(path: &Path) -> Result<Vec<String>, DataError> {
    Ok(Catalog::open(path)?.classes)
}

/// Examines the files below `path`, decodes pictures unless there are very many, and describes the dataset.
///
/// # Errors
/// `path` has no known format (the message names the supported formats), or the dataset cannot be read.
pub fn inspect(path: &Path) -> Result<DatasetInfo, DataError> {
    let mut catalog = Catalog::open(path)?;
    if let Some(mistake) = too_few_classes(&catalog.classes) {
        return Err(DataError::Invalid(format!("{} {mistake}", path.display())));
    }
    let fingerprint = catalog.fingerprint(path);
    let mut broken = std::mem::take(&mut catalog.broken);
    let mut sizes = Vec::new();
    let (mut mean, mut std) = (Vec::new(), Vec::new());
    let others = catalog.splits.iter().filter(|split| split.name != "train" && !split.labels.is_empty());
    let needs_division = default_validation("test", others.map(|split| split.name.as_str())).is_none();
    let mut held_out = None;
    for split in &mut catalog.splits {
        broken.append(&mut split.broken);
        let is_train = split.name == "train";
        match &split.samples {
            Samples::Memory { pixels, height, width, channels } => {
                sizes.push((*height, *width, *channels));
                if is_train {
                    let (size, channels) = ((height * width * channels) as usize, *channels as usize);
                    (mean, std) = Moments::of_packed(pixels, size, channels).mean_std();
                }
            }
            Samples::Listed(listing) => {
                if is_train && needs_division {
                    let identities = identities_of_files(listing, &split.labels, &catalog.classes);
                    held_out = most_even_division(&identities, &split.labels, catalog.classes.len());
                }
                let every = listing.len().div_ceil(STATISTICS_SAMPLES).max(1);
                let decodes_all = listing.len() <= MAX_DECODED;
                let examine = |i: usize| -> Result<(Size, Option<Moments>), DataError> {
                    let (width, height) = listing.dimensions(i);
                    let is_measured = is_train && i.is_multiple_of(every);
                    if !decodes_all && !is_measured {
                        return Ok(((height, width, 3), None));
                    }
                    let picture = listing.picture(i)?;
                    // A job uses the central square of a picture, at a size that is not known here and makes little
                    // difference.
                    let side = width.min(height);
                    let moments = |picture: Picture| Moments::of(&picture.centre_square(side).pixels, 3);
                    Ok(((height, width, 3), is_measured.then(|| moments(picture))))
                };
                let examined: Vec<_> = (0..listing.len()).into_par_iter().map(examine).collect();
                let mut labels = Vec::with_capacity(listing.len());
                let mut moments = Moments::default();
                for (i, result) in examined.into_iter().enumerate() {
                    match result {
                        Ok((size, measured)) => {
                            sizes.push(size);
                            labels.push(split.labels[i]);
                            if let Some(measured) = measured {
                                moments.add(&measured);
                            }
                        }
                        Err(DataError::File(file)) => broken.push(file),
                        Err(other) => return Err(other),
                    }
                }
                split.labels = labels;
                if is_train {
                    (mean, std) = moments.mean_std();
                }
            }
        }
    }
    // Height and width are 0 if sizes differ.
    let (height, width, channels) = match sizes.first() {
        Some(first) if sizes.iter().all(|s| s == first) => *first,
        _ => (0, 0, 3),
    };
    let describe = |split: &Split| {
        let per_class = class_counts(catalog.classes.len(), split.labels.iter().copied());
        SplitInfo { name: split.name.clone(), samples: split.labels.len() as u64, per_class }
    };
    let mut sides: Vec<u32> = sizes.iter().map(|(height, width, _)| *height.min(width)).collect();
    sides.sort_unstable();
    Ok(DatasetInfo {
        format: catalog.format.into(),
        splits: catalog.splits.iter().map(describe).collect(),
        classes: catalog.classes,
        height,
        width,
        median_side: sides.get(sides.len() / 2).copied().unwrap_or_default(),
        channels,
        mean,
        std,
        broken_count: broken.len() as u64,
        held_out,
        unlabelled: catalog.unlabelled,
        fingerprint: Some(fingerprint),
        inspected_at: None,
        broken: broken.into_iter().take(MAX_NAMED_FILES).map(BrokenFile::shortened).collect(),
    })
}

/// Mean and mean square of each channel over pictures. Each picture has the same weight, because the network sees all of
/// them at one size.
#[derive(Debug, Default)]
pub(super) struct Moments {
    pictures: u64,
    /// For each channel, the sums over pictures of the mean and of the mean square.
    channels: Vec<(f64, f64)>,
}

impl Moments {
    /// The moments of one picture.
    pub(super) fn of(pixels: &[u8], channels: usize) -> Self {
        let mut counts = vec![[0u64; 256]; channels];
        for pixel in pixels.chunks_exact(channels) {
            for (count, value) in counts.iter_mut().zip(pixel) {
                count[usize::from(*value)] += 1;
            }
        }
        let of_channel = |counts: &[u64; 256]| {
            let total = counts.iter().sum::<u64>().max(1) as f64;
            let (mut sum, mut squares) = (0.0, 0.0);
            for (value, count) in counts.iter().enumerate() {
                let value = value as f64 / 255.0;
                sum += value * *count as f64;
                squares += value * value * *count as f64;
            }
            (sum / total, squares / total)
        };
        Self { pictures: 1, channels: counts.iter().map(of_channel).collect() }
    }

    /// The moments of pictures of `size` bytes each, stored one after another.
    pub(super) fn of_packed(pixels: &[u8], size: usize, channels: usize) -> Self {
        let every = (pixels.len() / size.max(1)).div_ceil(STATISTICS_SAMPLES).max(1);
        let mut all = Self::default();
        for picture in pixels.chunks_exact(size.max(1)).step_by(every) {
            all.add(&Self::of(picture, channels));
        }
        all
    }

    pub(super) fn add(&mut self, other: &Self) {
        self.pictures += other.pictures;
        self.channels.resize(self.channels.len().max(other.channels.len()), (0.0, 0.0));
        for (a, b) in self.channels.iter_mut().zip(&other.channels) {
            *a = (a.0 + b.0, a.1 + b.1);
        }
    }

    /// Mean and standard deviation of pixels scaled to 0..1.
    pub(super) fn mean_std(&self) -> (Vec<f32>, Vec<f32>) {
        let pictures = self.pictures.max(1) as f64;
        let of_channel = |(sum, squares): &(f64, f64)| {
            let mean = sum / pictures;
            let variance = squares / pictures - mean * mean;
            // A constant channel has the deviation 1, because values are divided by it.
            (mean as f32, if variance < 1e-8 { 1.0 } else { variance.sqrt() as f32 })
        };
        self.channels.iter().map(of_channel).unzip()
    }
}
