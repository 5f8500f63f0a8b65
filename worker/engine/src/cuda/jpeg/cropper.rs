//! Launches the kernel that crops and resizes the decoded planes of a group of pictures, and converts them to RGB.

use super::layout::{Cropping, rows_per_block};
use crate::cuda::{
    command::Geometry,
    device::{Buffer, Device, OwnedStream, Pinned},
    error::Result,
    kernels::Kernels,
};

pub(super) struct Cropper {
    pub(super) stream: OwnedStream,
    /// Width and height of an output.
    size: (u32, u32),
    outputs: Option<Buffer>,
    host_outputs: Option<Pinned>,
    /// The [`Cropping`]s and resampling tables of a group.
    lists: Option<Buffer>,
    host_lists: Option<Pinned>,
}

impl Cropper {
    pub(super) fn new() -> Result<Self> {
        // Without a high priority, these few and short kernels would wait for all kernels of a training step.
        let stream = OwnedStream::with_highest_priority()?;
        Ok(Self { stream, size: (0, 0), outputs: None, host_outputs: None, lists: None, host_lists: None })
    }

    /// Size of an output in bytes.
    fn output_bytes(&self) -> usize {
        self.size.0 as usize * self.size.1 as usize * 3
    }

    /// Allocates memory for `pictures` outputs of `size`.
    pub(super) fn allocate(&mut self, device: &Device, pictures: usize, size: (u32, u32)) -> Result {
        self.size = size;
        let bytes = pictures * self.output_bytes();
        grow_buffer(&mut self.outputs, bytes, |bytes| device.alloc(bytes))?;
        grow_pinned(&mut self.host_outputs, bytes)?;
        Ok(())
    }

    /// Launches the kernel for a group of pictures. The kernels of earlier groups must have finished.
    pub(super) fn run(
        &mut self,
        device: &Device,
        kernels: &Kernels,
        croppings: &[Cropping],
        tables: &[i32],
    ) -> Result {
        let (Some(outputs), (width, height)) = (&self.outputs, self.size) else { return Ok(()) };
        // The tables follow the croppings, on a separate cache line.
        let tables_offset = size_of_val(croppings).next_multiple_of(256);
        let bytes = tables_offset + size_of_val(tables);
        let lists = grow_buffer(&mut self.lists, bytes, |bytes| device.alloc(bytes))?;
        let host = grow_pinned(&mut self.host_lists, bytes)?;
        host.write(0, croppings);
        host.write(tables_offset, tables);
        self.stream.0.upload(lists, host, 0, bytes)?;
        let (rows, shared_bytes) = rows_per_block(croppings, height);
        let [croppings_at, tables_at] = [lists.ptr, lists.ptr + tables_offset as u64];
        let [to_width, to_height, block_rows] = [width, height, rows].map(u64::from);
        let args = [croppings_at, tables_at, outputs.ptr, to_width, to_height, block_rows];
        let geometry = Geometry {
            grid: [height.div_ceil(rows), croppings.len() as u32, 1],
            block: [256, 1, 1],
            cluster: 1,
            shared_bytes,
        };
        kernels.launch(self.stream.0, "crop", geometry, &args)
    }

    /// Starts the copy of `pictures` outputs to the host.
    pub(super) fn start_download(&mut self, pictures: usize) -> Result {
        let bytes = pictures * self.output_bytes();
        if let (Some(outputs), Some(host)) = (&self.outputs, &mut self.host_outputs) {
            self.stream.0.download(host, outputs, bytes)?;
        }
        Ok(())
    }

    /// The first `bytes` bytes of the outputs. The caller must have waited for the copy of [`Cropper::start_download`].
    pub(super) fn pixels(&self, bytes: usize) -> &[u8] {
        self.host_outputs.as_ref().map_or(&[], |host| host.bytes(bytes))
    }
}

/// Memory of at least `bytes`: the existing memory, or memory from `alloc` that replaces it.
pub(super) fn grow_buffer(
    buffer: &mut Option<Buffer>,
    bytes: usize,
    alloc: impl FnOnce(usize) -> Result<Buffer>,
) -> Result<&Buffer> {
    // Memory that is too small is freed first. More is allocated than requested, because the next group may be slightly larger.
    let large_enough = match buffer.take().filter(|existing| existing.bytes >= bytes) {
        Some(existing) => existing,
        None => alloc((bytes + bytes / 8).next_multiple_of(1 << 20))?,
    };
    Ok(buffer.insert(large_enough))
}

/// Page-locked memory of at least `bytes`: the existing memory, which must not be in use, or new memory that replaces it.
pub(super) fn grow_pinned(memory: &mut Option<Pinned>, bytes: usize) -> Result<&mut Pinned> {
    let large_enough = match memory.take().filter(|existing| existing.bytes >= bytes) {
        Some(existing) => existing,
        None => Pinned::new((bytes + bytes / 8).next_multiple_of(1 << 20))?,
    };
    Ok(memory.insert(large_enough))
}
