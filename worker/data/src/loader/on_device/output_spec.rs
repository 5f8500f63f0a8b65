//! The output of the device for a picture: the part of the picture that is cut out, and the size to which it is
//! resized.

use super::CropParams;
use crate::{
    device::CpuDecodeReason,
    loader::part::Part,
    picture::{Area, PictureRef, ScaleTable, jpeg},
    transform::{AugmentParams, Crop, Transform},
};

/// The output that the device produces for each picture of a batch.
pub(super) struct OutputSpec {
    kind: Kind,
    /// Width and height.
    pub(super) size: (u32, u32),
    /// Whether the output is already the network's input size, after the crop.
    pub(super) is_input: bool,
}

enum Kind {
    RandomResizedCrop {
        scale: [f64; 2],
        ratio: [f64; 2],
    },
    /// The short side is resized, and the centre is cut out.
    CentreCrop {
        resize: u32,
    },
    CentreSquare,
    Unchanged,
}

impl OutputSpec {
    /// Selects the same steps as [`Part::picture`] and [`crate::transform::Pipeline`].
    pub(super) fn new(part: &Part, transform: &Transform, is_training: bool) -> Self {
        let side = transform.side as u32;
        let [height, width, _] = part.split.size.map(|length| length as u32);
        let input = |kind| Self { kind, size: (side, side), is_input: true };
        match (transform.crop, transform.resize, part.square()) {
            (Crop::RandomResized { scale, ratio }, ..) if is_training => {
                input(Kind::RandomResizedCrop { scale, ratio })
            }
            (_, Some(resize), _) if !is_training => input(Kind::CentreCrop { resize }),
            (_, _, Some(square)) => {
                Self { kind: Kind::CentreSquare, size: (square, square), is_input: false }
            }
            (_, _, None) => Self { kind: Kind::Unchanged, size: (width, height), is_input: false },
        }
    }

    /// How the device makes this output from a stored picture. `params` is the augmentation, or `None` for evaluation.
    /// Fails with the reason why CPU cores must decode the picture.
    pub(super) fn crop_params(
        &self,
        stored: jpeg::Stored,
        transform: &Transform,
        params: Option<&AugmentParams>,
    ) -> Result<CropParams, CpuDecodeReason> {
        let (width, height) = stored.upright();
        let picture = PictureRef { width, height, channels: 3, pixels: &[] };
        let (area, flip) = match self.kind {
            Kind::RandomResizedCrop { scale, ratio } => {
                let params = params.ok_or(CpuDecodeReason::Damaged)?;
                (Area::Cut(params.region((width, height), scale, ratio)), params.flip)
            }
            Kind::CentreCrop { resize } => (picture.centre_crop(resize, transform.side as u32), false),
            Kind::CentreSquare => (picture.centre_square(self.size.0).unwrap_or(Area::Whole), false),
            // The file has changed, which the CPU path reports.
            Kind::Unchanged if (width, height) != self.size => return Err(CpuDecodeReason::Damaged),
            Kind::Unchanged => (Area::Whole, false),
        };
        let (to_width, to_height) = self.size;
        let (left, top, columns, rows) = match area {
            Area::Whole => (0, 0, ScaleTable::new(width, to_width), ScaleTable::new(height, to_height)),
            Area::Cut(cut) => (
                cut.left,
                cut.top,
                ScaleTable::new(cut.width, to_width),
                ScaleTable::new(cut.height, to_height),
            ),
            Area::Window(left, top, w, h) => (
                0,
                0,
                ScaleTable::window(width, left, w, to_width),
                ScaleTable::window(height, top, h, to_height),
            ),
        };
        Ok(CropParams { stored, left, top, rows, columns, flip })
    }
}
