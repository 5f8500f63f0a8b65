//! Catalogs of test datasets, opened without an index, and small pictures.

use crate::{Catalog, DataError, Samples, Split, index::IndexStore, listing::Listing};
use image::{ImageFormat, RgbImage};
use serde_json::Value;
use std::{
    fs,
    io::Cursor,
    ops::Range,
    path::{Path, PathBuf},
};

/// The path of a file of this repository.
pub(crate) fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

pub(crate) fn open(path: &Path) -> Result<Catalog, DataError> {
    Catalog::open_with(path, &IndexStore::at(Path::new("/nowhere"), usize::MAX))
}

pub(crate) fn listing(split: &Split) -> &Listing {
    match &split.samples {
        Samples::Listed(listing) => listing,
        Samples::Memory { .. } => panic!("{split:?}"),
    }
}

/// Fails unless `text` contains all `parts`.
#[track_caller]
pub(crate) fn assert_contains(text: impl ToString, parts: &[&str]) {
    let text = text.to_string();
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
}

/// All files that were left out, with the reasons.
pub(crate) fn broken(catalog: &Catalog) -> Vec<String> {
    catalog.all_broken().map(ToString::to_string).collect()
}

/// Fails unless exactly these members of `container` were left out, each with a reason that begins with the given text.
pub(crate) fn assert_broken(catalog: &Catalog, container: &str, expected: &[(&str, &str)]) {
    let messages = broken(catalog);
    for (member, reason) in expected {
        let expected = format!("{container}/{member} {reason}");
        assert!(messages.iter().any(|text| text.contains(&expected)), "{expected} is not in {messages:#?}");
    }
    assert_eq!(messages.len(), expected.len(), "{messages:#?}");
}

/// Compares all samples with the samples that `expected.json` in `fixtures` lists as `part`. `is_named` tells whether a name is a
/// listed sample's name.
pub(crate) fn assert_samples(
    catalog: &Catalog,
    fixtures: &Path,
    part: &str,
    is_named: impl Fn(&str, &Value) -> bool,
) {
    let text = fs::read(fixtures.join("expected.json")).expect("the fixture");
    let expected: Value = serde_json::from_slice(&text).expect("JSON");
    let mut wanted = expected[part].as_array().expect("a list").iter();
    for split in &catalog.splits {
        let listing = listing(split);
        for (i, label) in split.labels.iter().enumerate() {
            let wanted = wanted.next().expect("no more samples than were written");
            assert_eq!(split.name, wanted["split"].as_str().expect("a name"));
            let name = listing.name(i);
            assert!(is_named(&name, wanted), "{name} is not {wanted}");
            let class = wanted["label"].as_str().map_or_else(|| wanted["label"].to_string(), str::to_owned);
            assert_eq!(catalog.classes[*label as usize], class, "{name}");
            let picture = listing.picture(i).expect("decodes");
            assert_eq!((picture.width, picture.height, picture.channels), (12, 8, 3));
            assert_eq!(listing.dimensions(i), (12, 8));
            for channel in 0..3 {
                let values = picture.pixels.iter().skip(channel).step_by(3);
                let mean = values.map(|v| f64::from(*v)).sum::<f64>() / 96.0;
                let wanted = wanted["mean"][channel].as_f64().expect("a number");
                // JPEG is lossy.
                let close = if listing.is_jpeg(i) { 3.0 } else { 1e-9 };
                assert!((mean - wanted).abs() < close, "{name}: {mean} is not {wanted}");
            }
        }
    }
    assert_eq!(wanted.next(), None, "all samples were read");
}

/// Writes the pictures `000.png` and so on into a class folder.
pub(crate) fn write_class(folder: &Path, numbers: Range<u32>, picture: impl Fn(u32) -> RgbImage) {
    fs::create_dir_all(folder).unwrap();
    for number in numbers {
        picture(number).save(folder.join(format!("{number:03}.png"))).unwrap();
    }
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
