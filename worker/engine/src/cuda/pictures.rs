//! Copies pictures to the GPU: the whole dataset once if it fits, else each batch while the previous step
//! still runs.

use super::{
    device::{Buffer, Device, Event, OwnedStream, Pinned, Stream},
    error::CudaError,
};
use bytemuck::NoUninit;
use lockstep_data::loader::{Batch, BatchFormat, Resident};

/// Maximum fraction of the GPU's free memory for a dataset.
const MAX_OF_FREE: f64 = 0.4;

/// A dataset in GPU memory.
pub(super) struct GpuDataset {
    train: Buffer,
    /// `None` if validation uses the pictures of `train`.
    validation: Option<Buffer>,
    pub(super) height: usize,
    pub(super) width: usize,
    pub(super) crop_padding: usize,
    pub(super) reflects: bool,
}

impl GpuDataset {
    /// Copies the pictures, if they fit.
    pub(super) fn new(device: &Device, data: &Resident) -> Result<Option<Self>, CudaError> {
        let is_same = std::sync::Arc::ptr_eq(&data.train, &data.validation);
        let bytes = data.train.len() + if is_same { 0 } else { data.validation.len() };
        if bytes as f64 > MAX_OF_FREE * device.memory().0 as f64 {
            return Ok(None);
        }
        Ok(Some(Self {
            train: device.upload(&data.train)?,
            validation: if is_same { None } else { Some(device.upload(&data.validation)?) },
            height: data.height,
            width: data.width,
            crop_padding: data.crop_padding,
            reflects: data.reflects,
        }))
    }

    /// Address of the pictures for batches of training (`training`), or of validation.
    pub(super) fn pictures(&self, training: bool) -> u64 {
        match &self.validation {
            Some(validation) if !training => validation.ptr,
            _ => self.train.ptr,
        }
    }
}

/// Number of batches in the ring buffers, by which copies may be ahead of the step.
const SLOTS: usize = 3;

/// Copies batches to the GPU through page-locked buffers.
pub(super) struct Staging {
    format: BatchFormat,
    /// Size of a batch in bytes.
    bytes: usize,
    host: Pinned,
    gpu: Buffer,
    /// The current step's batch.
    pub(super) input: Buffer,
    stream: OwnedStream,
    /// By slot: recorded when the slot's batch is in `gpu`, and when it is in `input`.
    copied: Vec<Event>,
    taken: Vec<Event>,
    /// Number of batches sent so far.
    sent: usize,
}

impl Staging {
    /// Allocates buffers for batches of `values` values.
    pub(super) fn new(device: &Device, format: BatchFormat, values: usize) -> Result<Self, CudaError> {
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
            copied: events()?,
            taken: events()?,
            sent: 0,
        })
    }

    pub(super) fn format(&self) -> BatchFormat {
        self.format
    }

    /// Whether [`Staging::send`] would return without waiting for a step, which may wait for other ranks.
    pub(super) fn is_free(&self) -> Result<bool, CudaError> {
        if self.sent < SLOTS { Ok(true) } else { self.copied[self.sent % SLOTS].has_passed() }
    }

    /// Copies `batch` to [`Staging::input`] for the next step on `main`.
    pub(super) fn send(&mut self, main: Stream, batch: &Batch) -> Result<(), CudaError> {
        match self.format {
            BatchFormat::Bytes => self.send_values(main, &batch.bytes),
            _ => self.send_values(main, &batch.images),
        }
    }

    fn send_values<T: NoUninit>(&mut self, main: Stream, values: &[T]) -> Result<(), CudaError> {
        let slot = self.sent % SLOTS;
        let (offset, bytes) = (slot * self.bytes, size_of_val(values));
        if self.sent >= SLOTS {
            self.copied[slot].wait()?;
            self.stream.0.wait(&self.taken[slot])?;
        }
        self.host.write(offset, values);
        if bytes > 0 {
            self.stream.0.upload(&self.gpu, &self.host, offset, bytes)?;
        }
        self.copied[slot].record(self.stream.0)?;
        main.wait(&self.copied[slot])?;
        if bytes > 0 {
            main.copy(&self.input, &self.gpu, offset, bytes)?;
        }
        self.taken[slot].record(main)?;
        self.sent += 1;
        Ok(())
    }
}
