//! Which pictures of the training split are held out for validation (a fraction in `data.validation`), and the
//! fingerprint of the validation pictures.
//!
//! Whether a picture is held out depends only on its own identity, which is independent of its place in the split. So
//! adding or removing pictures moves no other picture between training and validation, and a larger fraction holds
//! out all pictures of a smaller one. The price: the fraction of each class is only approximately the requested one,
//! and of a class with few pictures possibly none is held out.

use super::{Catalog, ChangeDetection, DataError, Random, Samples, index::content_hash, listing::Listing};
use lockstep_protocol::{
    dataset::ValidationSet,
    spec::{DataSpec, Division, Validation},
};
use rayon::prelude::*;
use sha2::{Digest, Sha256};
use std::path::Path;

/// Purpose number of the random stream (see `shard.rs` for others).
const HOLD_OUT: u64 = 2;
/// The split from which fractions are held out.
const TRAIN: &str = "train";

/// Identifies a picture independently of its place in the split.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Identity {
    /// Decides whether the picture is held out. In folders it is derived from the class and the file name. Elsewhere
    /// it is derived from the content, because names and places there depend on the order in which pictures were
    /// packed.
    key: u64,
    content: u64,
}

/// Whether a picture of the training split is held out for validation.
pub(crate) fn is_held_out(division: &Division, picture: Identity) -> bool {
    match division.validation {
        Validation::Fraction(fraction) => {
            Random::new(&[division.validation_seed, HOLD_OUT, picture.key]).uniform(0.0, 1.0) < fraction
        }
        Validation::Split(_) => false,
    }
}

/// The divisions, among `divisions`, under which an earlier run may have trained on pictures that a job with `spec`
/// holds out: divisions of the same dataset with another fraction, split or seed. Pictures of other splits and
/// datasets cannot be compared.
pub fn foreign_divisions(divisions: &[Division], spec: &DataSpec) -> Vec<Division> {
    let own = Division::of(spec);
    let is_fraction = matches!(own.validation, Validation::Fraction(_));
    let is_foreign = |of: &&Division| is_fraction && of.dataset == own.dataset && **of != own;
    divisions.iter().filter(is_foreign).cloned().collect()
}

/// The name of the split that contains the validation pictures.
pub(super) fn validation_split_name(validation: &Validation) -> &str {
    match validation {
        Validation::Fraction(_) => TRAIN,
        Validation::Split(name) => name,
    }
}

/// The identities of encoded pictures. `labels` has the class of each picture.
pub(super) fn identities_of_files(listing: &Listing, labels: &[u32], classes: &[String]) -> Vec<Identity> {
    let one = |(number, label): (usize, &u32)| {
        let content = listing.content(number);
        let key = match listing.file_name(number) {
            Some(name) => {
                let class = classes.get(*label as usize).map_or("", String::as_str);
                let digest = Sha256::new()
                    .chain_update((class.len() as u64).to_le_bytes())
                    .chain_update(class)
                    .chain_update(name.as_encoded_bytes())
                    .finalize();
                u64::from_le_bytes(std::array::from_fn(|i| digest[i]))
            }
            None => content,
        };
        Identity { key, content }
    };
    labels.iter().enumerate().map(one).collect()
}

/// The identities of uncompressed pictures of `size` bytes each, stored one after another.
pub(super) fn identities_of_packed(pixels: &[u8], size: usize) -> Vec<Identity> {
    let one = |picture: &[u8]| {
        let content = content_hash(picture);
        Identity { key: content, content }
    };
    pixels.par_chunks_exact(size.max(1)).map(one).collect()
}

/// The fingerprint of pictures with their classes, independent of their order. `None` if there are no pictures.
pub(super) fn fingerprint(pictures: impl Iterator<Item = (Identity, u32)>) -> Option<ValidationSet> {
    let mut all: Vec<_> = pictures.collect();
    all.sort_unstable();
    let mut hash = Sha256::new();
    for (Identity { key, content }, label) in &all {
        hash.update(key.to_le_bytes());
        hash.update(content.to_le_bytes());
        hash.update(label.to_le_bytes());
    }
    let fingerprint = hex::encode(&hash.finalize()[..8]);
    (!all.is_empty()).then_some(ValidationSet { pictures: all.len() as u64, fingerprint })
}

/// The validation pictures of a job with `spec` on the dataset at `path`, in its present state. No picture is
/// decoded.
///
/// # Errors
/// `path` is no longer a dataset.
pub fn validation_set(path: &Path, spec: &DataSpec) -> Result<Option<ValidationSet>, DataError> {
    let catalog = Catalog::open_with(path, &ChangeDetection::Files.store())?;
    let Some(split) = catalog.split(validation_split_name(&spec.validation)) else { return Ok(None) };
    let identities = match &split.samples {
        Samples::Listed(listing) => identities_of_files(listing, &split.labels, &catalog.classes),
        Samples::Memory { pixels, height, width, channels, .. } => {
            identities_of_packed(pixels, (height * width * channels) as usize)
        }
    };
    let division = Division::of(spec);
    let is_fraction = matches!(spec.validation, Validation::Fraction(_));
    let chosen = identities.into_iter().zip(split.labels.iter().copied());
    Ok(fingerprint(chosen.filter(|(picture, _)| !is_fraction || is_held_out(&division, *picture))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loader::DataSource;
    use std::{
        collections::{BTreeMap, BTreeSet},
        fs,
    };

    fn spec(fraction: f64, validation_seed: u64) -> DataSpec {
        DataSpec {
            dataset: "pets".into(),
            validation: Validation::Fraction(fraction),
            validation_seed,
            crop_padding: 0,
            ..DataSpec::default()
        }
    }

    fn write(dir: &Path, class: &str, numbers: std::ops::Range<u8>) {
        let home = dir.join("train").join(class);
        fs::create_dir_all(&home).unwrap();
        for number in numbers {
            let picture = image::GrayImage::from_pixel(4, 4, image::Luma([number]));
            picture.save(home.join(format!("{number:03}.png"))).unwrap();
        }
    }

    /// Whether each picture is held out, by name.
    fn held_out(dir: &Path, spec: &DataSpec) -> BTreeMap<String, bool> {
        let catalog = Catalog::open_with(dir, &ChangeDetection::Files.store()).unwrap();
        let split = catalog.split(TRAIN).unwrap();
        let Samples::Listed(listing) = &split.samples else { panic!("a folder") };
        let identities = identities_of_files(listing, &split.labels, &catalog.classes);
        let is_held_out = |identity: Identity| is_held_out(&Division::of(spec), identity);
        (0..listing.len()).map(|i| (listing.name(i), is_held_out(identities[i]))).collect()
    }

    fn names(all: &BTreeMap<String, bool>) -> BTreeSet<&String> {
        all.iter().filter(|(_, held_out)| **held_out).map(|(name, _)| name).collect()
    }

    #[test]
    fn adding_and_removing_pictures_moves_no_other_one() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "cat", 0..150);
        write(dir.path(), "dog", 0..150);
        let before = held_out(dir.path(), &spec(0.1, 0));
        assert!((15..=45).contains(&names(&before).len()), "{}", names(&before).len());
        let set = validation_set(dir.path(), &spec(0.1, 0)).unwrap();
        // Other seeds divide differently; larger fractions hold out more.
        assert_ne!(names(&before), names(&held_out(dir.path(), &spec(0.1, 1))));
        assert!(names(&held_out(dir.path(), &spec(0.2, 0))).is_superset(&names(&before)));

        write(dir.path(), "cat", 150..200);
        write(dir.path(), "another", 0..40);
        let gone: Vec<_> =
            before.keys().filter(|name| name.contains("dog/") && !before[*name]).take(20).collect();
        gone.iter().for_each(|name| fs::remove_file(name).unwrap());
        let after = held_out(dir.path(), &spec(0.1, 0));
        assert_eq!(after.len(), 370);
        for (name, was) in before.iter().filter(|(name, _)| !gone.contains(name)) {
            assert_eq!(after[name], *was, "{name}");
        }
        assert_ne!(validation_set(dir.path(), &spec(0.1, 0)).unwrap(), set);
    }

    #[test]
    fn the_fingerprint_is_of_the_validation_pictures_alone() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "cat", 0..100);
        write(dir.path(), "dog", 0..100);
        let set = || validation_set(dir.path(), &spec(0.2, 0)).unwrap().unwrap();
        let before = set();
        let open = |seed| DataSource::open(dir.path(), &spec(0.2, 0), seed).unwrap();
        assert_eq!(
            open(1).shape.validation,
            Some(before.clone()),
            "as a job has it, whatever its train.seed"
        );
        assert_eq!(before.pictures, open(2).shape.validation_samples);
        let all = held_out(dir.path(), &spec(0.2, 0));
        let of = |wanted: bool| all.iter().find(|(_, held_out)| **held_out == wanted).unwrap().0;
        fs::remove_file(of(false)).unwrap();
        assert_eq!(set(), before, "without a training picture");
        image::GrayImage::from_pixel(4, 4, image::Luma([251])).save(of(true)).unwrap();
        assert!(set().pictures == before.pictures && set() != before, "with another content");
    }

    #[test]
    fn pictures_that_another_division_trained_on_are_counted() {
        let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/fashion-mnist"));
        let source = DataSource::open(path, &spec(0.1, 0), 7).unwrap();
        let set = validation_set(path, &spec(0.1, 0)).unwrap();
        assert!(set.is_some() && source.shape.validation == set, "{set:?}");
        let counted = |fraction, seed| {
            let divisions = [Division::of(&spec(fraction, seed)), Division::of(&spec(0.1, 0))];
            source.trained_on(&foreign_divisions(&divisions, &spec(0.1, 0)))
        };
        assert_eq!(counted(0.1, 0), 0, "its own");
        assert_eq!(counted(0.2, 0), 0, "held out there, too");
        // About nine in ten, and half.
        let all = source.shape.validation_samples;
        assert!((all * 8 / 10..all).contains(&counted(0.1, 1)), "{} of {all}", counted(0.1, 1));
        assert!((all * 4 / 10..all * 6 / 10).contains(&counted(0.05, 0)), "{} of {all}", counted(0.05, 0));
        let other = DataSpec { dataset: "other".into(), ..spec(0.1, 1) };
        assert!(foreign_divisions(&[Division::of(&other)], &spec(0.1, 0)).is_empty());
    }

    #[test]
    fn few_pictures_are_named_by_class_and_none_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "cat", 0..200);
        write(dir.path(), "dog", 0..1);
        let open = |fraction| DataSource::open(dir.path(), &spec(fraction, 0), 0);
        let dog_is_held_out =
            held_out(dir.path(), &spec(0.1, 0)).iter().any(|(name, is)| *is && name.contains("dog"));
        let lacks = if dog_is_held_out { "training" } else { "validation" };
        let notes = open(0.1).unwrap().shape.notes.join("; ");
        assert!(
            notes.contains(&format!("1 class has no {lacks} picture")) && notes.contains("\"dog\""),
            "{notes}"
        );
        for (fraction, words) in [(0.000_001, "holds out none of 201"), (0.999_999, "holds out all of 201")] {
            let error = open(fraction).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
