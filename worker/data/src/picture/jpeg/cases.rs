//! JPEG files of all kinds, and the pixels that libjpeg decodes from them; see `tests/pytorch/make_jpegs.py`.

use flate2::read::GzDecoder;
use std::{collections::BTreeMap, io::Read, path::PathBuf};

/// A file and its pixels.
pub(super) struct Case {
    pub(super) name: String,
    pub(super) file: Vec<u8>,
    pub(super) pixels: image::RgbImage,
}

pub(super) fn files() -> BTreeMap<PathBuf, Vec<u8>> {
    let packed = include_bytes!(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/pytorch/fixtures/pictures/jpegs.tar.gz"
    ));
    let mut files = BTreeMap::new();
    for entry in tar::Archive::new(GzDecoder::new(&packed[..])).entries().unwrap() {
        let mut entry = entry.unwrap();
        let mut file = Vec::new();
        entry.read_to_end(&mut file).unwrap();
        files.insert(entry.path().unwrap().into_owned(), file);
    }
    files
}

pub(super) fn cases() -> Vec<Case> {
    let files = files();
    let case = |(path, file): (&PathBuf, &Vec<u8>)| {
        let folder = path.parent().filter(|folder| folder.file_name().is_some())?;
        let pixels = files.get(&folder.with_extension("png"))?;
        let pixels = image::load_from_memory(pixels).unwrap().into_rgb8();
        Some(Case { name: path.display().to_string(), file: file.clone(), pixels })
    };
    let cases: Vec<Case> = files.iter().filter_map(case).collect();
    assert!(cases.len() > 500, "{} cases", cases.len());
    cases
}
