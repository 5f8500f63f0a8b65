//! Makes batches: opens pictures, transforms them and puts them together.

use super::{
    mixing::MixParams,
    on_device::{self, PartialPicture},
    part::Part,
    workers::{Scratch, Work, Workers},
};
use crate::{
    DataError,
    device::OnDevice,
    picture::{PictureRef, Region},
    transform::{AugmentParams, Transform},
};
use lockstep_host::lock;
use std::sync::Mutex;

/// Which field of a [`Batch`] contains the pictures, depending on how much of the transform the engine does itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum BatchFormat {
    /// [`Batch::images`].
    #[default]
    Normalised,
    /// [`Batch::bytes`]: transformed, but not normalised.
    Bytes,
    /// [`Batch::augment_params`]: the engine has all pictures in its memory and augments them.
    AugmentParams,
}

/// A batch ready for an engine, in one [`BatchFormat`].
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Batch {
    /// Normalised pixels, NHWC: `labels.len() * image_size * image_size * channels` values.
    pub images: Vec<f32>,
    /// Pixels as bytes, NHWC, as many as in `images`.
    pub bytes: Vec<u8>,
    /// The augmentation parameters of each picture; see `AugmentParams::packed`.
    pub augment_params: Vec<u32>,
    /// The class of each picture.
    pub labels: Vec<u32>,
    /// With mixup or cutmix: the class of the picture with which each picture is mixed. Empty if pictures are not
    /// mixed.
    pub mixed_labels: Vec<u32>,
    /// The weight of a picture in its mixture. The target is `lambda` on its own label and `1 - lambda` on the other
    /// label.
    pub lambda: f32,
    /// With mixup or cutmix and [`BatchFormat::AugmentParams`]: how the engine mixes the pictures. In other formats
    /// the pictures are already mixed.
    pub mix_params: Option<MixParams>,
    /// The position of each picture in its split, for tests and error messages.
    pub indices: Vec<u64>,
    /// The number of pictures in this micro-batch over all ranks, by which engines divide the sum of losses. The number follows
    /// from the plan, so ranks need not exchange it. A single rank counts `labels` instead.
    pub global_samples: usize,
    /// With class weights: the sum of the weights of this micro-batch's labels over all ranks, by which engines divide
    /// instead of by `global_samples`. The sum follows from the plan too. `None` if pictures are mixed: PyTorch divides
    /// the loss of target probabilities by the number of pictures.
    pub global_weight: Option<f64>,
}

impl Batch {
    /// For each picture, the class of the picture with which it is mixed; and `lambda`. `None` if pictures are not
    /// mixed.
    pub fn mixed(&self) -> Option<(&[u32], f32)> {
        (!self.mixed_labels.is_empty()).then_some((&self.mixed_labels[..], self.lambda))
    }

    /// Checks that each label is below `classes`, and that mixed pictures have one label each.
    ///
    /// # Errors
    /// A message that names the invalid label.
    pub fn check_labels(&self, classes: usize) -> Result<(), String> {
        let (own, others) = (self.labels.len(), self.mixed_labels.len());
        if others != 0 && others != own {
            return Err(format!(
                "a batch of {own} labels has {others} labels of the pictures with which they are mixed"
            ));
        }
        match self.labels.iter().chain(&self.mixed_labels).find(|label| **label as usize >= classes) {
            Some(label) => Err(format!(
                "label {label} does not exist: the network has {classes} classes, numbered from 0"
            )),
            None => Ok(()),
        }
    }

    /// The number of pictures in this micro-batch over all ranks.
    ///
    /// # Errors
    /// The batch states fewer pictures than this rank has.
    pub fn samples_of_all_ranks(&self, world_size: u32) -> Result<usize, String> {
        let (own, all) = (self.labels.len(), self.global_samples);
        match world_size {
            1 => Ok(own),
            _ if all < own => Err(format!(
                "a rank's batch has {own} pictures, but states {all} pictures on all {world_size} ranks"
            )),
            _ => Ok(all),
        }
    }
}

/// Makes batches of the pictures of a part.
pub(super) struct BatchBuilder<'a> {
    pub(super) part: &'a Part,
    pub(super) transform: &'a Transform,
    pub(super) format: BatchFormat,
    pub(super) workers: &'a Workers,
    /// The device that decodes JPEG files, if any. CPU cores decode the files that the device refuses.
    pub(super) device: Option<&'a OnDevice>,
}

impl BatchBuilder<'_> {
    /// Makes a batch of the pictures at the positions `chosen` of the split. `epoch` is `None` for evaluation.
    pub(super) fn make(&self, chosen: &[u32], epoch: Option<u32>) -> Result<Batch, DataError> {
        let Self { part, transform, format, workers, .. } = *self;
        let size = transform.side * transform.side * transform.channels;
        let length = |wanted: BatchFormat| if format == wanted { chosen.len() * size } else { 0 };
        let mut batch = Batch {
            images: vec![0.0; length(BatchFormat::Normalised)],
            bytes: vec![0; length(BatchFormat::Bytes)],
            labels: chosen.iter().map(|c| part.split.labels[*c as usize]).collect(),
            indices: chosen.iter().map(|c| u64::from(*c)).collect(),
            global_samples: chosen.len(),
            ..Batch::default()
        };
        if format == BatchFormat::AugmentParams {
            let packed = |position: &u32| {
                epoch.map_or(0, |e| AugmentParams::new(transform, e, (*position).into()).packed())
            };
            batch.augment_params = chosen.iter().map(packed).collect();
            return Ok(batch);
        }
        let pictures = Pictures {
            outputs: match format {
                BatchFormat::Bytes => {
                    Outputs::Bytes(batch.bytes.chunks_exact_mut(size).map(Mutex::new).collect())
                }
                _ => Outputs::Normalised(batch.images.chunks_exact_mut(size).map(Mutex::new).collect()),
            },
            builder: self,
            chosen,
            epoch,
        };
        match self.device.filter(|device| device.is_in_use()) {
            Some(device) => {
                let fill = |work: Work, numbers: &[usize], partial: &[PartialPicture<'_>]| {
                    pictures.fill(work, numbers, partial)
                };
                on_device::make(device, part, transform, chosen, epoch, workers, &fill)?;
            }
            None => {
                let all: Vec<usize> = (0..chosen.len()).collect();
                pictures.fill(Work::Decoding, &all, &[])?;
            }
        }
        Ok(batch)
    }
}

/// A batch in preparation. Each picture is made by the first thread that takes it.
struct Pictures<'a> {
    builder: &'a BatchBuilder<'a>,
    chosen: &'a [u32],
    epoch: Option<u32>,
    outputs: Outputs<'a>,
}

/// Where each picture of the batch is written.
enum Outputs<'a> {
    Bytes(Vec<Mutex<&'a mut [u8]>>),
    Normalised(Vec<Mutex<&'a mut [f32]>>),
}

impl Pictures<'_> {
    /// Makes the pictures with the indices `numbers` in the batch. `partial` tells how far each picture of the batch is prepared. It is
    /// empty if no picture has been prepared.
    fn fill(&self, work: Work, numbers: &[usize], partial: &[PartialPicture<'_>]) -> Result<(), DataError> {
        let BatchBuilder { transform, workers, .. } = *self.builder;
        let Transform { side, channels, .. } = *transform;
        let made = workers.map(work, numbers, |number, scratch| {
            let partial = partial.get(number).copied().unwrap_or(PartialPicture::Nothing);
            let mut write = |bytes: &[u8], erased: Option<Region>| match &self.outputs {
                Outputs::Bytes(outputs) => lock(&outputs[number]).copy_from_slice(bytes),
                Outputs::Normalised(outputs) => {
                    let mut out = lock(&outputs[number]);
                    transform.normalise(bytes, &mut out);
                    if let Some(erased) = erased {
                        erase(&mut out, side * channels, channels, erased);
                    }
                }
            };
            self.make_one(number, partial, scratch, &mut write)
        });
        made.map(drop)
    }

    /// Makes one picture, and calls `write` with its pixels and the rectangle to erase.
    fn make_one(
        &self,
        number: usize,
        partial: PartialPicture<'_>,
        scratch: &mut Scratch,
        write: &mut dyn FnMut(&[u8], Option<Region>),
    ) -> Result<(), DataError> {
        let BatchBuilder { part, transform, .. } = *self.builder;
        let position = self.chosen[number] as usize;
        let Scratch { opener, pipeline } = scratch;
        let params = self.epoch.map(|epoch| AugmentParams::new(transform, epoch, position as u64));
        let erased = params.as_ref().and_then(|params| params.erased);
        let [height, width, _] = part.split.size.map(|length| length as u32);
        let channels = transform.channels as u32;
        let picture = match partial {
            PartialPicture::Nothing => part.picture(position, opener)?,
            PartialPicture::Read(bytes) => part.decode(position, bytes, opener)?,
            PartialPicture::Picture(pixels) => PictureRef { width, height, channels, pixels },
            PartialPicture::Cropped(pixels) => {
                let made = match &params {
                    Some(params) => pipeline.train_cropped(transform, pixels, params),
                    None => pixels,
                };
                write(made, erased);
                return Ok(());
            }
        };
        match &params {
            Some(params) => write(pipeline.train(transform, picture, params), erased),
            None => write(pipeline.evaluate(transform, picture), None),
        }
        Ok(())
    }
}

/// Sets a rectangle to 0, as torchvision's `RandomErasing` does after normalisation.
fn erase(image: &mut [f32], row: usize, channels: usize, erased: Region) {
    let (left, width) = (erased.left as usize * channels, erased.width as usize * channels);
    for line in image.chunks_exact_mut(row).skip(erased.top as usize).take(erased.height as usize) {
        line[left..left + width].fill(0.0);
    }
}
