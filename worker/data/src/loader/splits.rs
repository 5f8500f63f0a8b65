//! Opens the splits of a dataset for a job: finds broken files, and decodes pictures in advance if they fit in memory.

use super::part::{OpenSplit, Pixels};
use crate::{
    Catalog, DataError, Samples, Split,
    held_out::{self, Identity},
    inspect::{Moments, STATISTICS_SAMPLES},
    listing::Listing,
};
use lockstep_protocol::spec::DataSpec;
use rayon::prelude::*;
use std::sync::Arc;

/// Maximum size of a split whose decoded pictures are kept in memory. Larger splits are decoded on demand.
pub(super) const CACHE_BYTES: usize = 1 << 30;

/// Mean and standard deviation of each channel: the job's values, otherwise measured on training pictures.
pub(super) fn normalisation(spec: &DataSpec, train: &OpenSplit) -> (Vec<f32>, Vec<f32>) {
    let [height, width, channels] = train.size;
    let (found_mean, found_std) = if spec.mean.is_some() && spec.std.is_some() {
        (Vec::new(), Vec::new())
    } else {
        match &train.pixels {
            Pixels::Memory(bytes) => {
                Moments::of_packed(bytes, height * width * channels, channels).mean_std()
            }
            Pixels::Files { files, square } => {
                // 500 pictures give three digits. Decoding more would delay the first step.
                let every = files.len().div_ceil(STATISTICS_SAMPLES / 20).max(1);
                let moments_of = |i: usize| Some(Moments::of(&decode(files, i, *square).ok()?, channels));
                let counted: Vec<_> =
                    (0..files.len()).into_par_iter().step_by(every).filter_map(moments_of).collect();
                let mut all = Moments::default();
                counted.iter().for_each(|moments| all.add(moments));
                all.mean_std()
            }
        }
    };
    // The values of a recipe are for RGB. Grey pictures use the average of the three values.
    let fit = |given: &Option<Vec<f32>>, found: Vec<f32>| match given {
        Some(values) if values.len() == channels => values.clone(),
        Some(values) => vec![values.iter().sum::<f32>() / values.len() as f32; channels],
        None => found,
    };
    (fit(&spec.mean, found_mean), fit(&spec.std, found_std))
}

/// The width and height of the pictures, if all pictures have the same size.
pub(super) fn common_size(catalog: &Catalog, skipped: &[String]) -> Result<Option<(u32, u32)>, DataError> {
    let (mut first, mut is_common) = (None, true);
    for split in &catalog.splits {
        let mut add = |size: (u32, u32)| is_common &= *first.get_or_insert(size) == size;
        match &split.samples {
            Samples::Memory { width, height, .. } => add((*width, *height)),
            Samples::Listed(listing) => (0..listing.len()).for_each(|i| add(listing.dimensions(i))),
        }
        if split.labels.is_empty() {
            return Err(no_readable_picture(&split.name, skipped));
        }
    }
    Ok(first.filter(|_| is_common))
}

fn no_readable_picture(split: &str, skipped: &[String]) -> DataError {
    DataError::Invalid(format!(
        "no readable picture in split {split:?}: {}{}",
        skipped.iter().take(20).cloned().collect::<Vec<_>>().join("; "),
        if skipped.len() > 20 { "; ..." } else { "" }
    ))
}

/// The pixels of a file, or of its centred square scaled to the side `square`.
fn decode(files: &Listing, index: usize, square: Option<u32>) -> Result<Vec<u8>, DataError> {
    let picture = files.picture(index)?;
    Ok(match square {
        Some(side) => picture.centre_square(side).pixels,
        None => picture.pixels,
    })
}

/// Opens the splits. Identities are computed only for the pictures of the split that contains the validation pictures. Splits that fit
/// in `max_cached_bytes` bytes are decoded, unless each step needs whole pictures (`needs_whole`).
pub(super) fn open_splits(
    catalog: &mut Catalog,
    common_size: Option<(u32, u32)>,
    spec: &DataSpec,
    needs_whole: bool,
    max_cached_bytes: usize,
    skipped: &mut Vec<String>,
) -> Result<Vec<(OpenSplit, Vec<Identity>)>, DataError> {
    let mut opened = Vec::new();
    for Split { name, mut labels, samples, .. } in std::mem::take(&mut catalog.splits) {
        let (mut decoded_files, mut identities) = (None, Vec::new());
        let has_validation = name == held_out::validation_split_name(spec);
        let (pixels, width, height, channels) = match samples {
            Samples::Memory { pixels, height, width, channels } => {
                if has_validation {
                    identities =
                        held_out::identities_of_packed(&pixels, (height * width * channels) as usize);
                }
                (Pixels::Memory(Arc::new(pixels)), width, height, channels)
            }
            Samples::Listed(mut files) => {
                let largest = spec.image_size.as_ref().and(spec.effective_validation_size());
                let (square, width, height) = match (common_size, largest) {
                    (Some((width, height)), None) => (None, width, height),
                    (Some((width, height)), Some(side)) if width == height && width <= side => {
                        (None, width, height)
                    }
                    (_, Some(side)) => (Some(side), side, side),
                    (None, None) => {
                        return Err(DataError::Invalid(
                            "the pictures differ in size: set data.image_size, the side of the square that the network sees".into(),
                        ));
                    }
                };
                let size = width as usize * height as usize * 3;
                let is_kept_decoded = !needs_whole && files.len().saturating_mul(size) <= max_cached_bytes;
                let decode = |index: usize| decode(&files, index, square);
                let decoded: Option<Vec<_>> =
                    is_kept_decoded.then(|| (0..files.len()).into_par_iter().map(decode).collect());
                if let Some(decoded) = &decoded {
                    skipped.extend(decoded.iter().filter_map(|r| r.as_ref().err().map(ToString::to_string)));
                    let is_readable: Vec<bool> = decoded.iter().map(Result::is_ok).collect();
                    files.retain(&mut labels, &is_readable);
                }
                if has_validation {
                    identities = held_out::identities_of_files(&files, &labels, &catalog.classes);
                }
                let pixels = match decoded {
                    Some(decoded) => {
                        decoded_files = Some(files);
                        Pixels::Memory(Arc::new(decoded.into_iter().flatten().flatten().collect()))
                    }
                    None => Pixels::Files { files, square },
                };
                (pixels, width, height, 3)
            }
        };
        if labels.is_empty() {
            return Err(no_readable_picture(&name, skipped));
        }
        let size = [height, width, channels].map(|length| length as usize);
        opened.push((OpenSplit { pixels, decoded_files, labels, size }, identities));
    }
    Ok(opened)
}
