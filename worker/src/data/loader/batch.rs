//! One batch: its pictures opened, transformed and put together.

use super::{
    Batch, Form, Part,
    workers::{Scratch, Workers},
};
use crate::data::{
    DataError,
    picture::Region,
    transform::{AugmentParams, Transform},
};

/// The pictures at the places `chosen` of a split; `epoch` is `None` for evaluation.
pub(super) fn make_batch(
    part: &Part,
    transform: &Transform,
    chosen: &[u32],
    epoch: Option<u32>,
    form: Form,
    workers: &Workers,
) -> Result<Batch, DataError> {
    let Transform { side, channels, .. } = *transform;
    let size = side * side * channels;
    let room = |wanted: Form| if form == wanted { chosen.len() * size } else { 0 };
    let params = |place: u32| epoch.map(|epoch| AugmentParams::new(transform, epoch, place.into()));
    let mut batch = Batch {
        images: vec![0.0; room(Form::Normalised)],
        bytes: vec![0; room(Form::Bytes)],
        draws: Vec::new(),
        labels: chosen.iter().map(|c| part.labels[*c as usize]).collect(),
        indices: chosen.iter().map(|c| u64::from(*c)).collect(),
        global_samples: chosen.len(),
        ..Batch::default()
    };
    type Then<'a> = &'a mut dyn FnMut(&[u8], Option<Region>);
    let make = |number: usize, scratch: &mut Scratch, then: Then<'_>| -> Result<(), DataError> {
        let place = chosen[number];
        let picture = part.picture(place as usize, &mut scratch.opener)?;
        match params(place) {
            Some(params) => then(scratch.pipeline.train(transform, picture, &params), params.erased),
            None => then(scratch.pipeline.evaluate(transform, picture), None),
        }
        Ok(())
    };
    match form {
        Form::Draws => {
            batch.draws = chosen.iter().map(|place| params(*place).map_or(0, |p| p.packed())).collect();
        }
        Form::Bytes => workers.each(&mut batch.bytes, size, |number, out, scratch| {
            make(number, scratch, &mut |bytes, _| out.copy_from_slice(bytes))
        })?,
        Form::Normalised => workers.each(&mut batch.images, size, |number, out, scratch| {
            make(number, scratch, &mut |bytes, erased| {
                transform.normalise(bytes, out);
                if let Some(erased) = erased {
                    erase(out, side * channels, channels, erased);
                }
            })
        })?,
    }
    Ok(batch)
}

/// Makes a rectangle 0, as torchvision's `RandomErasing` does after normalisation.
fn erase(image: &mut [f32], row: usize, channels: usize, erased: Region) {
    let (left, width) = (erased.left as usize * channels, erased.width as usize * channels);
    for line in image.chunks_exact_mut(row).skip(erased.top as usize).take(erased.height as usize) {
        line[left..left + width].fill(0.0);
    }
}
