//! Chooses the pictures of the training split that are held out for validation (a fraction in `data.validation`, or one
//! of `data.folds`), and computes the fingerprint of the validation pictures.
//!
//! With a fraction, whether a picture is held out depends only on the picture's identity, which is independent of its
//! position in the split. So adding or removing pictures moves no other picture between training and validation, and a
//! larger fraction includes all pictures of a smaller fraction. In return, the fraction of each class is only
//! approximate, and a class with few pictures may have none held out.
//!
//! Folds are equal parts of each class and of the whole split, up to one picture. Pictures of a class with the same
//! content (in folders, the same name) are in the same fold, so duplicates make the parts less equal. Folds depend on
//! all pictures, so adding or removing pictures moves other pictures, too.

use super::{
    Catalog, DataError, Random, Samples, index::content_hash, label::class_counts, listing::Listing,
};
use lockstep_protocol::{
    dataset::{HeldOut, ValidationSet, held_out_share},
    spec::{DataSpec, Validation, ValidationDivision},
};
use rayon::prelude::*;
use sha2::{Digest, Sha256};
use std::{cmp::Ordering, path::Path};

/// Purpose numbers of the random streams (see `shard.rs` for others).
const HOLD_OUT: u64 = 2;
const FOLD: u64 = 11;
/// Number of seeds that are compared for a suggestion.
const SEEDS: u64 = 100;
/// The split from which fractions are held out.
const TRAIN: &str = "train";

/// Identifies a picture independently of its position in the split.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Identity {
    /// Decides whether the picture is held out. In folders it is derived from the class and the file name. In other
    /// formats it is derived from the content, because names and positions depend on the order in which pictures were
    /// packed.
    key: u64,
    /// The hash of the content.
    content: u64,
}

/// Whether each picture of the training split is held out for validation. `labels` has the class of each picture.
pub(crate) fn hold_out(division: &ValidationDivision, pictures: &[Identity], labels: &[u32]) -> Vec<bool> {
    let Some((fold, folds)) = division.fold else {
        return pictures.iter().map(|picture| is_held_out(division, *picture)).collect();
    };
    // By class, and at random within a class.
    let sort_key = |position: &usize| {
        let picture = pictures[*position];
        let random = Random::new(&[division.validation_seed, FOLD, picture.key]).next_u64();
        (labels[*position], random, picture)
    };
    let mut order: Vec<usize> = (0..pictures.len()).collect();
    order.sort_by_cached_key(sort_key);
    // Numbering continues from class to class, so without duplicates the sizes of whole folds also differ by at most
    // one.
    let mut held_out = vec![false; pictures.len()];
    let duplicates = order.chunk_by(|one, next| pictures[*one].key == pictures[*next].key);
    for (number, positions) in duplicates.enumerate() {
        let is_held_out = number % folds as usize + 1 == fold as usize;
        positions.iter().for_each(|position| held_out[*position] = is_held_out);
    }
    held_out
}

/// Whether a picture of the training split is held out for validation. Always false with folds, whose choice depends on
/// all pictures.
pub(crate) fn is_held_out(division: &ValidationDivision, picture: Identity) -> bool {
    match division.validation {
        Validation::Fraction(fraction) if division.fold.is_none() => {
            Random::new(&[division.validation_seed, HOLD_OUT, picture.key]).uniform(0.0, 1.0) < fraction
        }
        Validation::Fraction(_) | Validation::Split(_) => false,
    }
}

/// The most even of the divisions that a job without a validation split may have: both parts have pictures if possible,
/// as few classes as possible lack training or validation pictures, and each class's part is near the fraction.
pub(super) fn most_even_division(pictures: &[Identity], labels: &[u32], classes: usize) -> Option<HeldOut> {
    let fraction = held_out_share(pictures.len() as u64);
    let totals = class_counts(classes, labels.iter().copied());
    let divide = |validation_seed: u64| {
        let validation = Validation::Fraction(fraction);
        let division = ValidationDivision { dataset: String::new(), validation, validation_seed, fold: None };
        let held_out = pictures.iter().zip(labels).filter(|(picture, _)| is_held_out(&division, **picture));
        let per_class = class_counts(classes, held_out.map(|(_, label)| *label));
        let counts = per_class.iter().zip(&totals).filter(|(_, total)| **total > 0);
        let lacking_classes = counts.clone().filter(|(count, total)| **count == 0 || count == total).count();
        let held_out_count = per_class.iter().sum::<u64>();
        let has_empty_part = held_out_count == 0 || held_out_count == pictures.len() as u64;
        // In units of the variance of a class's count.
        let distance =
            |(count, total): (&u64, &u64)| (*count as f64 - *total as f64 * fraction).powi(2) / *total as f64;
        let unevenness: f64 = counts.map(distance).sum();
        ((has_empty_part, lacking_classes, unevenness), HeldOut { validation_seed, per_class })
    };
    let candidates: Vec<_> = (0..SEEDS).into_par_iter().map(divide).collect();
    // `min_by` returns the first of equal candidates.
    let most_even = candidates.into_iter().min_by(|(one, _), (other, _)| {
        one.partial_cmp(other).unwrap_or(Ordering::Equal) // no number is NaN
    });
    most_even.map(|(_, held_out)| held_out)
}

/// The divisions, among `divisions`, under which an earlier run may have trained on pictures that a job with `spec`
/// holds out: divisions of the same dataset with another fraction, fold, split or seed. Pictures of other splits and
/// datasets cannot be compared.
pub fn foreign_divisions(divisions: &[ValidationDivision], spec: &DataSpec) -> Vec<ValidationDivision> {
    let own = ValidationDivision::of(spec);
    let holds_out = own.holds_out();
    let is_foreign =
        |other: &&ValidationDivision| holds_out && other.dataset == own.dataset && **other != own;
    divisions.iter().filter(is_foreign).cloned().collect()
}

/// The name of the split that contains the validation pictures.
pub(super) fn validation_split_name(spec: &DataSpec) -> &str {
    match &spec.validation {
        Validation::Split(name) if !ValidationDivision::of(spec).holds_out() => name,
        _ => TRAIN,
    }
}

/// The identities of encoded pictures. `labels` has the class of each picture.
pub(super) fn identities_of_files(listing: &Listing, labels: &[u32], classes: &[String]) -> Vec<Identity> {
    let identity = |(index, label): (usize, &u32)| {
        let content = listing.hash(index);
        let key = match listing.file_name(index) {
            Some(name) => {
                let class = classes.get(*label as usize).map_or("", String::as_str);
                let class_len = (class.len() as u64).to_le_bytes();
                content_hash(&[&class_len[..], class.as_bytes(), name.as_encoded_bytes()].concat())
            }
            None => content,
        };
        Identity { key, content }
    };
    labels.iter().enumerate().map(identity).collect()
}

/// The identities of uncompressed pictures of `size` bytes each, stored one after another.
pub(super) fn identities_of_packed(pixels: &[u8], size: usize) -> Vec<Identity> {
    let identity = |picture: &[u8]| {
        let content = content_hash(picture);
        Identity { key: content, content }
    };
    pixels.par_chunks_exact(size.max(1)).map(identity).collect()
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
    let catalog = Catalog::open(path)?;
    let Some(split) = catalog.split(validation_split_name(spec)) else { return Ok(None) };
    let identities = match &split.samples {
        Samples::Listed(listing) => identities_of_files(listing, &split.labels, &catalog.classes),
        Samples::Memory { pixels, height, width, channels } => {
            identities_of_packed(pixels, (height * width * channels) as usize)
        }
    };
    let division = ValidationDivision::of(spec);
    let held_out = if division.holds_out() {
        hold_out(&division, &identities, &split.labels)
    } else {
        vec![true; identities.len()]
    };
    let pictures = identities.into_iter().zip(split.labels.iter().copied()).zip(held_out);
    Ok(fingerprint(pictures.filter_map(|(picture, held_out)| held_out.then_some(picture))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        loader::DataSource,
        test_catalog::{assert_contains, listing, open, repository, write_class},
    };
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

    fn write(dir: &Path, class: &str, numbers: std::ops::Range<u32>) {
        let picture = |number| image::RgbImage::from_pixel(4, 4, image::Rgb([number as u8; 3]));
        write_class(&dir.join("train").join(class), numbers, picture);
    }

    /// Whether each picture is held out, by name.
    fn held_out(dir: &Path, spec: &DataSpec) -> BTreeMap<String, bool> {
        let catalog = open(dir).unwrap();
        let split = catalog.split(TRAIN).unwrap();
        let listing = listing(split);
        let identities = identities_of_files(listing, &split.labels, &catalog.classes);
        let is_held_out = |identity: Identity| is_held_out(&ValidationDivision::of(spec), identity);
        (0..listing.len()).map(|i| (listing.name(i), is_held_out(identities[i]))).collect()
    }

    fn held_out_names(all: &BTreeMap<String, bool>) -> BTreeSet<&String> {
        all.iter().filter(|(_, held_out)| **held_out).map(|(name, _)| name).collect()
    }

    #[test]
    fn adding_or_removing_pictures_does_not_move_others() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "cat", 0..150);
        write(dir.path(), "dog", 0..150);
        let before = held_out(dir.path(), &spec(0.1, 0));
        let count = held_out_names(&before).len();
        assert!((15..=45).contains(&count), "{count}");
        let set = validation_set(dir.path(), &spec(0.1, 0)).unwrap();
        // Other seeds divide differently, and larger fractions hold out more pictures.
        assert_ne!(held_out_names(&before), held_out_names(&held_out(dir.path(), &spec(0.1, 1))));
        let larger = held_out(dir.path(), &spec(0.2, 0));
        assert!(held_out_names(&larger).is_superset(&held_out_names(&before)));

        write(dir.path(), "cat", 150..200);
        write(dir.path(), "another", 0..40);
        let removed: Vec<_> =
            before.keys().filter(|name| name.contains("dog/") && !before[*name]).take(20).collect();
        removed.iter().for_each(|name| fs::remove_file(name).unwrap());
        let after = held_out(dir.path(), &spec(0.1, 0));
        assert_eq!(after.len(), 370);
        for (name, expected) in before.iter().filter(|(name, _)| !removed.contains(name)) {
            assert_eq!(after[name], *expected, "{name}");
        }
        assert_ne!(validation_set(dir.path(), &spec(0.1, 0)).unwrap(), set);
    }

    #[test]
    fn the_suggested_seed_validates_every_class_of_few_pictures() {
        for (classes, pictures) in [(2, 4), (3, 4), (4, 4), (2, 1)] {
            let dir = tempfile::tempdir().unwrap();
            let names = ["cat", "dog", "emu", "fox"];
            names.iter().take(classes).for_each(|class| write(dir.path(), class, 0..pictures));
            let info = crate::inspect(dir.path()).unwrap();
            let HeldOut { validation_seed, per_class } = info.held_out.clone().unwrap();
            let spec = spec(0.3, validation_seed);
            let shape = DataSource::open(dir.path(), &spec, 1).unwrap().shape;
            // A class with one picture lacks training or validation pictures.
            assert_eq!(shape.notes.is_empty(), pictures > 1, "{:?}", shape.notes);
            assert_eq!(shape.validation_samples, per_class.iter().sum::<u64>());
            assert_eq!(
                info.count_held_out(&spec.validation, validation_seed),
                Some(shape.validation_samples)
            );
            assert_eq!(info.count_held_out(&spec.validation, validation_seed + 1), None);
        }
    }

    #[test]
    fn folds_partition_each_class_equally() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "cat", 0..33);
        write(dir.path(), "dog", 0..9);
        write(dir.path(), "emu", 0..2);
        let spec = |fold, validation_seed| DataSpec {
            dataset: "pets".into(),
            folds: Some(4),
            fold: Some(fold),
            validation_seed,
            crop_padding: 0,
            ..DataSpec::default()
        };
        let mut seen = BTreeSet::new();
        for fold in 1..=4 {
            let source = DataSource::open(dir.path(), &spec(fold, 0), 1).unwrap();
            let shape = &source.shape;
            assert_eq!((shape.train_samples, shape.validation_samples), (33, 11));
            assert_eq!(shape.validation, validation_set(dir.path(), &spec(fold, 0)).unwrap());
            assert!(shape.notes.join("; ").contains("\"emu\" has 2 training pictures"), "{:?}", shape.notes);
            let (rank, world_size, batch_size, threads) = (0, 1, 64, 1);
            let batch = source.validation(rank, world_size, batch_size, threads).next().unwrap().unwrap();
            let count = |class| batch.labels.iter().filter(|label| **label == class).count();
            assert!((8..=9).contains(&count(0)) && (2..=3).contains(&count(1)), "{:?}", batch.labels);
            let trained: BTreeSet<u64> = (0..33).map(|number| source.training_position(number)).collect();
            assert!(trained.len() == 33 && batch.indices.iter().all(|position| !trained.contains(position)));
            seen.extend(batch.indices);
            // Another fold has trained on all of these pictures.
            let divisions = [fold % 4 + 1, fold].map(|fold| ValidationDivision::of(&spec(fold, 0)));
            assert_eq!(source.count_trained_on(&foreign_divisions(&divisions, &spec(fold, 0))), 11);
        }
        assert_eq!(seen.len(), 44);
        let set = |seed| validation_set(dir.path(), &spec(1, seed)).unwrap();
        assert_ne!(set(0), set(1));
        let many = DataSpec { folds: Some(45), ..spec(1, 0) };
        assert_contains(
            DataSource::open(dir.path(), &many, 1).unwrap_err(),
            &["data.folds = 45", "44 training pictures"],
        );
    }

    #[test]
    fn equal_pictures_are_in_the_same_fold() {
        // Each of 20 pictures of one pixel occurs twice.
        let pixels: Vec<u8> = (0..20).chain(0..20).collect();
        let labels: Vec<u32> = (0..40).map(|position| position % 2).collect();
        let identities = identities_of_packed(&pixels, 1);
        for fold in 1..=4 {
            let spec = DataSpec { folds: Some(4), fold: Some(fold), ..spec(0.1, 0) };
            let held_out = super::hold_out(&ValidationDivision::of(&spec), &identities, &labels);
            let (first, second) = held_out.split_at(20);
            assert_eq!(first, second);
            assert_eq!(first.iter().filter(|is_held_out| **is_held_out).count(), 5);
        }
    }

    #[test]
    fn the_fingerprint_covers_only_validation_pictures() {
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
        let first = |is_held_out: bool| all.iter().find(|(_, held_out)| **held_out == is_held_out).unwrap().0;
        fs::remove_file(first(false)).unwrap();
        assert_eq!(set(), before, "without a training picture");
        image::GrayImage::from_pixel(4, 4, image::Luma([251])).save(first(true)).unwrap();
        assert!(set().pictures == before.pictures && set() != before, "with other content");
    }

    #[test]
    fn pictures_that_another_division_trained_on_are_counted() {
        let path = repository("assets/fashion-mnist");
        let source = DataSource::open(&path, &spec(0.1, 0), 7).unwrap();
        let set = validation_set(&path, &spec(0.1, 0)).unwrap();
        assert!(set.is_some() && source.shape.validation == set, "{set:?}");
        let count_foreign = |fraction, seed| {
            let divisions =
                [ValidationDivision::of(&spec(fraction, seed)), ValidationDivision::of(&spec(0.1, 0))];
            source.count_trained_on(&foreign_divisions(&divisions, &spec(0.1, 0)))
        };
        assert_eq!(count_foreign(0.1, 0), 0, "its own");
        assert_eq!(count_foreign(0.2, 0), 0, "the other division holds them out, too");
        let all = source.shape.validation_samples;
        for (fraction, seed, min, max) in [(0.1, 1, 0.8, 1.0), (0.05, 0, 0.4, 0.6)] {
            let share = count_foreign(fraction, seed) as f64 / all as f64;
            assert!((min..max).contains(&share), "fraction {fraction}, seed {seed}: {share}");
        }
        let other_dataset = DataSpec { dataset: "other".into(), ..spec(0.1, 1) };
        assert!(foreign_divisions(&[ValidationDivision::of(&other_dataset)], &spec(0.1, 0)).is_empty());
    }

    #[test]
    fn unvalidated_classes_are_noted_and_empty_parts_refused() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "cat", 0..200);
        write(dir.path(), "dog", 0..1);
        let open = |fraction| DataSource::open(dir.path(), &spec(fraction, 0), 0);
        let dog_is_held_out = held_out(dir.path(), &spec(0.1, 0))
            .iter()
            .any(|(name, is_held_out)| *is_held_out && name.contains("dog"));
        let lacks = if dog_is_held_out { "training" } else { "validation" };
        let notes = open(0.1).unwrap().shape.notes.join("; ");
        assert_contains(notes, &[&format!("1 class has no {lacks} picture"), "\"dog\""]);
        for (fraction, detail) in [(0.000_001, "holds out none of 201"), (0.999_999, "holds out all of 201")]
        {
            assert_contains(open(fraction).unwrap_err(), &[detail]);
        }
    }
}
