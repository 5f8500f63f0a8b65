//! One batch: its pictures opened, transformed and put together.

use super::{
    Batch, Form, Part,
    on_device::{self, Begun},
    workers::{Scratch, Work, Workers},
};
use crate::data::{
    DataError,
    device::OnDevice,
    picture::{PictureRef, Region},
    transform::{AugmentParams, Transform},
};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Makes batches of a split's pictures.
pub(super) struct Maker<'a> {
    pub(super) part: &'a Part,
    pub(super) transform: &'a Transform,
    pub(super) form: Form,
    pub(super) workers: &'a Workers,
    /// Decodes what it takes of files.
    pub(super) device: Option<&'a OnDevice>,
}

impl Maker<'_> {
    /// The pictures at the places `chosen` of a split; `epoch` is `None` for evaluation.
    pub(super) fn make(&self, chosen: &[u32], epoch: Option<u32>) -> Result<Batch, DataError> {
        let Self { part, transform, form, workers, .. } = *self;
        let size = transform.side * transform.side * transform.channels;
        let room = |wanted: Form| if form == wanted { chosen.len() * size } else { 0 };
        let mut batch = Batch {
            images: vec![0.0; room(Form::Normalised)],
            bytes: vec![0; room(Form::Bytes)],
            draws: Vec::new(),
            labels: chosen.iter().map(|c| part.labels[*c as usize]).collect(),
            indices: chosen.iter().map(|c| u64::from(*c)).collect(),
            global_samples: chosen.len(),
            ..Batch::default()
        };
        if form == Form::Draws {
            let packed =
                |place: &u32| epoch.map_or(0, |e| AugmentParams::new(transform, e, (*place).into()).packed());
            batch.draws = chosen.iter().map(packed).collect();
            return Ok(batch);
        }
        let all: Vec<usize> = (0..chosen.len()).collect();
        let pictures = Pictures {
            outputs: match form {
                Form::Bytes => Outputs::Bytes(batch.bytes.chunks_exact_mut(size).map(Mutex::new).collect()),
                _ => Outputs::Normalised(batch.images.chunks_exact_mut(size).map(Mutex::new).collect()),
            },
            maker: self,
            chosen,
            epoch,
        };
        match self.device.filter(|device| device.is_in_use()) {
            Some(device) => {
                let fill =
                    |work: Work, numbers: &[usize], begun: &[Begun<'_>]| pictures.fill(work, numbers, begun);
                on_device::make(device, part, transform, chosen, epoch, workers, &fill)?;
            }
            None => pictures.fill(Work::Decoding, &all, &[])?,
        }
        Ok(batch)
    }
}

/// A batch whose pictures are made, each by whoever comes to it.
struct Pictures<'a> {
    maker: &'a Maker<'a>,
    chosen: &'a [u32],
    epoch: Option<u32>,
    outputs: Outputs<'a>,
}

/// Where each picture goes.
enum Outputs<'a> {
    Bytes(Vec<Mutex<&'a mut [u8]>>),
    Normalised(Vec<Mutex<&'a mut [f32]>>),
}

impl Pictures<'_> {
    /// Makes the pictures of these numbers; `begun` says how far all of the batch's are, if any is.
    fn fill(&self, work: Work, numbers: &[usize], begun: &[Begun<'_>]) -> Result<(), DataError> {
        let Maker { transform, workers, .. } = *self.maker;
        let Transform { side, channels, .. } = *transform;
        workers.each(work, numbers, |number, scratch| {
            let begun = begun.get(number).copied().unwrap_or(Begun::Nothing);
            self.one(number, begun, scratch, &mut |bytes, erased| match &self.outputs {
                Outputs::Bytes(outputs) => locked(&outputs[number]).copy_from_slice(bytes),
                Outputs::Normalised(outputs) => {
                    let mut out = locked(&outputs[number]);
                    transform.normalise(bytes, &mut out);
                    if let Some(erased) = erased {
                        erase(&mut out, side * channels, channels, erased);
                    }
                }
            })
        })
    }

    /// Gives `then` the pixels of a picture, and what of it is to be erased.
    fn one(
        &self,
        number: usize,
        begun: Begun<'_>,
        scratch: &mut Scratch,
        then: &mut dyn FnMut(&[u8], Option<Region>),
    ) -> Result<(), DataError> {
        let Maker { part, transform, .. } = *self.maker;
        let place = self.chosen[number] as usize;
        let Scratch { opener, pipeline } = scratch;
        let params = self.epoch.map(|epoch| AugmentParams::new(transform, epoch, place as u64));
        let erased = params.as_ref().and_then(|params| params.erased);
        let [height, width, _] = part.size.map(|length| length as u32);
        let channels = transform.channels as u32;
        let picture = match begun {
            Begun::Nothing => part.picture(place, opener)?,
            Begun::Read(bytes) => part.decoded(place, bytes, opener)?,
            Begun::Picture(pixels) => PictureRef { width, height, channels, pixels },
            Begun::Cropped(pixels) => {
                let made = match &params {
                    Some(params) => pipeline.train_cropped(transform, pixels, params),
                    None => pixels,
                };
                then(made, erased);
                return Ok(());
            }
        };
        match &params {
            Some(params) => then(pipeline.train(transform, picture, params), erased),
            None => then(pipeline.evaluate(transform, picture), None),
        }
        Ok(())
    }
}

/// Each picture is made by one, so nobody waits here.
fn locked<T>(output: &Mutex<T>) -> MutexGuard<'_, T> {
    output.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes a rectangle 0, as torchvision's `RandomErasing` does after normalisation.
fn erase(image: &mut [f32], row: usize, channels: usize, erased: Region) {
    let (left, width) = (erased.left as usize * channels, erased.width as usize * channels);
    for line in image.chunks_exact_mut(row).skip(erased.top as usize).take(erased.height as usize) {
        line[left..left + width].fill(0.0);
    }
}
