//! Classifies and embeds users' pictures.

use super::model::{BATCH, Model, Output, softmax};
use crate::checkpoint;
use base64::Engine as _;
use lockstep_data::{Picture, loader::Batch};
use lockstep_host::tensors::{HostTensor, NamedTensors};
use lockstep_protocol::inspect::{NamedPicture, Prediction, Probability};
use std::{collections::BTreeMap, path::Path};

/// Maximum number of pixels per request, which take a few seconds to decode.
const MAX_PIXELS: u64 = 256 << 20;

/// Predicts the classes of pictures with the model at `path` (a checkpoint's folder, or a safetensors file). Pictures
/// are prepared as in validation: the largest centred square is scaled, the picture is resized and cropped at its
/// centre, or the whole picture is stretched to a square. Then the picture is normalised.
///
/// # Errors
/// The model cannot be read, or its training has diverged. For a picture that cannot be read, only its own result is
/// an error.
pub fn predict(path: &Path, pictures: Vec<(String, Vec<u8>)>) -> Result<Vec<Prediction>, String> {
    compute_outputs(path, pictures, Output::Logits)
}

/// Computes the embedding of each picture, with pictures prepared as in [`predict`]. The network's last layer is not
/// read.
///
/// # Errors
/// As [`predict`].
pub fn embed(path: &Path, pictures: Vec<(String, Vec<u8>)>) -> Result<Vec<Prediction>, String> {
    compute_outputs(path, pictures, Output::Embedding)
}

/// Writes embeddings to a new safetensors file. The float32 tensor `embeddings` has a row for each picture that could
/// be read. The metadata's `names` lists the names of these pictures as JSON. Returns the tensor's shape.
///
/// # Errors
/// There is no embedding, or the file cannot be written.
pub fn write_embeddings(path: &Path, predictions: &[Prediction]) -> Result<[usize; 2], String> {
    let found = || predictions.iter().filter_map(|p| Some((&p.name, p.embedding.as_ref()?)));
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

fn compute_outputs(
    path: &Path,
    pictures: Vec<(String, Vec<u8>)>,
    output: Output,
) -> Result<Vec<Prediction>, String> {
    let mut model = Model::open(path, output)?;
    let mut predictions = Vec::with_capacity(pictures.len());
    for chunk in pictures.chunks(BATCH) {
        let inputs: Vec<_> = chunk.iter().map(|(_, bytes)| network_input(&model, bytes)).collect();
        let readable: Vec<&Vec<f32>> = inputs.iter().flatten().collect();
        let batch = Batch {
            images: readable.iter().flat_map(|i| i.iter().copied()).collect(),
            labels: vec![0; readable.len()],
            indices: (0..readable.len() as u64).collect(),
            ..Batch::default()
        };
        let found = if readable.is_empty() { Vec::new() } else { model.outputs(&batch)? };
        let mut found = found.into_iter();
        for ((name, _), input) in chunk.iter().zip(inputs) {
            let values = input.and_then(|_| found.next().unwrap_or_else(|| Err("has no result".into())));
            let (classes, embedding, error) = match values {
                Ok(logits) if output == Output::Logits => {
                    (rank_classes(&model.classes, &softmax(&logits)), None, None)
                }
                Ok(embedding) => (Vec::new(), Some(embedding), None),
                Err(detail) => (Vec::new(), None, Some(detail)),
            };
            predictions.push(Prediction { name: name.clone(), classes, embedding, error });
        }
    }
    Ok(predictions)
}

pub(super) fn predict_named(
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
    compute_outputs(path, pictures, if embeds { Output::Embedding } else { Output::Logits })
}

/// Fails if the pictures have too many pixels for one request. Reads only headers. A small request can contain huge
/// pictures that compress well.
fn check_pixels<'a>(pictures: impl Iterator<Item = &'a [u8]>) -> Result<(), String> {
    let pixels: u64 = pictures.filter_map(Picture::size_of).map(|(w, h)| u64::from(w) * u64::from(h)).sum();
    if pixels <= MAX_PIXELS {
        return Ok(());
    }
    Err(format!(
        "the pictures have {pixels} pixels together; one request may have at most {MAX_PIXELS} ({} megapixels): send fewer \
         pictures at a time, or smaller pictures",
        MAX_PIXELS >> 20
    ))
}

/// The classes in descending order of probability.
fn rank_classes(classes: &[String], probabilities: &[f32]) -> Vec<Probability> {
    let mut all: Vec<_> = classes
        .iter()
        .zip(probabilities)
        .map(|(class, probability)| Probability { class: class.clone(), probability: *probability })
        .collect();
    all.sort_by(|a, b| b.probability.total_cmp(&a.probability));
    all
}

/// The network's input for a picture: normalised, HWC.
fn network_input(model: &Model, bytes: &[u8]) -> Result<Vec<f32>, String> {
    if bytes.is_empty() {
        return Err("is empty".into());
    }
    let mut picture = Picture::decode(bytes)?;
    if model.channels == 1 {
        picture = to_grey(picture);
    }
    let side = model.image_size as u32;
    let picture = match model.resize {
        Some(resize) => picture.resized_and_cropped(resize, side),
        None if model.whole_pictures => picture.stretched(side),
        None => picture.centre_square(side),
    };
    let normalise = |(i, v): (usize, &u8)| {
        let channel = i % model.channels;
        (f32::from(*v) / 255.0 - model.mean[channel]) / model.std[channel]
    };
    Ok(picture.pixels.iter().enumerate().map(normalise).collect())
}

/// ITU-R BT.709 luminance. Grey pictures are unchanged.
fn to_grey(picture: Picture) -> Picture {
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
    fn a_request_above_the_pixel_limit_is_refused_undecoded() {
        let (large, small) = (png(8 << 10), png(1));
        let check = |pictures: &[&Vec<u8>]| check_pixels(pictures.iter().map(|bytes| bytes.as_slice()));
        assert_eq!(check(&[&large; 4]), Ok(()));
        assert_eq!(check(&[&large, &large, &large, &large, &b"no picture".to_vec()]), Ok(()));
        let why = check(&[&large, &large, &large, &large, &small]).unwrap_err();
        assert!(why.contains("have 268435457 pixels") && why.contains("at most 268435456"), "{why}");
        let content = base64::engine::general_purpose::STANDARD.encode(&large);
        let pictures = vec![NamedPicture { name: "large".into(), content }; 5];
        // Checked before the model, which does not exist, is opened.
        assert!(
            predict_named(Path::new("/nowhere"), pictures, false).unwrap_err().contains("(256 megapixels)")
        );
    }
}
