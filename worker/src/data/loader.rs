//! Batches, prepared ahead of the step by threads of their own.

use super::{
    Catalog, DataError, Look, Picture,
    device::{Decoded, DeviceDecoder, OnDevice, Sharing},
    listing::Listing,
    picture::{Decoder, PictureRef, Resize},
    shard,
    transform::{Crop, Transform, evaluation_resize},
};
use lockstep_protocol::spec::{BrokenFiles, DataSpec, Validation};
use std::{
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

pub use mixing::{Mix, Mixing};

use ahead::prepare_ahead;
use batch::Maker;
use replaced::Replaced;
use splits::{Opened, normalisation, open_splits, sizes};
use workers::Workers;

mod ahead;
mod batch;
mod mixing;
mod on_device;
pub(crate) mod replaced;
mod splits;
mod workers;

/// What a batch holds of its pictures; engines differ in what they do themselves.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Form {
    /// [`Batch::images`].
    #[default]
    Normalised,
    /// [`Batch::bytes`]: transformed, but not normalised.
    Bytes,
    /// [`Batch::draws`]: the engine has the pictures.
    Draws,
}

/// A batch ready for an engine, in one [`Form`].
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Batch {
    /// NHWC, normalised: `labels.len() * image_size * image_size * channels` values.
    pub images: Vec<f32>,
    /// NHWC, as many bytes.
    pub bytes: Vec<u8>,
    /// The augmentation of each picture; see `AugmentParams::packed`.
    pub draws: Vec<u32>,
    /// Class of each picture.
    pub labels: Vec<u32>,
    /// With mixup or cutmix: class of the picture that each one is mixed with. Empty: they are as they are.
    pub mixed_labels: Vec<u32>,
    /// How much of a mixed picture is itself; its target is `lambda` on its label and `1 - lambda` on the other's.
    pub lambda: f32,
    /// Place of each picture in its split, for tests and for naming mistakes.
    pub indices: Vec<u64>,
    /// Pictures of this micro-batch on all ranks together: engines divide by it. It follows from the plan, so ranks need
    /// not ask each other. Read where there are several ranks; a single one counts `labels`.
    pub global_samples: usize,
}

/// What a dataset looks like to a job.
#[derive(Debug, Clone, PartialEq)]
pub struct Shape {
    /// Side of the network's input in pixels where it is measured and asked.
    pub image_size: usize,
    /// Sides of training's inputs, each with the epoch (from 0) that it begins in; the first in epoch 0. None is larger
    /// than `image_size`.
    pub training_sizes: Vec<(u32, usize)>,
    /// 1 or 3.
    pub channels: usize,
    /// Names, in the order of the labels.
    pub classes: Vec<String>,
    /// After held-out and broken pictures are taken away.
    pub train_samples: u64,
    /// 0 when there is no validation.
    pub validation_samples: u64,
    /// Of pixels scaled to 0..1, by channel.
    pub mean: Vec<f32>,
    /// Of pixels scaled to 0..1, by channel.
    pub std: Vec<f32>,
    /// Broken files left out (`broken_files = "skip"`), each with what is wrong.
    pub skipped: Vec<String>,
    /// Pictures are not square and come packed into one file: they are scaled as a whole to the network's square.
    pub whole_pictures: bool,
    /// The short side that validation pictures are resized to before the centre crop; where it is absent, their largest
    /// centred square is scaled.
    pub resize: Option<u32>,
}

/// A dataset opened for a job. Every rank reads the same files; which pictures a rank gets follows
/// from its number.
#[derive(Debug)]
pub struct DataSource {
    /// What was found.
    pub shape: Shape,
    /// Of training, by the entries of [`Shape::training_sizes`].
    training: Vec<Arc<Transform>>,
    evaluation: Arc<Transform>,
    train: Arc<Part>,
    validation: Arc<Part>,
    seed: u64,
    form: Form,
    mixing: Mixing,
    device: Option<Arc<OnDevice>>,
    /// Kept from epoch to epoch, with their buffers; for as many threads as were last asked for, with a device
    /// or not.
    workers: Mutex<Option<((usize, bool), Arc<Workers>)>>,
}

/// All pictures of a job as bytes in memory, for an engine that keeps a copy and augments itself.
#[derive(Debug, Clone)]
pub struct Resident {
    /// Of the training split: height, width, channels of each picture, one after another.
    pub train: Arc<Vec<u8>>,
    /// Of the validation split; the same ones where it is a fraction held out of training.
    pub validation: Arc<Vec<u8>>,
    /// Height of a picture in pixels.
    pub height: usize,
    /// Width of a picture in pixels.
    pub width: usize,
    /// Black pixels around a picture before a crop of its own size is taken.
    pub crop_padding: usize,
}

/// Which batches of an epoch a rank wants.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EpochPlan {
    /// From 0.
    pub epoch: u32,
    /// Optimizer step within the epoch to start at, from 0.
    pub first_step: u64,
    /// From 0.
    pub rank: u32,
    /// At least 1.
    pub world_size: u32,
    /// Pictures of a rank in a micro-batch.
    pub batch_size: usize,
    /// Micro-batches a step.
    pub accumulate: usize,
    /// Leave out the last, smaller step.
    pub drop_remainder: bool,
    /// Threads that prepare batches.
    pub threads: usize,
}

/// Pictures of one size, or files that become such.
#[derive(Debug)]
enum Pixels {
    Memory(Arc<Vec<u8>>),
    Files {
        files: Arc<Listing>,
        /** A square of this side is made of each; `None` when all have the size. */
        square: Option<u32>,
    },
}

/// The pictures that one purpose uses.
#[derive(Debug)]
struct Part {
    pixels: Pixels,
    /// See [`Opened::files_digest`].
    files_digest: Option<u32>,
    labels: Arc<Vec<u32>>,
    /// Places in the split, ascending.
    chosen: Vec<u32>,
    /// Height, width and channels of a picture in memory, or of the square that is made of a file.
    size: [usize; 3],
    /// Files are seen whole, whatever their size.
    whole: bool,
    /// Pictures that cannot be read any more.
    replaced: Replaced,
}

/// What a thread needs to open pictures.
#[derive(Debug, Default)]
struct Opener {
    decoder: Decoder,
    resize: Resize,
    square: Vec<u8>,
}

impl Part {
    fn add_to(&self, hash: &mut crc32fast::Hasher) {
        match (&self.pixels, self.files_digest) {
            (_, Some(digest)) => hash.update(&digest.to_le_bytes()),
            (Pixels::Memory(bytes), None) => hash.update(bytes),
            (Pixels::Files { .. }, None) => {}
        }
        for place in &self.chosen {
            hash.update(&self.labels[*place as usize].to_le_bytes());
            if let Pixels::Files { files, .. } = &self.pixels {
                files.add_to(hash, *place as usize);
            }
        }
    }

    fn is_decoded_each_step(&self) -> bool {
        self.files().is_some()
    }

    /// The picture at `place` of the split, as the transform begins with it.
    fn picture<'a>(&'a self, place: usize, opener: &'a mut Opener) -> Result<PictureRef<'a>, DataError> {
        let [height, width, channels] = self.size;
        let size = height * width * channels;
        let of = |pixels: &'a [u8]| PictureRef {
            width: width as u32,
            height: height as u32,
            channels: channels as u32,
            pixels,
        };
        match &self.pixels {
            Pixels::Memory(bytes) => Ok(of(&bytes[place * size..][..size])),
            Pixels::Files { files, .. } => self.decoded(place, &files.read(place)?, opener),
        }
    }

    /// As [`Part::picture`], of a file or a shard's member that was read.
    fn decoded<'a>(
        &self,
        place: usize,
        bytes: &[u8],
        opener: &'a mut Opener,
    ) -> Result<PictureRef<'a>, DataError> {
        let broken = |detail: String| match self.files() {
            Some(files) => files.broken(place, detail),
            None => DataError::Invalid(detail),
        };
        let whole = opener.decoder.decode(bytes).map_err(broken)?;
        let size = self.size.iter().product();
        let square = self.square().filter(|_| !self.whole);
        match square.and_then(|side| Some((side, whole.centre_square(side)?))) {
            Some((side, area)) => {
                opener.square.resize(size, 0);
                opener.resize.run(whole, area, (side, side), &mut opener.square);
                Ok(PictureRef { width: side, height: side, channels: whole.channels, pixels: &opener.square })
            }
            None if self.whole || whole.pixels.len() == size => Ok(whole),
            None => Err(broken("has changed its size since the job began".into())),
        }
    }

    /// What is read for each step; `None` when the pictures are in memory.
    fn files(&self) -> Option<&Listing> {
        match &self.pixels {
            Pixels::Files { files, .. } => Some(files),
            Pixels::Memory(_) => None,
        }
    }

    /// The side of the square that is made of each file.
    fn square(&self) -> Option<u32> {
        match &self.pixels {
            Pixels::Files { square, .. } => *square,
            Pixels::Memory(_) => None,
        }
    }
}

impl Batch {
    /// The other picture's class of each, and lambda, where pictures are mixed.
    pub fn mixed(&self) -> Option<(&[u32], f32)> {
        (!self.mixed_labels.is_empty()).then_some((&self.mixed_labels[..], self.lambda))
    }

    /// The first label that is none of `classes`, or that there is not one of each picture's.
    ///
    /// # Errors
    /// In words, what is wrong.
    pub(crate) fn check_labels(&self, classes: usize) -> Result<(), String> {
        let (own, others) = (self.labels.len(), self.mixed_labels.len());
        if others != 0 && others != own {
            return Err(format!("a batch of {own} labels has {others} of the pictures they are mixed with"));
        }
        match self.labels.iter().chain(&self.mixed_labels).find(|label| **label as usize >= classes) {
            Some(label) => Err(format!(
                "label {label} does not exist: the network has {classes} classes, numbered from 0"
            )),
            None => Ok(()),
        }
    }

    /// How many pictures all ranks together have in this micro-batch.
    ///
    /// # Errors
    /// It cannot be: fewer than this rank has.
    pub fn of_all_ranks(&self, world_size: u32) -> Result<usize, String> {
        let (own, all) = (self.labels.len(), self.global_samples);
        match world_size {
            1 => Ok(own),
            _ if all < own => {
                Err(format!("a batch of {own} pictures is said to be one of {all} on all {world_size} ranks"))
            }
            _ => Ok(all),
        }
    }
}

impl Shape {
    /// Side of training's inputs in an epoch, from 0.
    pub fn training_size(&self, epoch: u32) -> usize {
        self.training_sizes.get(self.entry_of(epoch)).map_or(self.image_size, |(_, side)| *side)
    }

    /// The entry of [`Shape::training_sizes`] that an epoch belongs to.
    fn entry_of(&self, epoch: u32) -> usize {
        self.training_sizes.partition_point(|(from, _)| *from <= epoch).saturating_sub(1)
    }
}

impl DataSource {
    /// Reads the dataset's index and, when they are few, its pictures.
    ///
    /// Padded crops: CIFAR and IDX pictures, and square files of one size no larger than the network's largest input, are
    /// cropped at their own size and then scaled to the epoch's `image_size`. Of other files the largest centred square
    /// is scaled to that largest input first, and cropped then. Random resized crops, and validation pictures that are resized
    /// and cropped at their centre, are taken from the whole picture; files are decoded for each step then.
    ///
    /// # Errors
    /// Broken files when the job says `fail`; splits and sizes that do not fit the job.
    pub fn open(path: &Path, spec: &DataSpec, seed: u64) -> Result<Self, DataError> {
        Self::open_as(path, spec, seed, Look::Files)
    }

    /// As [`DataSource::open`], which looks at each file.
    ///
    /// # Errors
    /// As [`DataSource::open`].
    pub fn open_as(path: &Path, spec: &DataSpec, seed: u64, look: Look) -> Result<Self, DataError> {
        Self::of_catalog(Catalog::open_with(path, &look.store())?, spec, seed, splits::CACHE_BYTES)
    }

    /// As [`DataSource::open`], with other room for decoded pictures, in bytes a split.
    #[cfg(test)]
    fn open_with_room(path: &Path, spec: &DataSpec, seed: u64, room: usize) -> Result<Self, DataError> {
        Self::of_catalog(Catalog::open(path)?, spec, seed, room)
    }

    fn of_catalog(mut catalog: Catalog, spec: &DataSpec, seed: u64, room: usize) -> Result<Self, DataError> {
        let validation_split = match &spec.validation {
            Validation::Split(name) if name != "none" => Some(name.clone()),
            _ => None,
        };
        if let Some(name) = &validation_split
            && catalog.split(name).is_none()
        {
            let names: Vec<_> = catalog.splits.iter().map(|s| s.name.as_str()).collect();
            let why = if catalog.unlabelled.contains(name) { " that has labels" } else { "" };
            return Err(DataError::Invalid(format!(
                "data.validation: the dataset has no split {name:?}{why}; it has {}. Give one of these, a fraction such as 0.1, or \"none\"",
                names.join(", ")
            )));
        }
        let needed = |name: &str| name == "train" || validation_split.as_deref() == Some(name);
        catalog.splits.retain(|s| needed(&s.name));
        let of_splits = catalog.splits.iter().flat_map(|s| &s.broken);
        let mut skipped: Vec<String> =
            catalog.broken.iter().chain(of_splits).map(|b| format!("{} {}", b.file, b.detail)).collect();
        let sizes = sizes(&catalog, &skipped)?;
        let whole = spec.random_resized_crop || spec.resize_size.is_some();
        let opened = open_splits(&mut catalog, sizes, spec, whole, room, &mut skipped)?;
        if spec.broken_files == BrokenFiles::Fail && !skipped.is_empty() {
            return Err(DataError::Invalid(format!(
                "{} broken file{}: {}{}. Mend or remove {}, or set data.broken_files = \"skip\"",
                skipped.len(),
                if skipped.len() == 1 { "" } else { "s" },
                skipped.iter().take(5).cloned().collect::<Vec<_>>().join("; "),
                if skipped.len() > 5 { "; ..." } else { "" },
                if skipped.len() == 1 { "it" } else { "them" },
            )));
        }
        Self::assemble(catalog, opened, spec, seed, validation_split.is_some(), skipped)
    }

    /// Tells datasets apart whose classes or samples differ, in content, label, name or order: all ranks must have the same.
    pub fn digest(&self) -> u32 {
        let mut hash = crc32fast::Hasher::new();
        for class in &self.shape.classes {
            hash.update(class.as_bytes());
            hash.update(&[0]);
        }
        self.train.add_to(&mut hash);
        self.validation.add_to(&mut hash);
        hash.finalize()
    }

    /// Normalises with these, by channel, in place of what was found: a run that goes on does as it began.
    pub fn set_normalisation(&mut self, mean: Vec<f32>, std: Vec<f32>) {
        for transform in self.training.iter_mut().chain([&mut self.evaluation]) {
            Arc::make_mut(transform).set_normalisation(&mean, &std);
        }
        (self.shape.mean, self.shape.std) = (mean, std);
    }

    fn assemble(
        catalog: Catalog,
        opened: Vec<Opened>,
        spec: &DataSpec,
        seed: u64,
        has_validation_split: bool,
        skipped: Vec<String>,
    ) -> Result<Self, DataError> {
        let mut opened = opened.into_iter();
        let Some(train) = opened.next() else {
            return Err(DataError::Invalid("the dataset has no training split".into()));
        };
        let (height, width, channels) = (train.height, train.width, train.channels);
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
        let side = spec.evaluation_size().map_or(largest, |side| side as usize);
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
                "data.crop_padding: {} pixels around pictures of {width} x {height} would make crops of nothing but padding; 1/8 of a side is usual",
                spec.crop_padding
            )));
        }
        let total = train.labels.len();
        let all = |count: usize| (0..count as u32).collect::<Vec<_>>();
        let (train_chosen, held_out) = match &spec.validation {
            Validation::Fraction(fraction) => shard::hold_out(total, *fraction, seed),
            Validation::Split(_) => (all(total), Vec::new()),
        };
        let (mean, std) = normalisation(spec, &train, channels, height * width * channels)?;
        let size = [height, width, channels];
        let resize = evaluation_resize(spec, side);
        let replaced = || Replaced::new(spec.broken_files == BrokenFiles::Skip);
        let validation = match opened.next().filter(|_| has_validation_split) {
            Some(split) => {
                let (chosen, whole) = (all(split.labels.len()), resize.is_some());
                let Opened { pixels, files_digest, labels, .. } = split;
                Part { pixels, files_digest, labels, chosen, size, whole, replaced: replaced() }
            }
            None => {
                let pixels = match &train.pixels {
                    Pixels::Memory(bytes) => Pixels::Memory(bytes.clone()),
                    Pixels::Files { files, square } => {
                        Pixels::Files { files: files.clone(), square: *square }
                    }
                };
                let (labels, whole) = (train.labels.clone(), resize.is_some());
                let files_digest = train.files_digest;
                Part { pixels, files_digest, labels, chosen: held_out, size, whole, replaced: replaced() }
            }
        };
        let train = Part {
            pixels: train.pixels,
            files_digest: train.files_digest,
            labels: train.labels,
            chosen: train_chosen,
            size,
            whole: spec.random_resized_crop,
            replaced: replaced(),
        };
        if train.chosen.is_empty() {
            return Err(DataError::Invalid("no training picture is left".into()));
        }
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
            mean,
            std,
            skipped,
            whole_pictures: height != width,
            resize,
        };
        Ok(Self::of(shape, training, evaluation, train, validation))
    }

    fn of(
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
            form: Form::default(),
            mixing: Mixing::default(),
            device: None,
            workers: Mutex::default(),
        }
    }

    /// `count` made-up colour pictures of 32 x 32 pixels in 10 classes, cropped, flipped and scaled to
    /// `side`: CIFAR-10 as far as speed can tell.
    pub(crate) fn made_up(count: usize, side: usize, seed: u64) -> Self {
        let size = [32, 32, 3];
        let mut random = super::Random::new(&[seed, count as u64]);
        let bytes: Vec<u8> = (0..count * size.iter().product::<usize>() / 8)
            .flat_map(|_| random.next_u64().to_le_bytes())
            .collect();
        let labels = Arc::new((0..count as u32).map(|i| i % 10).collect::<Vec<_>>());
        let bytes = Arc::new(bytes);
        let part = |chosen| Part {
            pixels: Pixels::Memory(bytes.clone()),
            files_digest: None,
            labels: labels.clone(),
            chosen,
            size,
            whole: false,
            replaced: Replaced::new(false),
        };
        let (mean, std) = (vec![0.4914, 0.4822, 0.4465], vec![0.2023, 0.1994, 0.2010]);
        let spec = DataSpec { crop_padding: 4, horizontal_flip: true, ..DataSpec::default() };
        let transform = Arc::new(Transform::new(&spec, size, side, seed, (&mean, &std)));
        let shape = Shape {
            image_size: side,
            training_sizes: vec![(0, side)],
            channels: size[2],
            classes: (0..10).map(|c| c.to_string()).collect(),
            train_samples: count as u64,
            validation_samples: 0,
            mean,
            std,
            skipped: Vec::new(),
            whole_pictures: false,
            resize: None,
        };
        Self::of(
            shape,
            vec![transform.clone()],
            transform,
            part((0..count as u32).collect()),
            part(Vec::new()),
        )
    }

    /// Training's of an epoch (from 0), or evaluation's.
    fn transform(&self, epoch: Option<u32>) -> &Arc<Transform> {
        epoch.and_then(|epoch| self.training.get(self.shape.entry_of(epoch))).unwrap_or(&self.evaluation)
    }

    /// Has batches made in another form. Erased rectangles are 0 after normalisation, which no byte is: where there are
    /// some, [`Form::Bytes`] gives normalised batches.
    pub fn set_form(&mut self, form: Form) {
        self.form = if form == Form::Bytes && self.evaluation.erases() { Form::Normalised } else { form };
    }

    /// Has the training pictures of each step mixed.
    pub fn set_mixing(&mut self, mixing: Mixing) {
        self.mixing = mixing;
    }

    /// Has JPEG files decoded by `decoder`, shared with cores or not, from the next batch that is begun; by cores alone without one. Batches that
    /// are under way keep theirs.
    pub fn set_decoder(&mut self, decoder: Option<Arc<dyn DeviceDecoder>>, sharing: Sharing) {
        self.device = decoder.map(|decoder| Arc::new(OnDevice::new(decoder, sharing)));
    }

    /// As [`DataSource::set_decoder`], with `most_held` bytes of a batch's files at most.
    #[cfg(test)]
    pub(crate) fn set_decoder_with_room(&mut self, decoder: Arc<dyn DeviceDecoder>, most_held: usize) {
        self.device = Some(Arc::new(OnDevice::with_room(decoder, Sharing::DeviceAlone, most_held)));
    }

    /// Who has decoded how many pictures; `None` where it is the cores alone.
    pub fn decoded(&self) -> Option<Decoded> {
        self.device.as_ref().map(|device| device.decoded())
    }

    /// Waits for what a device decodes and lets go of it. For the end of a process, which must not find it at work.
    pub fn close_decoder(&self) {
        if let Some(device) = &self.device {
            device.decoder.close();
        }
    }

    /// Whether there are JPEG files to decode for each step.
    pub fn decodes_jpeg(&self) -> bool {
        [&self.train, &self.validation].into_iter().any(|part| {
            part.files().is_some_and(|files| part.chosen.iter().any(|place| files.is_jpeg(*place as usize)))
        })
    }

    /// Whether pictures are decoded for each step, mixed, or transformed with more than a crop, a flip and scaling: work
    /// for more than one thread.
    pub fn is_prepared_each_step(&self) -> bool {
        self.train.is_decoded_each_step()
            || self.validation.is_decoded_each_step()
            || !self.evaluation.is_padded_crop_and_flip()
            || self.mixing.is_on()
    }

    /// The pictures, when all of them are in memory and an engine can augment them itself: a padded crop, a flip and
    /// scaling, and not mixed with others.
    pub fn resident(&self) -> Option<Resident> {
        let memory = |part: &Part| match &part.pixels {
            Pixels::Memory(bytes) => Some(bytes.clone()),
            Pixels::Files { .. } => None,
        };
        let Crop::Padded(crop_padding) = self.evaluation.crop else { return None };
        let Transform { height, width, .. } = *self.evaluation;
        if !self.evaluation.is_padded_crop_and_flip() || self.mixing.is_on() {
            return None;
        }
        let (train, validation) = (memory(&self.train)?, memory(&self.validation)?);
        Some(Resident { train, validation, height, width, crop_padding })
    }

    /// The micro-batches of the plan's rank in one epoch, in order, prepared ahead.
    ///
    /// The epoch is one seeded permutation of the split. Optimizer step `s` takes its pictures
    /// `[s * global, (s + 1) * global)`; micro-batch `a` of rank `r` is a contiguous run of them,
    /// in the order (a, r), so that the union over ranks is the same at any number of ranks.
    /// Augmentation is seeded by (seed, epoch, place of the picture in its split), mixing by (seed, epoch, step).
    pub fn epoch(&self, plan: EpochPlan) -> Box<dyn Iterator<Item = Result<Batch, DataError>> + Send> {
        let (part, transform) = (self.train.clone(), self.transform(Some(plan.epoch)).clone());
        let (samples, form, device) = (part.chosen.len(), self.form, self.device.clone());
        let (mixing, seed) = (self.mixing, self.seed);
        let steps = shard::steps_per_epoch(samples, &plan).saturating_sub(plan.first_step);
        let order = Arc::new(shard::epoch_order(samples, self.seed, plan.epoch));
        let (lanes, ahead, workers) = match self.workers(plan.threads) {
            Ok(workers) => workers,
            Err(error) => return Box::new(std::iter::once(Err(error))),
        };
        prepare_ahead(steps as usize * plan.accumulate, lanes, ahead, move |number| {
            let step = plan.first_step + (number / plan.accumulate) as u64;
            let micro = number % plan.accumulate;
            let places = shard::places(samples, &plan, step, micro);
            let all = shard::of_step(samples, &plan, step);
            let mix = mixing.draw(seed, plan.epoch, all.start, transform.side);
            // The picture that the first one is mixed with comes last, and leaves the batch again.
            let before = if places.start > all.start { places.start - 1 } else { all.end - 1 };
            let places = places.chain(mix.as_ref().map(|_| before));
            let chosen = places.map(|p| part.chosen[order[p % samples] as usize]).collect::<Vec<_>>();
            let maker = Maker {
                part: &part,
                transform: &transform,
                form,
                workers: &workers,
                device: device.as_deref(),
            };
            let make = |chosen: &[u32]| maker.make(chosen, Some(plan.epoch));
            let mut batch = part.replaced.with_others(&part, &chosen, make)?;
            if let Some(mix) = mix {
                batch = mix.apply(batch, transform.side, transform.channels);
            }
            Ok(Batch { global_samples: shard::of_all_ranks(samples, &plan, step, micro), ..batch })
        })
    }

    /// One picture as this job sees it, at the network's size there: augmented as in `epoch` (from 0), or not at all. The
    /// way to the network is taken and its normalisation undone, so what is shown is what is trained on.
    ///
    /// # Errors
    /// A place that the split does not have, or a file that is gone.
    pub fn picture(
        &self,
        validation: bool,
        place: u64,
        epoch: Option<u32>,
    ) -> Result<(u32, Picture), DataError> {
        let part = if validation { &self.validation } else { &self.train };
        let chosen = u32::try_from(place).ok().filter(|p| (*p as usize) < part.labels.len());
        let Some(chosen) = chosen else {
            return Err(DataError::Invalid(format!(
                "there is no picture {place}: there are {}",
                part.labels.len()
            )));
        };
        let (transform, workers) = (self.transform(epoch), Workers::alone(1));
        let maker = Maker { part, transform, form: Form::Normalised, workers: &workers, device: None };
        let batch = maker.make(&[chosen], epoch)?;
        let channels = self.shape.channels;
        let byte = |(i, v): (usize, &f32)| {
            let channel = i % channels;
            ((v * self.shape.std[channel] + self.shape.mean[channel]) * 255.0).round().clamp(0.0, 255.0) as u8
        };
        let pixels = batch.images.iter().enumerate().map(byte).collect();
        let side = transform.side as u32;
        Ok((batch.labels[0], Picture { width: side, height: side, channels: channels as u32, pixels }))
    }

    /// The part of the validation split that is `rank`'s, in batches: every sample on exactly one rank.
    pub fn validation(
        &self,
        rank: u32,
        world_size: u32,
        batch_size: usize,
        threads: usize,
    ) -> Box<dyn Iterator<Item = Result<Batch, DataError>> + Send> {
        let (part, transform) = (self.validation.clone(), self.evaluation.clone());
        let share = shard::even_share(part.chosen.len(), rank, world_size);
        let (batch_size, form, device) = (batch_size.max(1), self.form, self.device.clone());
        let (lanes, ahead, workers) = match self.workers(threads) {
            Ok(workers) => workers,
            Err(error) => return Box::new(std::iter::once(Err(error))),
        };
        let batches = prepare_ahead(share.len().div_ceil(batch_size), lanes, ahead, move |number| {
            let first = share.start + number * batch_size;
            let chosen = &part.chosen[first..(first + batch_size).min(share.end)];
            let maker = Maker {
                part: &part,
                transform: &transform,
                form,
                workers: &workers,
                device: device.as_deref(),
            };
            part.replaced.without(&part, chosen, |chosen| maker.make(chosen, None))
        });
        Box::new(batches.filter(|batch| batch.as_ref().map_or(true, |batch| !batch.labels.is_empty())))
    }

    /// Pictures that could not be read since this was last asked, in words, and how many there are by now.
    pub fn newly_broken(&self) -> (Vec<String>, usize) {
        let (mut news, training) = self.train.replaced.news();
        let (more, validation) = self.validation.replaced.news();
        news.extend(more);
        (news, training + validation)
    }

    /// Threads that put batches together, how many batches wait for each, and what they have their pictures made by.
    ///
    /// Simple pictures are made by the thread itself. Where there is more to do, all threads work on the pictures of two
    /// batches: the second one keeps them busy at the end of the first, and memory does not grow with their number. A device
    /// that decodes has a third one, to go on with at once.
    fn workers(&self, threads: usize) -> Result<(usize, usize, Arc<Workers>), DataError> {
        const AHEAD: usize = 2;
        if threads <= 1 || !self.is_prepared_each_step() {
            return Ok((threads, AHEAD, Arc::new(Workers::alone(threads))));
        }
        let mut kept = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        let wanted = (threads, self.device.is_some());
        let workers = match kept.as_ref().filter(|(of, _)| *of == wanted) {
            Some((_, workers)) => workers.clone(),
            None => Arc::new(Workers::pool(threads, wanted.1)?),
        };
        *kept = Some((wanted, workers.clone()));
        Ok((if wanted.1 { 3 } else { 2 }, 1, workers))
    }
}
