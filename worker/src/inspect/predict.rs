//! Classifies pictures of users.

use super::model::{BATCH, Model, softmax};
use crate::data::{Picture, loader::Batch};
use base64::Engine as _;
use lockstep_protocol::inspect::{NamedPicture, Prediction, Probability};
use std::path::Path;

/// What the model at `path` (a checkpoint's folder, or a safetensors file) says of pictures, prepared as for its
/// validation: the largest centred square, scaled, or resized and cropped at the centre; normalised.
///
/// # Errors
/// A model that cannot be read or was never trained to an end. A picture that cannot be read says so in its own answer.
pub fn predict(path: &Path, pictures: Vec<(String, Vec<u8>)>) -> Result<Vec<Prediction>, String> {
    let mut model = Model::open(path)?;
    let mut predictions = Vec::with_capacity(pictures.len());
    for part in pictures.chunks(BATCH) {
        let inputs: Vec<_> = part.iter().map(|(_, bytes)| input(&model, bytes)).collect();
        let readable: Vec<&Vec<f32>> = inputs.iter().flatten().collect();
        let batch = Batch {
            images: readable.iter().flat_map(|i| i.iter().copied()).collect(),
            labels: vec![0; readable.len()],
            indices: (0..readable.len() as u64).collect(),
            ..Batch::default()
        };
        let found = if readable.is_empty() { Vec::new() } else { model.logits(&batch)? };
        let mut found = found.into_iter();
        for ((name, _), input) in part.iter().zip(inputs) {
            let logits = input.and_then(|_| found.next().unwrap_or_else(|| Err("has no answer".into())));
            let (classes, error) = match logits {
                Ok(logits) => (ranked(&model.classes, &softmax(&logits)), None),
                Err(detail) => (Vec::new(), Some(detail)),
            };
            predictions.push(Prediction { name: name.clone(), classes, error });
        }
    }
    Ok(predictions)
}

pub(super) fn named(path: &Path, pictures: Vec<NamedPicture>) -> Result<Vec<Prediction>, String> {
    let decode = |p: NamedPicture| {
        base64::engine::general_purpose::STANDARD
            .decode(&p.content)
            .map(|bytes| (p.name, bytes))
            .map_err(|e| e.to_string())
    };
    predict(path, pictures.into_iter().map(decode).collect::<Result<_, _>>()?)
}

/// Most probable first.
fn ranked(classes: &[String], probabilities: &[f32]) -> Vec<Probability> {
    let mut all: Vec<_> = classes
        .iter()
        .zip(probabilities)
        .map(|(class, probability)| Probability { class: class.clone(), probability: *probability })
        .collect();
    all.sort_by(|a, b| b.probability.total_cmp(&a.probability));
    all
}

/// NHWC, normalised.
fn input(model: &Model, bytes: &[u8]) -> Result<Vec<f32>, String> {
    if bytes.is_empty() {
        return Err("is empty".into());
    }
    let mut picture = Picture::decode(bytes)?;
    if model.channels == 1 {
        picture = grey(picture);
    }
    let side = model.image_size as u32;
    let picture = match model.resize {
        Some(resize) => picture.resized_and_cropped(resize, side),
        None if model.whole_pictures => picture.stretched(side),
        None => picture.centre_square(side),
    };
    let normal = |(i, v): (usize, &u8)| {
        let channel = i % model.channels;
        (f32::from(*v) / 255.0 - model.mean[channel]) / model.std[channel]
    };
    Ok(picture.pixels.iter().enumerate().map(normal).collect())
}

/// Luminance as in ITU-R BT.709; a grey picture stays what it is.
fn grey(picture: Picture) -> Picture {
    let luminance = |p: &[u8]| {
        ((2126 * u32::from(p[0]) + 7152 * u32::from(p[1]) + 722 * u32::from(p[2]) + 5000) / 10_000) as u8
    };
    let pixels = picture.pixels.chunks_exact(3).map(luminance).collect();
    Picture { channels: 1, pixels, ..picture }
}
