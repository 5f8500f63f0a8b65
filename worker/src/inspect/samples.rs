//! Pictures of a dataset, as stored or as used by a job.

use base64::Engine as _;
use image::{ExtendedColorType, ImageEncoder, codecs::png::PngEncoder, imageops::FilterType};
use lockstep_data::{DataError, Picture, StoredPicture, loader::DataSource, read_stored};
use lockstep_protocol::inspect::{Pick, Sample, Samples};
use std::path::Path;

/// Maximum number of pictures in a reply.
const MAX_PICTURES: usize = 200;
/// Larger colour pictures are reduced to this longest side, in pixels.
const MAX_SIDE: u32 = 160;

pub(super) fn pick(path: &Path, pick: Pick) -> Result<Samples, DataError> {
    match pick {
        Pick::Stored { split, class, shuffle, offset, limit } => {
            let limit = (limit as usize).min(MAX_PICTURES);
            let found = read_stored(path, &split, class.as_deref(), shuffle, offset, limit)?;
            let samples =
                found.pictures.into_iter().map(|StoredPicture { position, label, file, picture }| {
                    Ok(Sample { index: position, label, epoch: None, file, png: encode_png(picture)? })
                });
            let samples = samples.collect::<Result<_, DataError>>()?;
            Ok(Samples { total: found.total, classes: found.classes, samples })
        }
        Pick::Seen { data, seed, validation, mut places, epochs } => {
            let source = DataSource::open(path, &data, seed)?;
            let shape = &source.shape;
            let split_size = if validation { shape.validation_samples } else { shape.train_samples };
            // Positions after the last picture are dropped from a page of augmented pictures, unless the first position
            // is invalid too. The request then fails.
            if !epochs.is_empty() && places.first().is_some_and(|first| *first < split_size) {
                places.retain(|place| *place < split_size);
            }
            let total = if epochs.is_empty() { places.len() as u64 } else { split_size };
            let epochs: Vec<Option<u32>> =
                if epochs.is_empty() { vec![None] } else { epochs.into_iter().map(Some).collect() };
            let mut samples = Vec::new();
            let requested = places.into_iter().flat_map(|place| epochs.iter().map(move |e| (place, *e)));
            for (index, epoch) in requested.take(MAX_PICTURES) {
                let (label, picture) = source.picture(validation, index, epoch)?;
                let file = source.file(validation, index);
                samples.push(Sample { index, label, epoch, file, png: encode_png(picture)? });
            }
            Ok(Samples { total, classes: source.shape.classes.clone(), samples })
        }
    }
}

fn encode_png(picture: Picture) -> Result<String, DataError> {
    let Picture { width, height, channels, pixels } = shrink(picture);
    let colour = if channels == 1 { ExtendedColorType::L8 } else { ExtendedColorType::Rgb8 };
    let mut bytes = Vec::new();
    PngEncoder::new(&mut bytes)
        .write_image(&pixels, width, height, colour)
        .map_err(|e| DataError::Invalid(format!("a picture cannot be shown: {e}")))?;
    Ok(base64::engine::general_purpose::STANDARD.encode(bytes))
}

fn shrink(picture: Picture) -> Picture {
    let longest = picture.width.max(picture.height);
    if longest <= MAX_SIDE || picture.channels != 3 {
        return picture;
    }
    let Picture { width, height, channels, pixels } = picture;
    let side = |n: u32| (u64::from(n) * u64::from(MAX_SIDE) / u64::from(longest)).max(1) as u32;
    match image::RgbImage::from_raw(width, height, pixels) {
        Some(whole) => {
            let scaled = image::imageops::resize(&whole, side(width), side(height), FilterType::Triangle);
            Picture { width: scaled.width(), height: scaled.height(), channels, pixels: scaled.into_raw() }
        }
        // The number of bytes does not match the size, which no decoder produces.
        None => Picture { width: 1, height: 1, channels: 3, pixels: vec![0; 3] },
    }
}
