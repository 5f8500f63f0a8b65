//! A batch's pictures as far as a device makes them: it decodes, crops and resizes those that it takes.

use super::{Part, workers::Workers};
use crate::data::{
    DataError,
    device::{Encoded, ForCores, OnDevice},
    picture::{Area, PictureRef, ScaleTable, jpeg},
    transform::{AugmentParams, Crop, Transform},
};
use std::sync::atomic::{AtomicUsize, Ordering};

/// How far a picture is when cores go on with it.
#[derive(Debug, Clone, Copy)]
pub(super) enum Begun<'a> {
    Nothing,
    /// Its file is read.
    Read(&'a [u8]),
    /// Decoded, and resized to what the transform begins with.
    Picture(&'a [u8]),
    /// Training's random resized crop, mirrored or not; or all that evaluation makes.
    Cropped(&'a [u8]),
}

/// A file that was read, and where it is decoded.
enum File {
    OnCores(Vec<u8>),
    /// Not kept: cores read it again.
    Passed,
    OnDevice(Vec<u8>, Wanted),
}

/// What a device is to make of a picture.
struct Wanted {
    stored: jpeg::Stored,
    left: u32,
    top: u32,
    rows: ScaleTable,
    columns: ScaleTable,
    flip: bool,
}

/// Calls `then` with how far each of the pictures at `chosen` is, or with nothing if they are in memory; `epoch` is `None`
/// for evaluation. What the device fails at, cores have to do.
///
/// # Errors
/// [`DataError::File`], by the name of its place: a picture that cannot be read. What cannot be decoded is for `then` to find.
pub(super) fn begin<T>(
    device: &OnDevice,
    part: &Part,
    transform: &Transform,
    chosen: &[u32],
    epoch: Option<u32>,
    workers: &Workers,
    then: impl FnOnce(&[Begun<'_>]) -> Result<T, DataError>,
) -> Result<T, DataError> {
    let Some(listing) = part.files() else { return then(&[]) };
    let goal = Goal::new(part, transform, epoch.is_some());
    let params = |place: u32| epoch.map(|epoch| AugmentParams::new(transform, epoch, place.into()));
    let held = AtomicUsize::new(0);
    let files = workers.map(chosen.len(), |number| {
        let place = chosen[number];
        let bytes = listing.read(place as usize)?;
        if held.fetch_add(bytes.len(), Ordering::Relaxed) + bytes.len() > device.most_held {
            device.for_cores(ForCores::LongBatch, 1);
            return Ok(File::Passed);
        }
        let wanted = jpeg::for_hardware(&bytes)
            .and_then(|stored| goal.wanted(stored, transform, params(place).as_ref()));
        Ok(match wanted {
            Ok(wanted) => File::OnDevice(bytes, wanted),
            Err(why) => {
                device.for_cores(why, 1);
                File::OnCores(bytes)
            }
        })
    })?;
    let encoded: Vec<Encoded<'_>> = files
        .iter()
        .filter_map(|file| match file {
            File::OnDevice(bytes, Wanted { stored, left, top, rows, columns, flip }) => {
                Some(Encoded { bytes, stored: *stored, left: *left, top: *top, rows, columns, flip: *flip })
            }
            File::OnCores(_) | File::Passed => None,
        })
        .collect();
    let (mut then, mut result) = (Some(then), None);
    let mut go_on = |made: &[Option<&[u8]>]| {
        let mut made = made.iter();
        let begun: Vec<Begun<'_>> = files
            .iter()
            .map(|file| match file {
                File::Passed => Begun::Nothing,
                File::OnCores(bytes) => Begun::Read(bytes),
                File::OnDevice(bytes, _) => match made.next().copied().flatten() {
                    Some(pixels) if goal.is_input => Begun::Cropped(pixels),
                    Some(pixels) => Begun::Picture(pixels),
                    None => Begun::Read(bytes),
                },
            })
            .collect();
        if let Some(then) = then.take() {
            result = Some(then(&begun));
        }
    };
    if !encoded.is_empty() {
        let mut counts = (0, 0);
        let outcome = device.decoder.decode(&encoded, goal.size, &mut |made| {
            let done = made.iter().flatten().count();
            counts = (done as u64, (made.len() - done) as u64);
            go_on(made);
        });
        match outcome {
            Ok(()) => device.done(counts.0, counts.1),
            Err(why) => device.failed(why, encoded.len() as u64),
        }
    }
    // Without effect if the device has made some.
    go_on(&[]);
    result.unwrap_or_else(|| Err(DataError::Invalid("a batch that nobody made".into())))
}

/// What is made of each picture of a batch.
struct Goal {
    kind: Kind,
    /// Width and height.
    size: (u32, u32),
    /// Whether it is what comes after the crop, not before it.
    is_input: bool,
}

enum Kind {
    RandomResizedCrop {
        scale: [f64; 2],
        ratio: [f64; 2],
    },
    /// The short side, then the centre.
    CentreCrop {
        resize: u32,
    },
    CentreSquare,
    AsItIs,
}

impl Goal {
    /// As [`Part::picture`] and [`crate::data::transform::Pipeline`] go about it.
    fn new(part: &Part, transform: &Transform, training: bool) -> Self {
        let side = transform.side as u32;
        let [height, width, _] = part.size.map(|length| length as u32);
        let input = |kind| Self { kind, size: (side, side), is_input: true };
        match (transform.crop, transform.resize, part.square()) {
            (Crop::RandomResized { scale, ratio }, ..) if training => {
                input(Kind::RandomResizedCrop { scale, ratio })
            }
            (_, Some(resize), _) if !training => input(Kind::CentreCrop { resize }),
            (_, _, Some(square)) => {
                Self { kind: Kind::CentreSquare, size: (square, square), is_input: false }
            }
            (_, _, None) => Self { kind: Kind::AsItIs, size: (width, height), is_input: false },
        }
    }

    fn wanted(
        &self,
        stored: jpeg::Stored,
        transform: &Transform,
        params: Option<&AugmentParams>,
    ) -> Result<Wanted, ForCores> {
        let (width, height) = stored.upright();
        let picture = PictureRef { width, height, channels: 3, pixels: &[] };
        let (area, flip) = match self.kind {
            Kind::RandomResizedCrop { scale, ratio } => {
                let params = params.ok_or(ForCores::Damaged)?;
                (Area::Cut(params.region((width, height), scale, ratio)), params.is_flipped())
            }
            Kind::CentreCrop { resize } => (picture.centre_crop(resize, transform.side as u32), false),
            Kind::CentreSquare => (picture.centre_square(self.size.0).unwrap_or(Area::Whole), false),
            // Cores say that it has changed.
            Kind::AsItIs if (width, height) != self.size => return Err(ForCores::Damaged),
            Kind::AsItIs => (Area::Whole, false),
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
        Ok(Wanted { stored, left, top, rows, columns, flip })
    }
}
