//! A batch's pictures where a device decodes: it also crops and resizes those that it takes. Cores make the others at the same
//! time, and some that it would take, too: as many as keep both busy equally long.

use super::{
    part::Part,
    workers::{Work, Workers},
};
use crate::data::{
    DataError,
    device::{Encoded, ForCores, OnDevice},
    picture::{Area, PictureRef, ScaleTable, jpeg},
    transform::{AugmentParams, Crop, Transform},
};
use std::{
    panic::resume_unwind,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::Instant,
};

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

/// Makes pictures of a batch: those of these numbers, each of all as far as it is begun.
type Fill<'a> = &'a (dyn Fn(Work, &[usize], &[Begun<'_>]) -> Result<(), DataError> + Sync);

/// Has `fill` make each of the pictures at `chosen` once; `epoch` is `None` for evaluation. What the device fails at, cores
/// have to do.
///
/// # Errors
/// [`DataError::File`], by the name of its place: a picture that cannot be read; and those of `fill`, which finds what cannot
/// be decoded.
pub(super) fn make(
    device: &OnDevice,
    part: &Part,
    transform: &Transform,
    chosen: &[u32],
    epoch: Option<u32>,
    workers: &Workers,
    fill: Fill<'_>,
) -> Result<(), DataError> {
    let numbers = 0..chosen.len();
    let Some(listing) = part.files() else { return fill(Work::Decoding, &numbers.collect::<Vec<_>>(), &[]) };
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
    let takes = |number: &usize| matches!(files[*number], File::OnDevice(..));
    let (mut of_device, mut of_cores): (Vec<usize>, Vec<usize>) = numbers.partition(takes);
    if workers.is_pool() {
        let shared = of_device.split_off(device.share(of_device.len()));
        device.for_cores(ForCores::Beside, shared.len() as u64);
        of_cores.extend(shared);
    }
    let read: Vec<Begun<'_>> = files
        .iter()
        .map(|file| match file {
            File::Passed => Begun::Nothing,
            File::OnCores(bytes) | File::OnDevice(bytes, _) => Begun::Read(bytes),
        })
        .collect();
    if of_device.is_empty() {
        return fill(Work::Decoding, &of_cores, &read);
    }
    let timed = || {
        let began = Instant::now();
        fill(Work::Decoding, &of_cores, &read).map(|()| began.elapsed())
    };
    thread::scope(|scope| {
        let beside = thread::Builder::new().name("pictures beside".into()).spawn_scoped(scope, timed);
        let began = Instant::now();
        let done = decode(device, &goal, &files, &of_device, &read, fill);
        let took = began.elapsed();
        let cores = match beside {
            Ok(beside) => beside.join().unwrap_or_else(|panic| resume_unwind(panic)),
            // The system gives no more threads: one after the other, then.
            Err(_) => timed(),
        };
        let is_decoded = done?;
        let cores = cores?;
        if is_decoded {
            device.took((of_device.len(), took), (of_cores.len(), cores));
        }
        Ok(())
    })
}

/// Has the device decode the files of these numbers, and `fill` make them; says whether it did.
fn decode(
    device: &OnDevice,
    goal: &Goal,
    files: &[File],
    numbers: &[usize],
    read: &[Begun<'_>],
    fill: Fill<'_>,
) -> Result<bool, DataError> {
    let encoded: Vec<Encoded<'_>> = numbers
        .iter()
        .filter_map(|number| match &files[*number] {
            File::OnDevice(bytes, Wanted { stored, left, top, rows, columns, flip }) => {
                Some(Encoded { bytes, stored: *stored, left: *left, top: *top, rows, columns, flip: *flip })
            }
            File::OnCores(_) | File::Passed => None,
        })
        .collect();
    let (mut counts, mut filled) = ((0, 0), None);
    let outcome = device.decoder.decode(&encoded, goal.size, &mut |made| {
        let done = made.iter().flatten().count();
        counts = (done as u64, (made.len() - done) as u64);
        let mut begun = read.to_vec();
        for (number, made) in numbers.iter().zip(made) {
            if let Some(pixels) = made {
                begun[*number] = if goal.is_input { Begun::Cropped(pixels) } else { Begun::Picture(pixels) };
            }
        }
        filled = Some(fill(Work::Beside, numbers, &begun));
    });
    match outcome {
        Ok(()) => device.done(counts.0, counts.1),
        Err(why) => device.failed(why, encoded.len() as u64),
    }
    match filled {
        Some(filled) => filled.map(|()| true),
        None => fill(Work::Decoding, numbers, read).map(|()| false),
    }
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
