//! Pictures as stored in a dataset, independent of a job.

use super::{Catalog, DataError, Picture, Samples, random::Random};
use std::path::Path;

/// Pictures of a split.
#[derive(Debug)]
pub struct StoredPictures {
    /// The number of all pictures of the split, or of the class.
    pub total: u64,
    /// The names of the classes, in the order of the labels.
    pub classes: Vec<String>,
    /// The pictures that were read, without pictures whose files are broken.
    pub pictures: Vec<StoredPicture>,
}

#[derive(Debug)]
pub struct StoredPicture {
    /// The position in the split.
    pub position: u64,
    pub label: u32,
    /// The name of the picture's file. `None` for a picture in a packed file.
    pub file: Option<String>,
    pub picture: Picture,
}

/// Reads `limit` pictures of a split, or of one of its classes, after skipping `offset` pictures. The order is the
/// split's own, or is shuffled with the seed `shuffle`.
///
/// # Errors
/// The split, the class or the dataset does not exist.
pub fn read_stored(
    path: &Path,
    split: &str,
    class: Option<&str>,
    shuffle: Option<u64>,
    offset: u64,
    limit: usize,
) -> Result<StoredPictures, DataError> {
    let catalog = Catalog::open(path)?;
    let Some(found) = catalog.split(split) else {
        let names: Vec<_> = catalog.splits.iter().map(|s| s.name.as_str()).collect();
        let names = names.join(", ");
        return Err(DataError::Invalid(format!("there is no split {split:?}; there are {names}")));
    };
    let label_of = |name: &str| {
        catalog.classes.iter().position(|class| class == name).ok_or_else(|| {
            let classes = catalog.classes.join(", ");
            DataError::Invalid(format!("there is no class {name:?}; there are {classes}"))
        })
    };
    let label = class.map(label_of).transpose()?;
    let has_label = |i: &usize| label.is_none_or(|label| found.labels[*i] as usize == label);
    let mut matching: Vec<usize> = (0..found.labels.len()).filter(has_label).collect();
    if let Some(seed) = shuffle {
        let order = Random::new(&[seed]).permutation(matching.len());
        matching = order.into_iter().map(|position| matching[position as usize]).collect();
    }
    let offset = usize::try_from(offset).unwrap_or(usize::MAX);
    let pictures = matching
        .iter()
        .skip(offset)
        .take(limit)
        .filter_map(|&i| {
            let (file, picture) = match &found.samples {
                Samples::Memory { pixels, height, width, channels } => {
                    let size = (height * width * channels) as usize;
                    let pixels = pixels.get(i * size..(i + 1) * size)?.to_vec();
                    (None, Picture { width: *width, height: *height, channels: *channels, pixels })
                }
                Samples::Listed(listing) => (Some(listing.name(i)), listing.picture(i).ok()?),
            };
            Some(StoredPicture { position: i as u64, label: found.labels[i], file, picture })
        })
        .collect();
    Ok(StoredPictures { total: matching.len() as u64, classes: catalog.classes, pictures })
}
