//! Copies pictures to the GPU: the whole dataset once if it fits, otherwise each batch while the previous step still runs.

use super::{
    device::{Buffer, Device, Event, OwnedStream, Pinned, Ptr, Stream},
    error::Result,
};
use bytemuck::NoUninit;
use lockstep_data::loader::{Batch, BatchFormat, Resident};

/// Maximum share of the GPU's free memory for a dataset.
const MAX_SHARE_OF_FREE: f64 = 0.4;

/// A dataset in GPU memory.
pub(super) struct GpuDataset {
    train: Buffer,
    /// `None` if validation uses the pictures of `train`.
    validation: Option<Buffer>,
    pub(super) height: usize,
    pub(super) width: usize,
    /// Width in pixels of the border that is added to a picture before it is cropped.
    pub(super) crop_padding: usize,
    /// Whether the border mirrors the picture; else it is black.
    pub(super) reflects: bool,
}

impl GpuDataset {
    /// Copies the pictures; `None` if they do not fit.
    pub(super) fn new(device: &Device, data: &Resident) -> Result<Option<Self>> {
        let is_shared = std::sync::Arc::ptr_eq(&data.train, &data.validation);
        let bytes = data.train.len() + if is_shared { 0 } else { data.validation.len() };
        let (free_bytes, _) = device.free_and_total_bytes();
        if bytes as f64 > MAX_SHARE_OF_FREE * free_bytes as f64 {
            return Ok(None);
        }
        Ok(Some(Self {
            train: device.upload(&data.train)?,
            validation: if is_shared { None } else { Some(device.upload(&data.validation)?) },
            height: data.height,
            width: data.width,
            crop_padding: data.crop_padding,
            reflects: data.reflects,
        }))
    }

    pub(super) fn train_pictures(&self) -> Ptr {
        self.train.ptr
    }

    pub(super) fn validation_pictures(&self) -> Ptr {
        self.validation.as_ref().unwrap_or(&self.train).ptr
    }
}

/// Number of batches in the ring buffers: maximum number of batches by which copies are ahead of the step.
const SLOTS: usize = 3;

/// Copies batches to the GPU through page-locked buffers.
pub(super) struct Staging {
    pub(super) format: BatchFormat,
    /// Size of a batch in bytes.
    bytes: usize,
    host: Pinned,
    gpu: Buffer,
    /// The current step's batch.
    pub(super) input: Buffer,
    stream: OwnedStream,
    /// By slot: recorded when the slot's batch is in `gpu`.
    uploaded: Vec<Event>,
    /// By slot: recorded when the slot's batch is in `input`.
    consumed: Vec<Event>,
    /// Number of batches sent so far.
    sent_count: usize,
}

impl Staging {
    /// Allocates buffers for batches of `values` values.
    pub(super) fn new(device: &Device, format: BatchFormat, values: usize) -> Result<Self> {
        let size = if format == BatchFormat::Bytes { 1 } else { 4 };
        let bytes = (values * size).next_multiple_of(256);
        let events = || (0..SLOTS).map(|_| Event::new()).collect::<Result<Vec<_>, _>>();
        Ok(Self {
            format,
            bytes,
            host: Pinned::new(SLOTS * bytes)?,
            gpu: device.alloc(SLOTS * bytes)?,
            input: device.zeros(bytes)?,
            stream: OwnedStream::new()?,
            uploaded: events()?,
            consumed: events()?,
            sent_count: 0,
        })
    }

    /// Whether the host may write to the next slot, so that [`Staging::send`] does not wait for a step, which may wait for other ranks.
    pub(super) fn is_free(&self) -> Result<bool> {
        if self.sent_count < SLOTS { Ok(true) } else { self.uploaded[self.sent_count % SLOTS].has_passed() }
    }

    /// Copies `batch` to [`Staging::input`] for the next step on `main`.
    pub(super) fn send(&mut self, main: Stream, batch: &Batch) -> Result {
        match self.format {
            BatchFormat::Bytes => self.send_values(main, &batch.bytes),
            _ => self.send_values(main, &batch.images),
        }
    }

    fn send_values<T: NoUninit>(&mut self, main: Stream, values: &[T]) -> Result {
        let slot = self.sent_count % SLOTS;
        let (offset, bytes) = (slot * self.bytes, size_of_val(values));
        if self.sent_count >= SLOTS {
            self.uploaded[slot].wait()?;
            self.stream.0.wait(&self.consumed[slot])?;
        }
        self.host.write(offset, values);
        if bytes > 0 {
            self.stream.0.upload(&self.gpu, &self.host, offset, bytes)?;
        }
        self.uploaded[slot].record(self.stream.0)?;
        main.wait(&self.uploaded[slot])?;
        if bytes > 0 {
            main.copy(&self.input, &self.gpu, offset, bytes)?;
        }
        self.consumed[slot].record(main)?;
        self.sent_count += 1;
        Ok(())
    }
}
