//! Prepares batches with a decoding device. The device also crops and resizes the pictures that it decodes. CPU cores
//! decode the other pictures concurrently.

mod output_spec;
mod queue;

use super::{
    part::Part,
    workers::{Work, Workers},
};
use crate::{
    DataError,
    device::{CpuDecodeReason, Encoded, OnDevice},
    picture::{ScaleTable, decode::for_hardware, jpeg},
    transform::{AugmentParams, Transform},
};
use output_spec::OutputSpec;
use queue::Queue;
use std::{
    cell::Cell,
    panic::resume_unwind,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
};

/// How far a picture is prepared when CPU cores complete it.
#[derive(Debug, Clone, Copy)]
pub(super) enum PartialPicture<'a> {
    Nothing,
    /// The picture's file has been read.
    Read(&'a [u8]),
    /// Decoded, and resized to the size at which the transform begins.
    Picture(&'a [u8]),
    /// After the random resized crop and flip of training, or after all steps of evaluation.
    Cropped(&'a [u8]),
}

/// Where a file that has been read is decoded.
enum File {
    OnCores(Vec<u8>),
    /// The file is not kept in memory. CPU cores read it again.
    Released,
    OnDevice(Vec<u8>, CropParams),
}

/// How a device crops, resizes and flips a picture.
struct CropParams {
    stored: jpeg::Stored,
    left: u32,
    top: u32,
    rows: ScaleTable,
    columns: ScaleTable,
    flip: bool,
}

/// Makes the pictures with these indices in the batch. The last argument tells how far each picture of the batch is
/// prepared.
type Fill<'a> = &'a (dyn Fn(Work, &[usize], &[PartialPicture<'_>]) -> Result<(), DataError> + Sync);

/// Makes each of the pictures at `chosen` once, by calling `fill`. `epoch` is `None` for evaluation. Pictures that
/// fail on the device are decoded on cores.
///
/// # Errors
/// [`DataError::File`]: a picture cannot be read. Also the errors of `fill`, which finds pictures that cannot be decoded.
pub(super) fn make(
    device: &OnDevice,
    part: &Part,
    transform: &Transform,
    chosen: &[u32],
    epoch: Option<u32>,
    workers: &Workers,
    fill: Fill<'_>,
) -> Result<(), DataError> {
    let numbers: Vec<usize> = (0..chosen.len()).collect();
    let Some(listing) = part.files() else { return fill(Work::Decoding, &numbers, &[]) };
    let output = OutputSpec::new(part, transform, epoch.is_some());
    let params = |position: u32| epoch.map(|epoch| AugmentParams::new(transform, epoch, position.into()));
    // Reads the files, and decides for each of them where it is decoded.
    let bytes_read = AtomicUsize::new(0);
    let files = workers.map(Work::AroundDevice, &numbers, |number, _| {
        let position = chosen[number];
        let bytes = listing.read(position as usize)?;
        if bytes_read.fetch_add(bytes.len(), Ordering::Relaxed) + bytes.len() > device.max_held_bytes {
            device.count_for_cores(CpuDecodeReason::LongBatch, 1);
            return Ok(File::Released);
        }
        let crop = for_hardware(&bytes)
            .and_then(|stored| output.crop_params(stored, transform, params(position).as_ref()));
        Ok(match crop {
            Ok(crop) => File::OnDevice(bytes, crop),
            Err(why) => {
                device.count_for_cores(why, 1);
                File::OnCores(bytes)
            }
        })
    })?;
    let is_for_device = |number: &usize| matches!(files[*number], File::OnDevice(..));
    let (of_device, of_cores): (Vec<usize>, Vec<usize>) = numbers.into_iter().partition(is_for_device);
    let undecoded: Vec<PartialPicture<'_>> = files
        .iter()
        .map(|file| match file {
            File::Released => PartialPicture::Nothing,
            File::OnCores(bytes) | File::OnDevice(bytes, _) => PartialPicture::Read(bytes),
        })
        .collect();
    if of_device.is_empty() {
        return fill(Work::Decoding, &of_cores, &undecoded);
    }
    // The device and the cores decode at the same time.
    let has_failed = AtomicBool::new(false);
    let queue = Queue::new(&of_device);
    let work =
        DeviceWork { device, output: &output, files: &files, undecoded: &undecoded, queue, has_failed, fill };
    thread::scope(|scope| {
        let feeders: Vec<_> = (0..device.decoder.concurrent_calls())
            .map_while(|_| {
                let feed = || work.feed();
                thread::Builder::new().name("pictures on the GPU".into()).spawn_scoped(scope, feed).ok()
            })
            .collect();
        let on_cores = fill(Work::Decoding, &of_cores, &undecoded);
        // This thread helps, because the system may have refused to start the threads above.
        work.feed();
        for feeder in feeders {
            feeder.join().unwrap_or_else(|panic| resume_unwind(panic));
        }
        on_cores
    })?;
    work.queue.into_outcome()
}

/// The pictures of a batch that the device decodes.
struct DeviceWork<'a> {
    device: &'a OnDevice,
    output: &'a OutputSpec,
    files: &'a [File],
    /// Each picture of the batch before it is decoded.
    undecoded: &'a [PartialPicture<'a>],
    queue: Queue<'a>,
    /// Whether the device has failed for some of the pictures.
    has_failed: AtomicBool,
    fill: Fill<'a>,
}

impl DeviceWork<'_> {
    /// Makes the device decode groups of pictures until none is left.
    fn feed(&self) {
        while !self.queue.is_empty() {
            let claimed = Cell::<&[usize]>::new(&[]);
            let mut filled = None;
            let mut take_pictures = |max: usize| {
                claimed.set(self.queue.claim(max));
                self.inputs(claimed.get())
            };
            let mut use_results = |made: &[Option<&[u8]>]| filled = Some(self.complete(claimed.get(), made));
            let outcome = self.device.decoder.decode(self.output.size, &mut take_pictures, &mut use_results);
            if let Err(why) = outcome {
                if claimed.get().is_empty() {
                    // The device cannot begin: cores decode all remaining pictures.
                    claimed.set(self.queue.claim(usize::MAX));
                }
                if !claimed.get().is_empty() {
                    let is_first = !self.has_failed.swap(true, Ordering::Relaxed);
                    self.device.count_failed(why, claimed.get().len() as u64, is_first);
                }
                filled = None;
            }
            let on_cores = || (self.fill)(Work::Decoding, claimed.get(), self.undecoded);
            self.queue.record(claimed.get(), filled.unwrap_or_else(on_cores));
        }
    }

    /// The input of the device for the pictures with the indices `numbers` in the batch.
    fn inputs(&self, numbers: &[usize]) -> Vec<Encoded<'_>> {
        let input = |number: &usize| match &self.files[*number] {
            File::OnDevice(bytes, CropParams { stored, left, top, rows, columns, flip }) => {
                Some(Encoded { bytes, stored: *stored, left: *left, top: *top, rows, columns, flip: *flip })
            }
            File::OnCores(_) | File::Released => None,
        };
        numbers.iter().filter_map(input).collect()
    }

    /// Completes the pictures `numbers` that the device has decoded. Cores make the pictures that it has refused.
    fn complete(&self, numbers: &[usize], made: &[Option<&[u8]>]) -> Result<(), DataError> {
        let decoded = made.iter().flatten().count() as u64;
        self.device.count_decoded(decoded, made.len() as u64 - decoded);
        let mut partial = self.undecoded.to_vec();
        for (number, made) in numbers.iter().zip(made) {
            if let Some(pixels) = made {
                partial[*number] = if self.output.is_input {
                    PartialPicture::Cropped(pixels)
                } else {
                    PartialPicture::Picture(pixels)
                };
            }
        }
        (self.fill)(Work::AroundDevice, numbers, &partial)
    }
}
