//! Batches, prepared ahead of the step by threads of their own.

use super::{
    Catalog, DataError, Picture,
    augment::{Augmenter, Draw, Recipe},
    listing::Listing,
    shard,
};
use lockstep_protocol::spec::{BrokenFiles, DataSpec, Validation};
use std::{path::Path, sync::Arc};

use ahead::prepare_ahead;
use replaced::Replaced;
use splits::{Opened, normalisation, open_splits, sizes};

mod ahead;
mod replaced;
mod splits;

/// What a batch holds of its pictures; engines differ in what they do themselves.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Form {
    /// [`Batch::images`].
    #[default]
    Normalised,
    /// [`Batch::bytes`]: cropped, flipped and scaled, but not normalised.
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
    /// The augmentation of each picture; see [`Draw::packed`].
    pub draws: Vec<u32>,
    /// Class of each picture.
    pub labels: Vec<u32>,
    /// Place of each picture in its split, for tests and for naming mistakes.
    pub indices: Vec<u64>,
    /// Pictures of this micro-batch on all ranks together: engines divide by it. It follows from the plan, so ranks need
    /// not ask each other. Read where there are several ranks; a single one counts `labels`.
    pub global_samples: usize,
}

/// What a dataset looks like to a job.
#[derive(Debug, Clone, PartialEq)]
pub struct Shape {
    /// Side of the network's input in pixels.
    pub image_size: usize,
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
}

/// A dataset opened for a job. Every rank reads the same files; which pictures a rank gets follows
/// from its number.
#[derive(Debug)]
pub struct DataSource {
    /// What was found.
    pub shape: Shape,
    recipe: Arc<Recipe>,
    train: Arc<Part>,
    validation: Arc<Part>,
    seed: u64,
    form: Form,
    digest: u32,
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
    labels: Arc<Vec<u32>>,
    /// Places in the split, ascending.
    chosen: Vec<u32>,
    /// Bytes of a picture in memory.
    size: usize,
    /// Pictures that cannot be read any more.
    replaced: Replaced,
}

impl Part {
    fn with_picture<T>(&self, place: usize, then: impl FnOnce(&[u8]) -> T) -> Result<T, DataError> {
        match &self.pixels {
            Pixels::Memory(bytes) => Ok(then(&bytes[place * self.size..][..self.size])),
            Pixels::Files { files, square } => {
                let picture = files.picture(place)?;
                let picture = match square {
                    Some(side) => picture.centre_square(*side),
                    None => picture,
                };
                if picture.pixels.len() != self.size {
                    return Err(files.broken(place, "has changed its size since the job began".into()));
                }
                Ok(then(&picture.pixels))
            }
        }
    }
}

impl Batch {
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

impl DataSource {
    /// Reads the dataset's index and, when they are few, its pictures.
    ///
    /// CIFAR and IDX pictures, and square files of one size no larger than `image_size`, are cropped
    /// at their own size and then scaled to `image_size`. Of other files the largest centred square
    /// is scaled to `image_size` first, and cropped then.
    ///
    /// # Errors
    /// Broken files when the job says `fail`; splits and sizes that do not fit the job.
    pub fn open(path: &Path, spec: &DataSpec, seed: u64) -> Result<Self, DataError> {
        Self::open_with_room(path, spec, seed, splits::CACHE_BYTES)
    }

    /// As [`DataSource::open`], with other room for decoded pictures, in bytes a split.
    fn open_with_room(path: &Path, spec: &DataSpec, seed: u64, room: usize) -> Result<Self, DataError> {
        let mut catalog = Catalog::open(path)?;
        let validation_split = match &spec.validation {
            Validation::Split(name) if name != "none" => Some(name.clone()),
            _ => None,
        };
        if let Some(name) = &validation_split
            && catalog.split(name).is_none()
        {
            let names: Vec<_> = catalog.splits.iter().map(|s| s.name.as_str()).collect();
            return Err(DataError::Invalid(format!(
                "data.validation: the dataset has no split {name:?}; it has {}. Give one of these, a fraction such as 0.1, or \"none\"",
                names.join(", ")
            )));
        }
        let needed = |name: &str| name == "train" || validation_split.as_deref() == Some(name);
        catalog.splits.retain(|s| needed(&s.name));
        let of_splits = catalog.splits.iter().flat_map(|s| &s.broken);
        let mut skipped: Vec<String> =
            catalog.broken.iter().chain(of_splits).map(|b| format!("{} {}", b.file, b.detail)).collect();
        let sizes = sizes(&catalog, &skipped)?;
        let opened = open_splits(&mut catalog, sizes, spec, room, &mut skipped)?;
        let digest = splits::digest(&opened);
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
        let data = Self::assemble(catalog, opened, spec, seed, validation_split.is_some(), skipped)?;
        Ok(Self { digest, ..data })
    }

    /// Tells datasets apart whose samples have other names, sizes, labels or order: all ranks must have the same.
    pub fn digest(&self) -> u32 {
        self.digest
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
        let size = height * width * channels;
        let side = match spec.image_size {
            Some(side) => side as usize,
            None if height == width => height,
            None => {
                return Err(DataError::Invalid(format!(
                    "pictures are {width} x {height}: set data.image_size, the side of the square that the network sees"
                )));
            }
        };
        if spec.crop_padding as usize >= height.min(width) {
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
        let (mean, std) = normalisation(spec, &train, channels, size)?;
        let replaced = || Replaced::new(spec.broken_files == BrokenFiles::Skip);
        let validation = match opened.next().filter(|_| has_validation_split) {
            Some(split) => {
                let chosen = all(split.labels.len());
                Part { pixels: split.pixels, labels: split.labels, chosen, size, replaced: replaced() }
            }
            None => {
                let pixels = match &train.pixels {
                    Pixels::Memory(bytes) => Pixels::Memory(bytes.clone()),
                    Pixels::Files { files, square } => {
                        Pixels::Files { files: files.clone(), square: *square }
                    }
                };
                Part { pixels, labels: train.labels.clone(), chosen: held_out, size, replaced: replaced() }
            }
        };
        let train = Part {
            pixels: train.pixels,
            labels: train.labels,
            chosen: train_chosen,
            size,
            replaced: replaced(),
        };
        if train.chosen.is_empty() {
            return Err(DataError::Invalid("no training picture is left".into()));
        }
        let recipe = Recipe {
            height,
            width,
            channels,
            side,
            crop_padding: spec.crop_padding as usize,
            horizontal_flip: spec.horizontal_flip,
            seed,
            table: Recipe::normalisation(&mean, &std),
        };
        let shape = Shape {
            image_size: side,
            channels,
            classes: catalog.classes,
            train_samples: train.chosen.len() as u64,
            validation_samples: validation.chosen.len() as u64,
            mean,
            std,
            skipped,
            whole_pictures: height != width,
        };
        Ok(Self {
            shape,
            recipe: Arc::new(recipe),
            train: Arc::new(train),
            validation: Arc::new(validation),
            seed,
            form: Form::default(),
            digest: 0,
        })
    }

    /// `count` made-up colour pictures of 32 x 32 pixels in 10 classes, cropped, flipped and scaled to
    /// `side`: CIFAR-10 as far as speed can tell.
    pub(crate) fn made_up(count: usize, side: usize, seed: u64) -> Self {
        let (height, width, channels) = (32, 32, 3);
        let size = height * width * channels;
        let mut random = super::Random::new(&[seed, count as u64]);
        let bytes: Vec<u8> = (0..count * size / 8).flat_map(|_| random.next_u64().to_le_bytes()).collect();
        let labels = Arc::new((0..count as u32).map(|i| i % 10).collect::<Vec<_>>());
        let bytes = Arc::new(bytes);
        let part = |chosen| Part {
            pixels: Pixels::Memory(bytes.clone()),
            labels: labels.clone(),
            chosen,
            size,
            replaced: Replaced::new(false),
        };
        let (mean, std) = (vec![0.4914, 0.4822, 0.4465], vec![0.2023, 0.1994, 0.2010]);
        let recipe = Recipe {
            height,
            width,
            channels,
            side,
            crop_padding: 4,
            horizontal_flip: true,
            seed,
            table: Recipe::normalisation(&mean, &std),
        };
        let shape = Shape {
            image_size: side,
            channels,
            classes: (0..10).map(|c| c.to_string()).collect(),
            train_samples: count as u64,
            validation_samples: 0,
            mean,
            std,
            skipped: Vec::new(),
            whole_pictures: false,
        };
        let train = part((0..count as u32).collect());
        let validation = part(Vec::new());
        Self {
            shape,
            recipe: Arc::new(recipe),
            train: Arc::new(train),
            validation: Arc::new(validation),
            seed,
            form: Form::default(),
            digest: 0,
        }
    }

    /// Has batches made in another form.
    pub fn set_form(&mut self, form: Form) {
        self.form = form;
    }

    /// The pictures, when all of them are in memory.
    pub fn resident(&self) -> Option<Resident> {
        let memory = |part: &Part| match &part.pixels {
            Pixels::Memory(bytes) => Some(bytes.clone()),
            Pixels::Files { .. } => None,
        };
        let Recipe { height, width, crop_padding, .. } = *self.recipe;
        let (train, validation) = (memory(&self.train)?, memory(&self.validation)?);
        Some(Resident { train, validation, height, width, crop_padding })
    }

    /// The micro-batches of the plan's rank in one epoch, in order, prepared ahead.
    ///
    /// The epoch is one seeded permutation of the split. Optimizer step `s` takes its pictures
    /// `[s * global, (s + 1) * global)`; micro-batch `a` of rank `r` is a contiguous run of them,
    /// in the order (a, r), so that the union over ranks is the same at any number of ranks.
    /// Augmentation is seeded by (seed, epoch, place of the picture in its split).
    pub fn epoch(&self, plan: EpochPlan) -> Box<dyn Iterator<Item = Result<Batch, DataError>> + Send> {
        let (part, recipe) = (self.train.clone(), self.recipe.clone());
        let (samples, form) = (part.chosen.len(), self.form);
        let steps = shard::steps_per_epoch(samples, &plan).saturating_sub(plan.first_step);
        let order = Arc::new(shard::epoch_order(samples, self.seed, plan.epoch));
        prepare_ahead(steps as usize * plan.accumulate, plan.threads, move |number| {
            let step = plan.first_step + (number / plan.accumulate) as u64;
            let micro = number % plan.accumulate;
            let places = shard::places(samples, &plan, step, micro);
            let chosen = places.map(|p| part.chosen[order[p % samples] as usize]).collect::<Vec<_>>();
            let make = |chosen: &[u32]| make_batch(&part, &recipe, chosen, Some(plan.epoch), form);
            let batch = part.replaced.with_others(&part, &chosen, make)?;
            Ok(Batch { global_samples: shard::of_all_ranks(samples, &plan, step, micro), ..batch })
        })
    }

    /// One picture as this job sees it, at the network's size: augmented as in `epoch` (from 0), or not at all. The
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
        let batch = make_batch(part, &self.recipe, &[chosen], epoch, Form::Normalised)?;
        let channels = self.shape.channels;
        let byte = |(i, v): (usize, &f32)| {
            let channel = i % channels;
            ((v * self.shape.std[channel] + self.shape.mean[channel]) * 255.0).round().clamp(0.0, 255.0) as u8
        };
        let pixels = batch.images.iter().enumerate().map(byte).collect();
        let side = self.shape.image_size as u32;
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
        let (part, recipe) = (self.validation.clone(), self.recipe.clone());
        let share = shard::even_share(part.chosen.len(), rank, world_size);
        let (batch_size, form) = (batch_size.max(1), self.form);
        let batches = prepare_ahead(share.len().div_ceil(batch_size), threads, move |number| {
            let first = share.start + number * batch_size;
            let chosen = &part.chosen[first..(first + batch_size).min(share.end)];
            let make = |chosen: &[u32]| make_batch(&part, &recipe, chosen, None, form);
            part.replaced.without(&part, chosen, make)
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
}

/// `epoch` is `None` for evaluation.
fn make_batch(
    part: &Part,
    recipe: &Recipe,
    chosen: &[u32],
    epoch: Option<u32>,
    form: Form,
) -> Result<Batch, DataError> {
    let size = recipe.side * recipe.side * recipe.channels;
    let room = |wanted: Form| if form == wanted { chosen.len() * size } else { 0 };
    let draw = |place: u32| epoch.map_or_else(Draw::default, |epoch| Draw::new(recipe, epoch, place.into()));
    let mut batch = Batch {
        images: vec![0.0; room(Form::Normalised)],
        bytes: vec![0; room(Form::Bytes)],
        draws: Vec::new(),
        labels: chosen.iter().map(|c| part.labels[*c as usize]).collect(),
        indices: chosen.iter().map(|c| u64::from(*c)).collect(),
        global_samples: chosen.len(),
    };
    if form == Form::Draws {
        batch.draws = chosen.iter().map(|place| draw(*place).packed()).collect();
        return Ok(batch);
    }
    let mut augmenter = Augmenter::new(recipe);
    for (number, place) in chosen.iter().enumerate() {
        let range = number * size..(number + 1) * size;
        part.with_picture(*place as usize, |pixels| {
            let scaled = match epoch {
                Some(_) => augmenter.cropped_and_scaled(pixels, draw(*place)),
                None => augmenter.scaled(pixels),
            };
            match form {
                Form::Normalised => recipe.normalise(scaled, &mut batch.images[range]),
                Form::Bytes | Form::Draws => batch.bytes[range].copy_from_slice(scaled),
            }
        })?;
    }
    Ok(batch)
}
