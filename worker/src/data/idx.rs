//! IDX files, as MNIST and its kin have them (LeCun, Cortes, Burges): gzip or not, one channel.

use super::{Catalog, DataError, Format, Samples, Split, names_from};
use crate::files;
use flate2::read::MultiGzDecoder;
use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
};

/// Type 8 (unsigned byte) with three dimensions, and with one.
const PICTURES: u32 = 0x0803;
const LABELS: u32 = 0x0801;
/// Nothing larger is read or unpacked, whatever a header says.
const MAX_BYTES: u64 = 8 << 30;

/// Finds the files in `dir`; `None` when there are none.
pub(super) fn find(dir: &Path) -> Option<Result<Catalog, DataError>> {
    let mut names: Vec<String> = fs::read_dir(dir)
        .ok()?
        .filter_map(|e| e.ok()?.file_name().into_string().ok())
        .filter(|n| n.contains("idx"))
        .collect();
    names.sort();
    let file = |split: &[&str], what: &str| -> Option<PathBuf> {
        let fits = |n: &&String| split.iter().any(|s| n.contains(s)) && n.contains(what);
        names.iter().find(fits).map(|n| dir.join(n))
    };
    let mut found = Vec::new();
    for (name, words) in [("train", &["train"][..]), ("test", &["t10k", "test"][..])] {
        if let Some(pictures) = file(words, "images") {
            found.push((name, pictures, file(words, "labels")));
        }
    }
    if found.is_empty() { None } else { Some(read(dir, found)) }
}

fn read(dir: &Path, found: Vec<(&str, PathBuf, Option<PathBuf>)>) -> Result<Catalog, DataError> {
    let mut splits: Vec<Split> = Vec::new();
    for (name, pictures, labels) in found {
        let Some(labels) = labels else {
            return Err(DataError::Invalid(format!("{} has no labels file next to it", pictures.display())));
        };
        let (shape, pixels) = parse(&pictures, PICTURES)?;
        let (_, label_bytes) = parse(&labels, LABELS)?;
        if shape[0] != label_bytes.len() {
            return Err(DataError::Invalid(format!(
                "{} has {} pictures, but {} has {} labels: they are not of one set",
                pictures.display(),
                shape[0],
                labels.display(),
                label_bytes.len()
            )));
        }
        let size = (shape[1] as u32, shape[2] as u32);
        if let Some(Samples::Memory { height, width, .. }) = splits.first().map(|s| &s.samples)
            && (*height, *width) != size
        {
            return Err(DataError::Invalid(format!(
                "{} has pictures of {} x {}, but those of the training split are {width} x {height}: they are not of one set",
                pictures.display(),
                size.1,
                size.0
            )));
        }
        splits.push(Split {
            name: name.into(),
            labels: label_bytes.into_iter().map(u32::from).collect(),
            samples: Samples::Memory { pixels, height: size.0, width: size.1, channels: 1 },
            broken: Vec::new(),
        });
    }
    let classes = splits.iter().flat_map(|s| &s.labels).max().map_or(0, |m| *m as usize + 1);
    let classes = names_from(&dir.join("classes.txt"), classes)?;
    Ok(Catalog { format: Format::Idx, classes, splits, broken: Vec::new(), unlabelled: Vec::new() })
}

fn parse(path: &Path, magic: u32) -> Result<(Vec<usize>, Vec<u8>), DataError> {
    let broken = |detail: String| DataError::File { path: path.display().to_string(), detail };
    let packed = files::read(path, MAX_BYTES).map_err(broken)?;
    let mut reader: Box<dyn Read + '_> = if packed.starts_with(&[0x1f, 0x8b]) {
        Box::new(MultiGzDecoder::new(&packed[..]).take(MAX_BYTES))
    } else {
        Box::new(&packed[..])
    };
    let unpacking = |e: std::io::Error| broken(format!("cannot be unpacked: {e}; get it again"));
    let dimensions = (magic & 0xff) as usize;
    let mut header = Vec::new();
    reader.by_ref().take(4 * (dimensions as u64 + 1)).read_to_end(&mut header).map_err(unpacking)?;
    let word = |i: usize| header.get(4 * i..4 * i + 4).map(|b| u32::from_be_bytes([b[0], b[1], b[2], b[3]]));
    let found = word(0).ok_or_else(|| broken("is too short for an IDX file".into()))?;
    if found != magic {
        return Err(broken(format!(
            "starts with {found:#010x}; an IDX file of {} starts with {magic:#010x}",
            if magic == PICTURES { "pictures" } else { "labels" }
        )));
    }
    let shape: Option<Vec<usize>> = (1..=dimensions).map(|i| word(i).map(|n| n as usize)).collect();
    let shape = shape.ok_or_else(|| broken("is cut off in its header".into()))?;
    let expected = shape.iter().try_fold(1usize, |a, b| a.checked_mul(*b)).unwrap_or(usize::MAX);
    // One byte more distinguishes a longer file from one that ends where it should.
    let mut bytes = Vec::with_capacity(expected.min(packed.len().saturating_mul(4)));
    reader.take((expected as u64).saturating_add(1)).read_to_end(&mut bytes).map_err(unpacking)?;
    if expected != bytes.len() || shape.contains(&0) {
        let follow = if bytes.len() > expected { "more".to_owned() } else { bytes.len().to_string() };
        return Err(broken(format!(
            "says that it holds {shape:?} bytes, but {follow} follow its header: it is cut off or damaged; get it again"
        )));
    }
    Ok((shape, bytes))
}
