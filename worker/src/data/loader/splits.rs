//! The splits of a dataset as a job sees them: broken files found, pictures decoded when they are few.

use super::Pixels;
use crate::data::{
    Catalog, DataError, Picture, Samples,
    inspect::{Moments, STATISTICS_SAMPLES, Statistics},
    picture,
};
use lockstep_protocol::spec::DataSpec;
use rayon::prelude::*;
use std::{path::PathBuf, sync::Arc};

/// Pictures of a folder are kept decoded up to this many bytes a split; past it they are decoded when needed.
const CACHE_BYTES: usize = 1 << 30;

/// A split after its broken files were found.
pub(super) struct Opened {
    pub(super) pixels: Pixels,
    pub(super) labels: Arc<Vec<u32>>,
    pub(super) height: usize,
    pub(super) width: usize,
    pub(super) channels: usize,
}

pub(super) fn normalisation(
    spec: &DataSpec,
    train: &Opened,
    channels: usize,
    size: usize,
) -> Result<(Vec<f32>, Vec<f32>), DataError> {
    let (found_mean, found_std) = if spec.mean.is_some() && spec.std.is_some() {
        (Vec::new(), Vec::new())
    } else {
        match &train.pixels {
            Pixels::Memory(bytes) => Statistics::of_packed(bytes, size, channels).mean_std(),
            Pixels::Files { files, square } => {
                // Enough for three digits; decoding more would delay the first step.
                let every = files.len().div_ceil(STATISTICS_SAMPLES / 20).max(1);
                let look = |file: &PathBuf| {
                    let picture = Picture::read(file).ok()?;
                    let picture = match square {
                        Some(side) => picture.centre_square(*side),
                        None => picture,
                    };
                    Some(Moments::of(&picture.pixels, channels))
                };
                let counted: Vec<_> = files.par_iter().step_by(every).filter_map(look).collect();
                let mut all = Moments::default();
                counted.iter().for_each(|one| all.add(one));
                all.mean_std()
            }
        }
    };
    let fit = |name: &str, given: &Option<Vec<f32>>, found: Vec<f32>| match given {
        Some(values) if values.len() == channels => Ok(values.clone()),
        Some(values) if values.len() == 1 => Ok(vec![values[0]; channels]),
        Some(values) => Err(DataError::Invalid(format!(
            "data.{name} has {} values, but the pictures have {channels} channel{}",
            values.len(),
            if channels == 1 { "" } else { "s" }
        ))),
        None => Ok(found),
    };
    Ok((fit("mean", &spec.mean, found_mean)?, fit("std", &spec.std, found_std)?))
}

/// The one size that all pictures have, if they do; files with a broken header are taken out of the
/// catalog and named.
pub(super) fn sizes(
    catalog: &mut Catalog,
    skipped: &mut Vec<String>,
) -> Result<Option<(u32, u32)>, DataError> {
    let mut all = Vec::new();
    for split in &mut catalog.splits {
        match &mut split.samples {
            Samples::Memory { width, height, .. } => all.push((*width, *height)),
            Samples::Files(files) => {
                let looked: Vec<_> = files.par_iter().map(|f| picture::dimensions(f)).collect();
                all.extend(looked.iter().flatten().copied());
                leave_out(files, &mut split.labels, &looked, skipped);
            }
        }
        if split.labels.is_empty() {
            return Err(DataError::Invalid(format!(
                "no readable picture in split {:?}: {}",
                split.name,
                skipped.join("; ")
            )));
        }
    }
    Ok(all.first().copied().filter(|first| all.iter().all(|s| s == first)))
}

fn leave_out<T>(
    files: &mut Vec<PathBuf>,
    labels: &mut Vec<u32>,
    looked: &[Result<T, DataError>],
    skipped: &mut Vec<String>,
) {
    skipped.extend(looked.iter().filter_map(|r| r.as_ref().err().map(ToString::to_string)));
    let mut good = looked.iter().map(Result::is_ok);
    files.retain(|_| good.next().unwrap_or(false));
    let mut good = looked.iter().map(Result::is_ok);
    labels.retain(|_| good.next().unwrap_or(false));
}

/// Decodes splits that fit into memory, unless each step needs the `whole` pictures.
pub(super) fn open_splits(
    catalog: &mut Catalog,
    common: Option<(u32, u32)>,
    spec: &DataSpec,
    whole: bool,
    skipped: &mut Vec<String>,
) -> Result<Vec<Opened>, DataError> {
    let mut opened = Vec::new();
    for split in &mut catalog.splits {
        let mut labels = std::mem::take(&mut split.labels);
        let (pixels, width, height, channels) = match std::mem::replace(
            &mut split.samples,
            Samples::Files(Vec::new()),
        ) {
            Samples::Memory { pixels, height, width, channels } => {
                (Pixels::Memory(Arc::new(pixels)), width, height, channels)
            }
            Samples::Files(mut files) => {
                let largest = spec.image_size.as_ref().and(spec.evaluation_size());
                let (square, width, height) = match (common, largest) {
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
                let pixels = if !whole && files.len().saturating_mul(size) <= CACHE_BYTES {
                    let decoded: Vec<_> = files
                        .par_iter()
                        .map(|f| {
                            Picture::read(f).map(|p| match square {
                                Some(side) => p.centre_square(side).pixels,
                                None => p.pixels,
                            })
                        })
                        .collect();
                    leave_out(&mut files, &mut labels, &decoded, skipped);
                    Pixels::Memory(Arc::new(decoded.into_iter().flatten().flatten().collect()))
                } else {
                    Pixels::Files { files: Arc::new(files), square }
                };
                (pixels, width, height, 3)
            }
        };
        if labels.is_empty() {
            return Err(DataError::Invalid(format!(
                "no readable picture in split {:?}: {}",
                split.name,
                skipped.join("; ")
            )));
        }
        opened.push(Opened {
            pixels,
            labels: Arc::new(labels),
            height: height as usize,
            width: width as usize,
            channels: channels as usize,
        });
    }
    Ok(opened)
}
