//! One batch: its pictures opened, transformed and put together.

use super::{
    Batch, Form, Part,
    on_device::{self, Begun},
    workers::{Scratch, Workers},
};
use crate::data::{
    DataError,
    device::OnDevice,
    picture::{PictureRef, Region},
    transform::{AugmentParams, Transform},
};

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
        let device = self.device.filter(|device| device.is_in_use());
        let fill = |begun: &[Begun<'_>]| self.fill(&mut batch, chosen, epoch, begun);
        match device {
            Some(device) => on_device::begin(device, part, transform, chosen, epoch, workers, fill)?,
            None => self.fill(&mut batch, chosen, epoch, &[])?,
        }
        Ok(batch)
    }

    /// Makes all pictures of a batch; `begun` says how far they are, if any is.
    fn fill(
        &self,
        batch: &mut Batch,
        chosen: &[u32],
        epoch: Option<u32>,
        begun: &[Begun<'_>],
    ) -> Result<(), DataError> {
        let Self { part, transform, form, workers, .. } = *self;
        let Transform { side, channels, .. } = *transform;
        let size = side * side * channels;
        type Then<'a> = &'a mut dyn FnMut(&[u8], Option<Region>);
        let make = |number: usize, scratch: &mut Scratch, then: Then<'_>| -> Result<(), DataError> {
            let place = chosen[number] as usize;
            let Scratch { opener, pipeline } = scratch;
            let params = epoch.map(|epoch| AugmentParams::new(transform, epoch, place as u64));
            let erased = params.as_ref().and_then(|params| params.erased);
            let [height, width, _] = part.size.map(|length| length as u32);
            let picture = match begun.get(number).copied().unwrap_or(Begun::Nothing) {
                Begun::Nothing => part.picture(place, opener)?,
                Begun::Read(bytes) => part.decoded(place, bytes, opener)?,
                Begun::Picture(pixels) => PictureRef { width, height, channels: channels as u32, pixels },
                Begun::Cropped(pixels) => {
                    then(
                        match &params {
                            Some(params) => pipeline.train_cropped(transform, pixels, params),
                            None => pixels,
                        },
                        erased,
                    );
                    return Ok(());
                }
            };
            match &params {
                Some(params) => then(pipeline.train(transform, picture, params), erased),
                None => then(pipeline.evaluate(transform, picture), None),
            }
            Ok(())
        };
        match form {
            Form::Draws => Ok(()),
            Form::Bytes => workers.each(&mut batch.bytes, size, |number, out, scratch| {
                make(number, scratch, &mut |bytes, _| out.copy_from_slice(bytes))
            }),
            Form::Normalised => workers.each(&mut batch.images, size, |number, out, scratch| {
                make(number, scratch, &mut |bytes, erased| {
                    transform.normalise(bytes, out);
                    if let Some(erased) = erased {
                        erase(out, side * channels, channels, erased);
                    }
                })
            }),
        }
    }
}

/// Makes a rectangle 0, as torchvision's `RandomErasing` does after normalisation.
fn erase(image: &mut [f32], row: usize, channels: usize, erased: Region) {
    let (left, width) = (erased.left as usize * channels, erased.width as usize * channels);
    for line in image.chunks_exact_mut(row).skip(erased.top as usize).take(erased.height as usize) {
        line[left..left + width].fill(0.0);
    }
}
