//! Resizing with Pillow's algorithm: a triangle filter whose width grows with the scale (bilinear with antialiasing),
//! on bytes.

use super::PictureRef;
use fast_image_resize::{
    FilterType, ImageView, PixelTrait, ResizeAlg, ResizeOptions, Resizer,
    images::{TypedCroppedImage, TypedImage, TypedImageRef},
    pixels::{U8, U8x3},
};

/// A rectangle of whole pixels, as for Pillow's `crop`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Region {
    pub(crate) left: u32,
    pub(crate) top: u32,
    pub(crate) width: u32,
    pub(crate) height: u32,
}

/// The part of a picture that is resized.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Area {
    Whole,
    /// Left, top, width and height. The filter also uses the pixels around the window, as if the whole picture were
    /// resized and then cropped.
    Window(f64, f64, f64, f64),
    /// The region is cropped first, so the filter uses no other pixels.
    Cut(Region),
}

/// Resizes pictures, and keeps its buffers. Used by one thread.
#[derive(Debug, Default)]
pub(crate) struct Resize(Resizer);

impl Resize {
    /// Resizes `area` of a picture to `size` (width, height). `to` has as many channels as the picture.
    pub(crate) fn run(&mut self, from: PictureRef<'_>, area: Area, size: (u32, u32), to: &mut [u8]) {
        match from.channels {
            1 => self.run_typed::<U8>(from, area, size, to),
            _ => self.run_typed::<U8x3>(from, area, size, to),
        }
    }

    fn run_typed<P: PixelTrait + Default + Copy + std::fmt::Debug>(
        &mut self,
        from: PictureRef<'_>,
        area: Area,
        (width, height): (u32, u32),
        to: &mut [u8],
    ) {
        // Fails only if sizes do not match, which callers rule out.
        let both = TypedImageRef::<P>::from_buffer(from.width, from.height, from.pixels)
            .ok()
            .zip(TypedImage::<P>::from_buffer(width, height, to).ok());
        let Some((source, mut target)) = both else {
            debug_assert!(false, "a picture's bytes do not fit its size");
            return;
        };
        match area {
            Area::Whole => self.resize(&source, None, &mut target),
            Area::Window(left, top, width, height) => {
                self.resize(&source, Some([left, top, width, height]), &mut target);
            }
            Area::Cut(Region { left, top, width, height }) => {
                let cut = TypedCroppedImage::from_ref(&source, left, top, width, height);
                debug_assert!(cut.is_ok(), "{area:?} of {} x {}", from.width, from.height);
                if let Ok(cut) = cut {
                    self.resize(&cut, None, &mut target);
                }
            }
        }
    }

    fn resize<P: PixelTrait + Default + Copy + std::fmt::Debug>(
        &mut self,
        source: &impl ImageView<Pixel = P>,
        window: Option<[f64; 4]>,
        target: &mut TypedImage<'_, P>,
    ) {
        let mut options = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(FilterType::Bilinear));
        if let Some([left, top, width, height]) = window {
            options = options.crop(left, top, width, height);
        }
        let fits = self.0.resize_typed(source, target, &options);
        debug_assert!(fits.is_ok(), "{fits:?}");
    }
}
