//! Catalogs of test datasets, opened without an index, and small pictures.

use crate::{Catalog, DataError, Samples, Split, index::IndexStore, listing::Listing};
use image::{ImageFormat, RgbImage};
use std::{io::Cursor, path::Path};

pub(crate) fn open(path: &Path) -> Result<Catalog, DataError> {
    Catalog::open_with(path, &IndexStore::at(Path::new("/nowhere"), usize::MAX))
}

pub(crate) fn listing(split: &Split) -> &Listing {
    match &split.samples {
        Samples::Listed(listing) => listing,
        Samples::Memory { .. } => panic!("{split:?}"),
    }
}

/// All files that were left out, with the reasons.
pub(crate) fn broken(catalog: &Catalog) -> Vec<String> {
    catalog.all_broken().map(ToString::to_string).collect()
}

pub(crate) fn encode(picture: &RgbImage, format: ImageFormat) -> Vec<u8> {
    let mut to = Cursor::new(Vec::new());
    picture.write_to(&mut to, format).unwrap();
    to.into_inner()
}

/// A PNG file of 4 x 4 pixels.
pub(crate) fn png() -> Vec<u8> {
    encode(&RgbImage::new(4, 4), ImageFormat::Png)
}
