//! Opens a dataset for a job: its splits, sizes and normalisation, checked against the job file.

use super::{
    DataSource, Mixing,
    batch::BatchFormat,
    part::{OpenSplit, Part, Pixels},
    replaced::Broken,
    shape::Shape,
    splits::{self, common_size, normalisation, open_splits},
};
use crate::{
    Catalog, ChangeDetection, DataError, Random,
    held_out::{self, Identity},
    index::IndexStore,
    label::class_counts,
    transform::{Transform, evaluation_resize},
};
use lockstep_protocol::dataset::{lacking_classes, unvalidated_classes};
use lockstep_protocol::numbers::plural;
use lockstep_protocol::spec::{BrokenFiles, DataSpec, Validation, ValidationDivision};
use std::{
    path::Path,
    sync::{Arc, Mutex},
};

impl DataSource {
    /// Reads the dataset's index, and the pictures if they fit in memory.
    ///
    /// With padded crops, CIFAR and IDX pictures are cropped at their own size and then scaled to the epoch's
    /// `image_size`. Square files of equal size that are not larger than the network's largest input are treated in the same way.
    /// For other files, the largest centred square is first scaled to that largest input, and then cropped. Random
    /// resized crops are taken from the whole picture. Validation pictures that are resized and cropped at their centre
    /// are also taken from the whole picture. In these two cases files are decoded in each step.
    ///
    /// # Errors
    /// There are broken files and `data.broken_files` is `fail`, or splits or sizes do not fit the job.
    pub fn open(path: &Path, spec: &DataSpec, seed: u64) -> Result<Self, DataError> {
        Self::open_as(path, spec, seed, ChangeDetection::Files)
    }

    /// As [`DataSource::open`]. `changes` chooses how changes of the dataset are detected.
    ///
    /// # Errors
    /// As [`DataSource::open`].
    pub fn open_as(
        path: &Path,
        spec: &DataSpec,
        seed: u64,
        changes: ChangeDetection,
    ) -> Result<Self, DataError> {
        Self::of_catalog(
            Catalog::open_with(path, &IndexStore::of_user(changes))?,
            path,
            spec,
            seed,
            splits::CACHE_BYTES,
        )
    }

    /// As [`DataSource::open`], for an opened dataset. Decoded splits of up to `max_cached_bytes` bytes are kept in memory.
    pub(super) fn of_catalog(
        mut catalog: Catalog,
        path: &Path,
        spec: &DataSpec,
        seed: u64,
        max_cached_bytes: usize,
    ) -> Result<Self, DataError> {
        let validation_split = match &spec.validation {
            Validation::Split(name) if name != "none" && !ValidationDivision::of(spec).holds_out() => {
                Some(name.clone())
            }
            _ => None,
        };
        if let Some(name) = &validation_split
            && catalog.split(name).is_none()
        {
            let names: Vec<_> = catalog.splits.iter().map(|s| s.name.as_str()).collect();
            let why = if catalog.unlabelled.contains(name) { " that has labels" } else { "" };
            return Err(DataError::Invalid(format!(
                "data.validation: the dataset has no split {name:?}{why}; it has {}. Give one of these, a fraction such as 0.1, or \
                 \"none\"",
                names.join(", ")
            )));
        }
        let is_needed = |name: &str| name == "train" || validation_split.as_deref() == Some(name);
        catalog.splits.retain(|s| is_needed(&s.name));
        let mut skipped: Vec<String> = catalog.all_broken().map(ToString::to_string).collect();
        let common_size = common_size(&catalog, &skipped)?;
        let needs_whole = spec.random_resized_crop || spec.resize_size.is_some();
        let opened =
            open_splits(&mut catalog, common_size, spec, needs_whole, max_cached_bytes, &mut skipped)?;
        if spec.broken_files == BrokenFiles::Fail && !skipped.is_empty() {
            let folder = format!("{}/", path.display());
            let within_folder = |file: &String| file.strip_prefix(&folder).unwrap_or(file).to_owned();
            let them = if skipped.len() == 1 { "it" } else { "them" };
            return Err(DataError::Invalid(format!(
                "{}: {}{}. Set data.broken_files = \"skip\" to leave {them} out, or repair or remove {them}",
                plural(skipped.len() as u64, "broken file"),
                skipped.iter().take(5).map(within_folder).collect::<Vec<_>>().join("; "),
                if skipped.len() > 5 { "; ..." } else { "" },
            )));
        }
        Self::assemble(catalog, opened, spec, seed, validation_split.is_some(), skipped)
    }

    /// Divides the opened splits into training and validation pictures, and makes the transforms. `opened` has the training split first,
    /// and each split's identities (see [`open_splits`]).
    fn assemble(
        catalog: Catalog,
        opened: Vec<(OpenSplit, Vec<Identity>)>,
        spec: &DataSpec,
        seed: u64,
        has_validation_split: bool,
        skipped: Vec<String>,
    ) -> Result<Self, DataError> {
        let mut opened = opened.into_iter();
        let Some((train, train_identities)) = opened.next() else {
            return Err(DataError::Invalid("the dataset has no training split".into()));
        };
        let size @ [height, width, channels] = train.size;
        let (training_sizes, side) = network_sizes(spec, height, width)?;
        let all_positions = |count: usize| (0..count as u32).collect::<Vec<_>>();
        let division = ValidationDivision::of(spec);
        let is_held_out = if division.holds_out() {
            held_out::hold_out(&division, &train_identities, &train.labels)
        } else {
            vec![false; train.labels.len()]
        };
        let (held_out, train_chosen): (Vec<u32>, Vec<u32>) = all_positions(train.labels.len())
            .into_iter()
            .partition(|position| is_held_out[*position as usize]);
        let notes = match (&division.fold, &spec.validation) {
            (Some((_, folds)), _) => check_folds(&catalog.classes, &train.labels, &held_out, *folds)?,
            (None, Validation::Fraction(fraction)) => {
                check_held_out(&catalog.classes, &train.labels, &held_out, &train_chosen, *fraction)?
            }
            (None, Validation::Split(name)) => match opened.as_slice().first() {
                Some((split, _)) if has_validation_split => {
                    let [training, validation] = [&train, split]
                        .map(|split| class_counts(catalog.classes.len(), split.labels.iter().copied()));
                    unvalidated_classes(&catalog.classes, &training, &validation, name).into_iter().collect()
                }
                _ => Vec::new(),
            },
        };
        let (mean, std) = normalisation(spec, &train);
        let resize = evaluation_resize(spec, side);
        let part = |split: &Arc<OpenSplit>, chosen: Vec<u32>, needs_whole: bool| {
            let broken = Broken::new(spec.broken_files == BrokenFiles::Skip);
            Part { split: split.clone(), chosen, needs_whole, broken }
        };
        let train = Arc::new(train);
        let (identities, validation) = match opened.next().filter(|_| has_validation_split) {
            Some((split, identities)) => {
                let chosen = all_positions(split.labels.len());
                (identities, part(&Arc::new(split), chosen, resize.is_some()))
            }
            None => {
                // An evaluation of the training split is on all of its pictures.
                let chosen = if has_validation_split { train_chosen.clone() } else { held_out };
                (train_identities, part(&train, chosen, resize.is_some()))
            }
        };
        let train = part(&train, train_chosen, spec.random_resized_crop);
        let validation_identities: Vec<Identity> =
            validation.chosen.iter().map(|position| identities[*position as usize]).collect();
        let validation_labels =
            validation.chosen.iter().map(|position| validation.split.labels[*position as usize]);
        let validation_set =
            held_out::fingerprint(validation_identities.iter().copied().zip(validation_labels));
        let transform = |side: usize| Arc::new(Transform::new(spec, size, side, seed, (&mean, &std)));
        let training = training_sizes.iter().map(|(_, side)| transform(*side)).collect();
        let evaluation = transform(side);
        let shape = Shape {
            image_size: side,
            training_sizes,
            channels,
            classes: catalog.classes,
            train_samples: train.chosen.len() as u64,
            validation_samples: validation.chosen.len() as u64,
            validation: validation_set,
            class_weights: None,
            mean,
            std,
            skipped,
            notes,
            whole_pictures: height != width,
            resize,
        };
        Ok(Self { validation_identities, ..Self::new(shape, training, evaluation, train, validation) })
    }

    /// A source with batches in the default format, without mixing and without a decoding device.
    fn new(
        shape: Shape,
        training: Vec<Arc<Transform>>,
        evaluation: Arc<Transform>,
        train: Part,
        validation: Part,
    ) -> Self {
        Self {
            shape,
            seed: evaluation.seed,
            training,
            evaluation,
            train: Arc::new(train),
            validation: Arc::new(validation),
            validation_identities: Vec::new(),
            format: BatchFormat::default(),
            mixing: Mixing::default(),
            stays_on_host: false,
            device: None,
            workers: Mutex::default(),
        }
    }

    /// A source of `count` random RGB pictures of 32 x 32 pixels in 10 classes, which are cropped, flipped and scaled
    /// to `side`. The source has no validation pictures. Preparing a picture takes as long as for CIFAR-10.
    pub fn synthetic(count: usize, side: usize, seed: u64) -> Self {
        let size = [32, 32, 3];
        let mut random = Random::new(&[seed, count as u64]);
        let bytes: Vec<u8> = (0..count * size.iter().product::<usize>() / 8)
            .flat_map(|_| random.next_u64().to_le_bytes())
            .collect();
        let (pixels, labels) = (Pixels::Memory(bytes.into()), (0..count as u32).map(|i| i % 10).collect());
        let split = Arc::new(OpenSplit { pixels, decoded_files: None, labels, size });
        let part =
            |chosen| Part { split: split.clone(), chosen, needs_whole: false, broken: Broken::new(false) };
        let (mean, std) = (vec![0.4914, 0.4822, 0.4465], vec![0.2023, 0.1994, 0.2010]);
        let spec = DataSpec { crop_padding: 4, horizontal_flip: true, ..DataSpec::default() };
        let transform = Arc::new(Transform::new(&spec, size, side, seed, (&mean, &std)));
        let shape = Shape {
            image_size: side,
            training_sizes: vec![(0, side)],
            channels: size[2],
            classes: (0..10).map(|c| c.to_string()).collect(),
            train_samples: count as u64,
            mean,
            std,
            ..Shape::default()
        };
        let (train, validation) = (part((0..count as u32).collect()), part(Vec::new()));
        Self::new(shape, vec![transform.clone()], transform, train, validation)
    }
}

/// Notes for the log about classes without any validation picture or without any training picture. For a class with
/// few pictures this happens by chance.
/// Fails if the fraction holds out no picture at all, or leaves none for training.
fn check_held_out(
    classes: &[String],
    labels: &[u32],
    held_out: &[u32],
    trained_on: &[u32],
    fraction: f64,
) -> Result<Vec<String>, DataError> {
    let pictures = plural(labels.len() as u64, "training picture");
    if held_out.is_empty() {
        return Err(DataError::Invalid(format!(
            "data.validation = {fraction} holds out none of {pictures}: give a larger fraction, another data.validation_seed, or \"none\""
        )));
    }
    if trained_on.is_empty() {
        return Err(DataError::Invalid(format!(
            "data.validation = {fraction} holds out all of {pictures}, and none is left to train on: give a smaller fraction, or another \
             data.validation_seed"
        )));
    }
    let lacking = |positions: &[u32], kind: &str| -> Option<String> {
        let counts = class_counts(classes.len(), positions.iter().map(|position| labels[*position as usize]));
        let is_empty = |(_, count): &(&String, u64)| *count == 0;
        let without: Vec<_> = classes.iter().zip(counts).filter(is_empty).map(|(name, _)| name).collect();
        let words = lacking_classes(&without, kind)?;
        Some(format!(
            "{words}. data.validation = {fraction} decides independently for each picture: add pictures, or set another \
             data.validation_seed"
        ))
    };
    Ok([lacking(held_out, "validation"), lacking(trained_on, "training")].into_iter().flatten().collect())
}

/// A note for the log if a class has fewer pictures than there are folds.
/// Fails if the split has fewer pictures than there are folds, or if the fold contains none or all of the pictures.
fn check_folds(
    classes: &[String],
    labels: &[u32],
    held_out: &[u32],
    folds: u32,
) -> Result<Vec<String>, DataError> {
    let pictures = plural(labels.len() as u64, "training picture");
    if labels.len() < folds as usize || held_out.is_empty() || held_out.len() == labels.len() {
        return Err(DataError::Invalid(format!(
            "data.folds = {folds} leaves some folds of {pictures} empty (equal pictures are in the same fold): give a smaller number"
        )));
    }
    let smallest = classes.iter().zip(class_counts(classes.len(), labels.iter().copied()));
    let smallest = smallest.min_by_key(|(_, count)| *count);
    let few = smallest.filter(|(_, count)| *count < u64::from(folds));
    let note = few.map(|(name, count)| {
        format!(
            "class {name:?} has {}, fewer than data.folds = {folds}: some folds have no picture of this class",
            plural(count, "training picture")
        )
    });
    Ok(note.into_iter().collect())
}

/// The sides of the network's input: the training sides, each with the epoch (from 0) in which it begins, and the
/// evaluation side. Pictures have `height` x `width` pixels.
/// Fails if the job's sizes do not fit each other or the pictures.
fn network_sizes(
    spec: &DataSpec,
    height: usize,
    width: usize,
) -> Result<(Vec<(u32, usize)>, usize), DataError> {
    let training_sizes: Vec<(u32, usize)> = match &spec.image_size {
        Some(sizes) => {
            sizes.sizes().iter().map(|from| (from.epoch.saturating_sub(1), from.size as usize)).collect()
        }
        None if height == width => vec![(0, height)],
        None => {
            return Err(DataError::Invalid(format!(
                "pictures are {width} x {height}: set data.image_size, the side of the square that the network sees"
            )));
        }
    };
    let largest = training_sizes.last().map_or(height, |(_, side)| *side);
    let side = spec.effective_validation_size().map_or(largest, |side| side as usize);
    if side < largest {
        return Err(DataError::Invalid(format!(
            "data.validation_size: {side} pixels are less than training's {largest}; give {largest} or more"
        )));
    }
    if let Some(resize) = spec.resize_size.filter(|resize| (*resize as usize) < side) {
        return Err(DataError::Invalid(format!(
            "data.resize_size: a short side of {resize} pixels is less than the network sees ({side}); give {} or more, or \
             lower data.image_size",
            side * 256 / 224
        )));
    }
    if !spec.random_resized_crop && spec.crop_padding as usize >= height.min(width) {
        return Err(DataError::Invalid(format!(
            "data.crop_padding: {} pixels around pictures of {width} x {height} would make crops of nothing but padding; 1/8 of a side \
             is usual",
            spec.crop_padding
        )));
    }
    Ok((training_sizes, side))
}
