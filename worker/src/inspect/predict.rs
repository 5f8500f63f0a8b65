//! Classifies and embeds pictures of users.

use super::model::{BATCH, Model, Output, softmax};
use crate::checkpoint;
use base64::Engine as _;
use lockstep_data::{Picture, loader::Batch};
use lockstep_host::tensors::{HostTensor, NamedTensors};
use lockstep_protocol::inspect::{NamedPicture, Prediction, Probability};
use std::{collections::BTreeMap, path::Path};

/// Pixels of one request: decoding this many takes a few seconds.
const MAX_PIXELS: u64 = 256 << 20;

/// What the model at `path` (a checkpoint's folder, or a safetensors file) says of pictures, prepared as for its
/// validation: the largest centred square, scaled, or resized and cropped at the centre; normalised.
///
/// # Errors
/// A model that cannot be read or was never trained to an end. A picture that cannot be read says so in its own answer.
pub fn predict(path: &Path, pictures: Vec<(String, Vec<u8>)>) -> Result<Vec<Prediction>, String> {
    outputs(path, pictures, Output::Logits)
}

/// As [`predict`], with the embedding of each picture in place of its classes. The network's last layer is not read.
///
/// # Errors
/// As [`predict`].
pub fn embed(path: &Path, pictures: Vec<(String, Vec<u8>)>) -> Result<Vec<Prediction>, String> {
    outputs(path, pictures, Output::Embedding)
}

/// Writes embeddings into a new safetensors file: the tensor `embeddings`, float32, has a row for each picture that could be read, and the
/// metadata's `names` has their names as JSON. Returns the tensor's shape.
///
/// # Errors
/// There is no embedding, or the file cannot be written; a sentence.
pub fn write_embeddings(path: &Path, predictions: &[Prediction]) -> Result<[usize; 2], String> {
    let found = || predictions.iter().filter_map(|of| Some((&of.name, of.embedding.as_ref()?)));
    let (names, rows): (Vec<_>, Vec<_>) = found().unzip();
    let Some(first) = rows.first() else { return Err("no picture could be read".into()) };
    let shape = [rows.len(), first.len()];
    let values = rows.into_iter().flatten().copied().collect();
    let tensor = HostTensor { shape: shape.to_vec(), values };
    let names = serde_json::to_string(&names).map_err(|e| e.to_string())?;
    let metadata = BTreeMap::from([("names".to_owned(), names)]);
    checkpoint::write_tensors(
        path,
        &NamedTensors::from([("embeddings".to_owned(), tensor)]),
        None,
        &metadata,
    )
    .map_err(|e| format!("{}: {e}", path.display()))?;
    Ok(shape)
}

fn outputs(path: &Path, pictures: Vec<(String, Vec<u8>)>, output: Output) -> Result<Vec<Prediction>, String> {
    let mut model = Model::open(path, output)?;
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
        let found = if readable.is_empty() { Vec::new() } else { model.outputs(&batch)? };
        let mut found = found.into_iter();
        for ((name, _), input) in part.iter().zip(inputs) {
            let values = input.and_then(|_| found.next().unwrap_or_else(|| Err("has no answer".into())));
            let (classes, embedding, error) = match values {
                Ok(logits) if output == Output::Logits => {
                    (ranked(&model.classes, &softmax(&logits)), None, None)
                }
                Ok(embedding) => (Vec::new(), Some(embedding), None),
                Err(detail) => (Vec::new(), None, Some(detail)),
            };
            predictions.push(Prediction { name: name.clone(), classes, embedding, error });
        }
    }
    Ok(predictions)
}

pub(super) fn named(
    path: &Path,
    pictures: Vec<NamedPicture>,
    embeds: bool,
) -> Result<Vec<Prediction>, String> {
    let decode = |p: NamedPicture| {
        base64::engine::general_purpose::STANDARD
            .decode(&p.content)
            .map(|bytes| (p.name, bytes))
            .map_err(|e| e.to_string())
    };
    let pictures: Vec<(String, Vec<u8>)> = pictures.into_iter().map(decode).collect::<Result<_, _>>()?;
    check_pixels(pictures.iter().map(|(_, bytes)| bytes.as_slice()))?;
    outputs(path, pictures, if embeds { Output::Embedding } else { Output::Logits })
}

/// Whether these pictures have few enough pixels to be decoded for one request. Only their headers are read: of large pictures that
/// compress well, many fit into a small request.
fn check_pixels<'a>(pictures: impl Iterator<Item = &'a [u8]>) -> Result<(), String> {
    let pixels: u64 = pictures.filter_map(Picture::size_of).map(|(w, h)| u64::from(w) * u64::from(h)).sum();
    if pixels <= MAX_PIXELS {
        return Ok(());
    }
    Err(format!(
        "the pictures have {pixels} pixels together, and one request may have {MAX_PIXELS} ({} megapixels): send fewer at a time, or \
         smaller ones",
        MAX_PIXELS >> 20
    ))
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

#[cfg(test)]
mod tests {
    use super::*;
    use image::{ExtendedColorType, ImageEncoder, codecs::png::PngEncoder};

    fn png(side: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        let pixels = vec![0; (side * side) as usize];
        PngEncoder::new(&mut bytes).write_image(&pixels, side, side, ExtendedColorType::L8).unwrap();
        bytes
    }

    #[test]
    fn a_request_has_a_limit_of_pixels_and_what_has_more_is_not_decoded() {
        let (large, small) = (png(8 << 10), png(1));
        let check = |pictures: &[&Vec<u8>]| check_pixels(pictures.iter().map(|bytes| bytes.as_slice()));
        assert_eq!(check(&[&large; 4]), Ok(()));
        assert_eq!(check(&[&large, &large, &large, &large, &b"no picture".to_vec()]), Ok(()));
        let why = check(&[&large, &large, &large, &large, &small]).unwrap_err();
        assert!(why.contains("have 268435457 pixels") && why.contains("may have 268435456"), "{why}");
        use base64::Engine as _;
        let content = base64::engine::general_purpose::STANDARD.encode(&large);
        let pictures = vec![NamedPicture { name: "large".into(), content }; 5];
        // Before the model is opened, which is not there.
        assert!(named(Path::new("/nowhere"), pictures, false).unwrap_err().contains("(256 megapixels)"));
    }
}
