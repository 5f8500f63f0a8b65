//! One operation on a picture of bytes, with the meaning that torchvision gives it on PIL images.

use super::{color, geometry};

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Op {
    Identity,
    /// Columns move by this many for each row.
    ShearX(f64),
    /// Rows move by this many for each column.
    ShearY(f64),
    /// Pixels to the right.
    TranslateX(i32),
    /// Pixels down.
    TranslateY(i32),
    /// Degrees, counter-clockwise.
    Rotate(f64),
    /// 0 is black, 1 the picture.
    Brightness(f64),
    /// 0 is grey, 1 the picture.
    Saturation(f64),
    /// 0 is the mean, 1 the picture.
    Contrast(f64),
    /// -0.5 to 0.5: turns of the colour wheel.
    Hue(f64),
    /// 0 is blurred, 1 the picture.
    Sharpness(f64),
    /// Upper bits that are kept.
    Posterize(u32),
    /// Values from here on are inverted.
    Solarize(f64),
    AutoContrast,
    Equalize,
}

impl Op {
    /// Changes a square of `side` pixels of `channels` bytes; `scratch` may hold anything.
    pub(super) fn apply(self, pixels: &mut [u8], side: usize, channels: usize, scratch: &mut Vec<u8>) {
        let mut moved = |matrix| geometry::affine(pixels, side, channels, matrix, scratch);
        match self {
            Op::Identity => {}
            Op::ShearX(m) => moved([1.0, m, 0.0, 0.0, 1.0, 0.0]),
            Op::ShearY(m) => moved([1.0, 0.0, 0.0, m, 1.0, 0.0]),
            Op::TranslateX(by) => moved([1.0, 0.0, f64::from(-by), 0.0, 1.0, 0.0]),
            Op::TranslateY(by) => moved([1.0, 0.0, 0.0, 0.0, 1.0, f64::from(-by)]),
            Op::Rotate(degrees) => moved(geometry::rotation(degrees, side)),
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
