//! Fingerprints of datasets: names, classes and contents of the pictures. They show whether a dataset has changed.
//!
//! The index has the content hashes of pictures in folders and shards, so a file is read only if its size or
//! modification time differs. With [`ChangeDetection::Folders`], files in unchanged folders are not examined. The
//! files of CIFAR and IDX datasets are always read. A copy of a dataset has the same fingerprint. New modification times do not change the
//! fingerprint.

use super::{Catalog, ChangeDetection, DataError, IndexStore, Samples, pattern};
use lockstep_protocol::dataset::PicturesFingerprint;
use sha2::{Digest, Sha256};
use std::path::Path;

/// The fingerprint of the dataset at `path`.
///
/// # Errors
/// `path` is not a dataset.
pub fn fingerprint(path: &Path, changes: ChangeDetection) -> Result<PicturesFingerprint, DataError> {
    let catalog = Catalog::open_with(path, &IndexStore::of_user(changes))?;
    Ok(catalog.fingerprint(path))
}

impl Catalog {
    pub(super) fn fingerprint(&self, path: &Path) -> PicturesFingerprint {
        let mut hash = Sha256::new();
        let mut add = |part: &[u8]| {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        };
        self.classes.iter().for_each(|class| add(class.as_bytes()));
        let (mut pictures, mut picture_bytes) = (0, 0);
        for split in &self.splits {
            add(split.name.as_bytes());
            let count = split.labels.len() as u64;
            add(&count.to_le_bytes());
            pictures += count;
            split.labels.iter().for_each(|label| add(&label.to_le_bytes()));
            match &split.samples {
                Samples::Memory { pixels, height, width, channels } => {
                    for side in [height, width, channels] {
                        add(&side.to_le_bytes());
                    }
                    add(hex::encode(Sha256::digest(pixels)).as_bytes());
                    picture_bytes += count * u64::from(*height) * u64::from(*width) * u64::from(*channels);
                }
                Samples::Listed(listing) => {
                    for index in 0..listing.len() {
                        let (name, size, content) = listing.identity(index);
                        add(name.as_os_str().as_encoded_bytes());
                        add(&size.to_le_bytes());
                        add(&content.to_le_bytes());
                        picture_bytes += size;
                    }
                }
            }
        }
        // Broken files are not trained on, so the fingerprint depends on which files are broken. Their names are relative to the dataset's
        // folder.
        let folder = pattern::fixed_part(path).map_or_else(|| path.to_owned(), |(fixed, _)| fixed);
        for broken in self.all_broken() {
            let name = Path::new(&broken.file);
            add(name.strip_prefix(&folder).unwrap_or(name).as_os_str().as_encoded_bytes());
        }
        PicturesFingerprint { pictures, picture_bytes, sha256: hex::encode(hash.finalize()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn packed_copies_have_equal_fingerprints_until_changed() {
        let header = |words: &[u32]| words.iter().copied().flat_map(u32::to_be_bytes).collect::<Vec<u8>>();
        let idx = |dir: &Path, pixel: u8, label: u8| {
            let images = [header(&[0x0803, 2, 1, 1]), vec![7, pixel]].concat();
            fs::write(dir.join("train-images-idx3-ubyte"), images).unwrap();
            let labels = [header(&[0x0801, 2]), vec![0, label]].concat();
            fs::write(dir.join("train-labels-idx1-ubyte"), labels).unwrap();
        };
        let cifar = |dir: &Path, pixel: u8, label: u8| {
            let record = |label: u8, pixel: u8| [vec![label], vec![7; 3071], vec![pixel]].concat();
            fs::write(dir.join("data_batch_1.bin"), [record(0, 7), record(label, pixel)].concat()).unwrap();
        };
        type Write<'a> = &'a dyn Fn(&Path, u8, u8);
        let kinds: [(Write<'_>, u64); 2] = [(&idx, 2), (&cifar, 2 * 3072)];
        for (write, bytes) in kinds {
            let fingerprint_of = |pixel: u8, label: u8| {
                let dir = tempfile::tempdir().unwrap();
                write(dir.path(), pixel, label);
                fingerprint(dir.path(), ChangeDetection::Files).unwrap()
            };
            let first = fingerprint_of(8, 1);
            assert_eq!((first.pictures, first.picture_bytes), (2, bytes));
            assert_eq!(fingerprint_of(8, 1), first, "a copy");
            assert_ne!(fingerprint_of(9, 1), first, "another pixel");
            assert_ne!(fingerprint_of(8, 0), first, "another class");
        }
    }
}
