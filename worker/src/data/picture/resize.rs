//! Resizing as Pillow does it: a triangle filter as wide as the scale (bilinear with antialias), on bytes.

use super::PictureRef;
use fast_image_resize::{
    FilterType, IntoImageView, PixelType, ResizeAlg, ResizeOptions, Resizer,
    images::{CroppedImage, Image, ImageRef},
};

/// A rectangle of whole pixels: what Pillow's `crop` takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::data) struct Region {
    pub(in crate::data) left: u32,
    pub(in crate::data) top: u32,
    pub(in crate::data) width: u32,
    pub(in crate::data) height: u32,
}

/// What of a picture is resized.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::data) enum Area {
    Whole,
    /// Left, top, width and height. The filter also sees the pixels around it, as when the whole picture is resized
    /// and then cropped.
    Window(f64, f64, f64, f64),
    /// Cut out first: the filter sees nothing else.
    Cut(Region),
}

/// Resizes pictures; one a thread, as it keeps its buffers.
#[derive(Debug, Default)]
pub(in crate::data) struct Resize(Resizer);

impl Resize {
    /// Makes `area` of a picture `to.len()` bytes of `width` x `height` pixels.
    pub(in crate::data) fn run(
        &mut self,
        from: PictureRef<'_>,
        area: Area,
        (width, height): (u32, u32),
        to: &mut [u8],
    ) {
        let kind = if from.channels == 1 { PixelType::U8 } else { PixelType::U8x3 };
        let mut options = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(FilterType::Bilinear));
        if let Area::Window(left, top, width, height) = area {
            options = options.crop(left, top, width, height);
        }
        // Sizes and pixel types fit by construction, which is all that can fail here.
        let both = ImageRef::new(from.width, from.height, from.pixels, kind)
            .ok()
            .zip(Image::from_slice_u8(width, height, to, kind).ok());
        let Some((source, mut target)) = both else {
            debug_assert!(false, "a picture's bytes do not fit its size");
            return;
        };
        match area {
            Area::Cut(Region { left, top, width, height }) => {
                let cut = CroppedImage::new(&source, left, top, width, height);
                debug_assert!(cut.is_ok(), "{area:?} of {} x {}", from.width, from.height);
                if let Ok(cut) = cut {
                    self.resize(&cut, &mut target, &options);
                }
            }
            Area::Whole | Area::Window(..) => self.resize(&source, &mut target, &options),
        }
    }

    fn resize(&mut self, source: &impl IntoImageView, target: &mut Image<'_>, options: &ResizeOptions) {
        let fits = self.0.resize(source, target, options);
        debug_assert!(fits.is_ok(), "{fits:?}");
    }
}
