//! Batches where a device decodes: it also crops and resizes the pictures that it takes, and cores decode the others at the same
//! time. While a step waits for its batch, cores also take pictures that the device has not come to yet: the device takes them from
//! the front of a batch, many at a time, cores from its end, one by one.

mod output_spec;
mod queue;

use super::{
    demand::Demand,
    part::Part,
    workers::{Work, Workers},
};
use crate::{
    DataError,
    device::{CpuDecodeReason, Encoded, OnDevice, Sharing},
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

/// A picture that cores continue with, by how far it is prepared.
#[derive(Debug, Clone, Copy)]
pub(super) enum PartialPicture<'a> {
    Nothing,
    /// Its file is read.
    Read(&'a [u8]),
    /// Decoded, and resized to what the transform begins with.
    Picture(&'a [u8]),
    /// After training's random resized crop and flip, or after all steps of evaluation.
    Cropped(&'a [u8]),
}

/// A file that was read, and where it is decoded.
enum File {
    OnCores(Vec<u8>),
    /// Not kept: cores read it again.
    Passed,
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

/// Makes the pictures of a batch with these numbers. The last argument says how far each picture of the batch is prepared.
type Fill<'a> = &'a (dyn Fn(Work, &[usize], &[PartialPicture<'_>]) -> Result<(), DataError> + Sync);

/// Makes each of the pictures at `chosen` once, by `fill`; `epoch` is `None` for evaluation. Pictures that the device fails at are decoded
/// on cores.
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
    (workers, demand): (&Workers, &Demand),
    fill: Fill<'_>,
) -> Result<(), DataError> {
    let numbers = 0..chosen.len();
    let Some(listing) = part.files() else { return fill(Work::Decoding, &numbers.collect::<Vec<_>>(), &[]) };
    let output = OutputSpec::new(part, transform, epoch.is_some());
    let params = |place: u32| epoch.map(|epoch| AugmentParams::new(transform, epoch, place.into()));
    let bytes_read = AtomicUsize::new(0);
    let files = workers.map(chosen.len(), |number| {
        let place = chosen[number];
        let bytes = listing.read(place as usize)?;
        if bytes_read.fetch_add(bytes.len(), Ordering::Relaxed) + bytes.len() > device.most_held {
            device.for_cores(CpuDecodeReason::LongBatch, 1);
            return Ok(File::Passed);
        }
        let wanted =
            for_hardware(&bytes).and_then(|stored| output.wanted(stored, transform, params(place).as_ref()));
        Ok(match wanted {
            Ok(wanted) => File::OnDevice(bytes, wanted),
            Err(why) => {
                device.for_cores(why, 1);
                File::OnCores(bytes)
            }
        })
    })?;
    let takes = |number: &usize| matches!(files[*number], File::OnDevice(..));
    let (of_device, of_cores): (Vec<usize>, Vec<usize>) = numbers.partition(takes);
    let read: Vec<PartialPicture<'_>> = files
        .iter()
        .map(|file| match file {
            File::Passed => PartialPicture::Nothing,
            File::OnCores(bytes) | File::OnDevice(bytes, _) => PartialPicture::Read(bytes),
        })
        .collect();
    if of_device.is_empty() {
        return fill(Work::Decoding, &of_cores, &read);
    }
    let shared = Shared {
        device,
        output: &output,
        files: &files,
        read: &read,
        queue: Queue::new(of_device),
        demand,
        has_failed: AtomicBool::new(false),
        has_ended: AtomicBool::new(false),
        fill,
    };
    thread::scope(|scope| {
        let feeding: Vec<_> = (1..device.decoder.at_a_time())
            .map_while(|_| {
                let feed = || shared.feed();
                // Where the system gives no more threads, fewer do.
                thread::Builder::new().name("pictures on the GPU".into()).spawn_scoped(scope, feed).ok()
            })
            .collect();
        let on_cores = || {
            let own = fill(Work::Decoding, &of_cores, &read);
            let is_shared = device.sharing == Sharing::WithCores && workers.is_pool();
            while is_shared
                && demand.wait(|| shared.queue.is_empty() || shared.has_ended.load(Ordering::Relaxed))
            {
                workers.drain(|| demand.is_there() && shared.one_on_a_core());
            }
            own
        };
        let on_cores = thread::Builder::new().name("pictures on cores".into()).spawn_scoped(scope, on_cores);
        let ended = Ended(&shared);
        shared.feed();
        drop(ended);
        let own = match on_cores {
            Ok(on_cores) => on_cores.join().unwrap_or_else(|panic| resume_unwind(panic)),
            Err(_) => fill(Work::Decoding, &of_cores, &read),
        };
        for feeding in feeding {
            feeding.join().unwrap_or_else(|panic| resume_unwind(panic));
        }
        own
    })?;
    shared.queue.outcome()
}

/// Pictures of a batch that the device or cores decode.
struct Shared<'a> {
    device: &'a OnDevice,
    output: &'a OutputSpec,
    files: &'a [File],
    /// The file of each picture of the batch.
    read: &'a [PartialPicture<'a>],
    queue: Queue,
    demand: &'a Demand,
    /// The device has failed at some of them.
    has_failed: AtomicBool,
    /// The device is given no more of them.
    has_ended: AtomicBool,
    fill: Fill<'a>,
}

/// Marks the end of the device's work when dropped, also after a panic, so that cores do not wait for it.
struct Ended<'a>(&'a Shared<'a>);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.has_ended.store(true, Ordering::Relaxed);
        self.0.demand.wake();
    }
}

impl Shared<'_> {
    /// Lets the device decode pictures that no core has taken, until none is left.
    fn feed(&self) {
        while !self.queue.is_empty() {
            let claimed = Cell::new((0, 0));
            let mut filled = None;
            let outcome = self.device.decoder.decode(
                self.output.size,
                &mut |most| {
                    claimed.set(self.queue.front(most));
                    self.encoded(self.queue.numbers(claimed.get()))
                },
                &mut |made| filled = Some(self.decoded(self.queue.numbers(claimed.get()), made)),
            );
            if let Err(why) = outcome {
                if claimed.get().0 == claimed.get().1 {
                    // It cannot begin at all: cores do all that is left.
                    claimed.set(self.queue.front(usize::MAX));
                }
                let (from, to) = claimed.get();
                if from < to {
                    let is_first = !self.has_failed.swap(true, Ordering::Relaxed);
                    self.device.failed(why, (to - from) as u64, is_first);
                }
                filled = None;
            }
            let on_cores = || (self.fill)(Work::Decoding, self.queue.numbers(claimed.get()), self.read);
            let done = filled.unwrap_or_else(on_cores);
            self.queue.note(claimed.get().0, done);
        }
    }

    /// What the device needs to know of pictures that it decodes.
    fn encoded(&self, numbers: &[usize]) -> Vec<Encoded<'_>> {
        let encoded = |number: &usize| match &self.files[*number] {
            File::OnDevice(bytes, CropParams { stored, left, top, rows, columns, flip }) => {
                Some(Encoded { bytes, stored: *stored, left: *left, top: *top, rows, columns, flip: *flip })
            }
            File::OnCores(_) | File::Passed => None,
        };
        numbers.iter().filter_map(encoded).collect()
    }

    /// Finishes the pictures with these numbers that the device has decoded; cores make those that it has refused.
    fn decoded(&self, numbers: &[usize], made: &[Option<&[u8]>]) -> Result<(), DataError> {
        let done = made.iter().flatten().count() as u64;
        self.device.done(done, made.len() as u64 - done);
        let mut begun = self.read.to_vec();
        for (number, made) in numbers.iter().zip(made) {
            if let Some(pixels) = made {
                begun[*number] = if self.output.is_input {
                    PartialPicture::Cropped(pixels)
                } else {
                    PartialPicture::Picture(pixels)
                };
            }
        }
        (self.fill)(Work::AroundDevice, numbers, &begun)
    }

    /// Makes, on this core, the last picture that was not taken yet. False if there was none.
    fn one_on_a_core(&self) -> bool {
        let Some(at) = self.queue.back() else { return false };
        self.device.for_cores(CpuDecodeReason::Concurrently, 1);
        self.queue.note(at, (self.fill)(Work::Decoding, self.queue.numbers((at, at + 1)), self.read));
        true
    }
}
