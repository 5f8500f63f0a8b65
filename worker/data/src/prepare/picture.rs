//! Converts a picture of the dataset to the JPEG file that the prepared copy contains.

use super::PrepareSettings;
use crate::picture::{Area, Decoder, Resize, is_plain_jpeg};
use jpeg_encoder::{ColorType, SamplingFactor};

/// Decodes, resizes and encodes pictures, and keeps its buffers. Used by one thread.
pub(super) struct Encoder {
    short_side: u32,
    quality: u8,
    decoder: Decoder,
    resize: Resize,
    pixels: Vec<u8>,
}

impl Encoder {
    pub(super) fn new(settings: &PrepareSettings) -> Self {
        let PrepareSettings { short_side, quality, .. } = *settings;
        Self {
            short_side,
            quality,
            decoder: Decoder::default(),
            resize: Resize::default(),
            pixels: Vec::new(),
        }
    }

    /// Converts the picture in a file with these `bytes`. The error is a phrase to follow the picture's name.
    pub(super) fn convert(&mut self, bytes: Vec<u8>) -> Result<Vec<u8>, String> {
        // A picture that is copied unchanged is decoded too, so that a broken picture is found now, not by a job that
        // trains on the copy.
        let picture = self.decoder.decode(&bytes)?;
        let (width, height) = output_size(picture.width, picture.height, self.short_side);
        let keeps_size = (width, height) == (picture.width, picture.height);
        if keeps_size && is_plain_jpeg(&bytes) {
            return Ok(bytes);
        }
        let side = |length: u32| {
            let too_long = || format!("is {width} x {height} pixels; JPEG allows at most {}", u16::MAX);
            u16::try_from(length).map_err(|_| too_long())
        };
        let (jpeg_width, jpeg_height) = (side(width)?, side(height)?);
        let pixels = if keeps_size {
            picture.pixels
        } else {
            self.pixels.resize(width as usize * height as usize * 3, 0);
            self.resize.run(picture, Area::Whole, (width, height), &mut self.pixels);
            &self.pixels[..]
        };
        let mut output = Vec::with_capacity(pixels.len() / 4);
        let mut encoder = jpeg_encoder::Encoder::new(&mut output, self.quality);
        encoder.set_sampling_factor(SamplingFactor::R_4_2_0);
        let encoded = encoder.encode(pixels, jpeg_width, jpeg_height, ColorType::Rgb);
        encoded.map_err(|error| format!("cannot be written as JPEG: {error}"))?;
        Ok(output)
    }
}

/// Width and height after torchvision's `Resize(short_side)`, which truncates fractions. Small pictures are not
/// enlarged.
fn output_size(width: u32, height: u32, short_side: u32) -> (u32, u32) {
    let short = width.min(height);
    if short <= short_side {
        return (width, height);
    }
    let along = |length: u32| (u64::from(short_side) * u64::from(length) / u64::from(short)) as u32;
    (along(width), along(height))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_match_torchvision() {
        // torchvision.transforms.functional._compute_resized_output_size((height, width), [short_side])
        for (from, short_side, to) in [
            ((500, 375), 256, (341, 256)),
            ((375, 500), 256, (256, 341)),
            ((333, 333), 224, (224, 224)),
            ((100, 257), 256, (100, 257)),
            ((256, 9000), 256, (256, 9000)),
            ((257, 9000), 256, (256, 8964)),
        ] {
            assert_eq!(output_size(from.0, from.1, short_side), to, "{from:?}");
        }
    }
}
