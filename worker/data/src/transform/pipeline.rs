//! The steps from a decoded picture to the bytes that are normalised.

use super::{AugmentParams, Crop, Transform, geometry};
use crate::picture::{Area, PictureRef, Resize};

/// Runs the transform. Each thread has its own pipeline, which keeps its buffers.
#[derive(Debug, Default)]
pub(crate) struct Pipeline {
    resize: Resize,
    cropped: Vec<u8>,
    output: Vec<u8>,
    scratch: Vec<u8>,
}

impl Pipeline {
    /// Makes the network's input (height, width, channels) for training.
    pub(crate) fn train<'a>(
        &'a mut self,
        transform: &Transform,
        picture: PictureRef<'a>,
        params: &AugmentParams,
    ) -> &'a [u8] {
        let Transform { height, width, side, channels, .. } = *transform;
        let square = (side as u32, side as u32);
        match transform.crop {
            Crop::Padded(padding) => {
                let is_cropped = padding > 0 || params.flip;
                let is_scaled = height != side || width != side;
                if is_cropped {
                    self.crop_padded(transform, padding, picture.pixels, params);
                }
                let cropped = if is_cropped { &self.cropped } else { picture.pixels };
                if !is_scaled && !transform.changes_after_crop() {
                    return cropped;
                }
                self.output.resize(side * side * channels, 0);
                if is_scaled {
                    let cropped = PictureRef { pixels: cropped, ..picture };
                    self.resize.run(cropped, Area::Whole, square, &mut self.output);
                } else {
                    self.output.copy_from_slice(cropped);
                }
            }
            Crop::RandomResized { scale, ratio } => {
                let region = params.region((picture.width, picture.height), scale, ratio);
                self.output.resize(side * side * channels, 0);
                self.resize.run(picture, Area::Cut(region), square, &mut self.output);
                if params.flip {
                    geometry::flip_horizontal(&mut self.output, side, channels);
                }
            }
        }
        after_crop(&mut self.output, transform, params, &mut self.scratch);
        &self.output
    }

    /// The remaining steps of [`Pipeline::train`] after a random resized crop and its horizontal flip.
    pub(crate) fn train_cropped<'a>(
        &'a mut self,
        transform: &Transform,
        cropped: &'a [u8],
        params: &AugmentParams,
    ) -> &'a [u8] {
        if !transform.changes_after_crop() {
            return cropped;
        }
        self.output.clear();
        self.output.extend_from_slice(cropped);
        after_crop(&mut self.output, transform, params, &mut self.scratch);
        &self.output
    }

    /// Makes the network's input for evaluation: resized and cropped at the centre, or scaled.
    pub(crate) fn evaluate<'a>(&'a mut self, transform: &Transform, picture: PictureRef<'a>) -> &'a [u8] {
        let side = transform.side as u32;
        let area = match transform.resize {
            Some(resize) => picture.centre_crop(resize, side),
            None if (picture.width, picture.height) == (side, side) => return picture.pixels,
            None => Area::Whole,
        };
        self.output.resize(transform.side * transform.side * transform.channels, 0);
        self.resize.run(picture, area, (side, side), &mut self.output);
        &self.output
    }

    /// Copies the window of the padded picture that `params` determine to `cropped`, flipped if `params.flip`.
    fn crop_padded(&mut self, transform: &Transform, padding: usize, pixels: &[u8], params: &AugmentParams) {
        let Transform { height, width, channels, .. } = *transform;
        let AugmentParams { top, left, flip, .. } = *params;
        self.cropped.clear();
        self.cropped.resize(height * width * channels, 0);
        if transform.reflects {
            let shift = [top, left].map(|first| first as isize - padding as isize);
            reflected_window(pixels, [height, width, channels], shift, flip, &mut self.cropped);
            return;
        }
        // The columns of the window that lie inside the picture: `count` columns, starting at column `first` of the
        // window.
        let first = padding.saturating_sub(left);
        let source_first = left.saturating_sub(padding);
        let count = width.saturating_sub(first.max(source_first));
        for row in 0..height {
            let Some(source_row) = (row + top).checked_sub(padding).filter(|r| *r < height) else {
                continue;
            };
            let source = &pixels[(source_row * width + source_first) * channels..][..count * channels];
            let target = &mut self.cropped[row * width * channels..][..width * channels];
            if flip {
                let mirrored = width - first - count;
                let target = &mut target[mirrored * channels..][..count * channels];
                for (t, s) in target.chunks_exact_mut(channels).rev().zip(source.chunks_exact(channels)) {
                    t.copy_from_slice(s);
                }
            } else {
                target[first * channels..][..count * channels].copy_from_slice(source);
            }
        }
    }
}

/// Copies a window of the size of `picture` (height, width, channels) that is shifted by `down` and `right` pixels, mirrored left to
/// right if `flip`. Beyond its border the picture is mirrored, as in PyTorch's `reflect` padding. A shift must be less than the
/// picture's side.
pub(crate) fn reflected_window<T: Copy>(
    picture: &[T],
    [height, width, channels]: [usize; 3],
    [down, right]: [isize; 2],
    flip: bool,
    to: &mut [T],
) {
    let reflected = |at: isize, side: usize| {
        let last = side as isize - 1;
        (last - (last - at.abs()).abs()) as usize
    };
    for (row, to) in to.chunks_exact_mut(width * channels).enumerate() {
        let from = &picture[reflected(row as isize + down, height) * width * channels..];
        for (column, to) in to.chunks_exact_mut(channels).enumerate() {
            let column = if flip { width - 1 - column } else { column };
            let at = reflected(column as isize + right, width) * channels;
            to.copy_from_slice(&from[at..at + channels]);
        }
    }
}

/// Applies the operations after the crop and its horizontal flip.
fn after_crop(output: &mut [u8], transform: &Transform, params: &AugmentParams, scratch: &mut Vec<u8>) {
    let Transform { side, channels, .. } = *transform;
    if params.vertical_flip {
        geometry::flip_vertical(output, side, channels);
    }
    for op in &params.ops {
        op.apply(output, side, channels, scratch);
    }
}
