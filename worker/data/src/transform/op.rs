//! One operation on a picture of bytes, with torchvision's semantics for PIL images.

use super::{color, geometry};

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Op {
    Identity,
    /// Horizontal shift per row, in columns.
    ShearX(f64),
    /// Vertical shift per column, in rows.
    ShearY(f64),
    /// Shift to the right, in pixels.
    TranslateX(i32),
    /// Shift down, in pixels.
    TranslateY(i32),
    /// Counter-clockwise rotation, in degrees.
    Rotate(f64),
    /// Factor: 0 is black, 1 is the picture.
    Brightness(f64),
    /// Factor: 0 is grey, 1 is the picture.
    Saturation(f64),
    /// Factor: 0 is the mean, 1 is the picture.
    Contrast(f64),
    /// Turns of the colour wheel, -0.5 to 0.5.
    Hue(f64),
    /// Factor: 0 is blurred, 1 is the picture.
    Sharpness(f64),
    /// Number of upper bits that are kept.
    Posterize(u32),
    /// Values at or above this threshold are inverted.
    Solarize(f64),
    AutoContrast,
    Equalize,
}

impl Op {
    /// Applies the operation to a square of `side` pixels with `channels` bytes each. `scratch` may have any content.
    pub(super) fn apply(self, pixels: &mut [u8], side: usize, channels: usize, scratch: &mut Vec<u8>) {
        let mut affine = |matrix| geometry::affine(pixels, side, channels, matrix, scratch);
        match self {
            Op::Identity => {}
            Op::ShearX(m) => affine([1.0, m, 0.0, 0.0, 1.0, 0.0]),
            Op::ShearY(m) => affine([1.0, 0.0, 0.0, m, 1.0, 0.0]),
            Op::TranslateX(by) => affine([1.0, 0.0, f64::from(-by), 0.0, 1.0, 0.0]),
            Op::TranslateY(by) => affine([1.0, 0.0, 0.0, 0.0, 1.0, f64::from(-by)]),
            Op::Rotate(degrees) => affine(geometry::rotation(degrees, side)),
            Op::Brightness(factor) => color::brightness(pixels, factor),
            Op::Saturation(factor) => color::saturation(pixels, channels, factor),
            Op::Contrast(factor) => color::contrast(pixels, channels, factor),
            Op::Hue(turns) => color::hue(pixels, channels, turns),
            Op::Sharpness(factor) => color::sharpness(pixels, side, channels, factor, scratch),
            Op::Posterize(bits) => color::posterize(pixels, bits),
            Op::Solarize(threshold) => color::solarize(pixels, threshold),
            Op::AutoContrast => color::autocontrast(pixels, channels),
            Op::Equalize => color::equalize(pixels, channels),
        }
    }
}
