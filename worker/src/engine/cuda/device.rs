//! The GPU of this rank: memory, streams, events and graphs, as thin owners around the driver's handles.

#![allow(unsafe_code)] // The driver's interface is C; each owner keeps its handle valid until it is dropped.

use super::error::CudaError;
use cudarc::driver::{result, sys};
use std::{cell::Cell, marker::PhantomData, ptr::NonNull};

/// An address in the GPU's memory; 0 stands for "none".
pub(super) type Ptr = u64;

/// A GPU whose primary context this process uses.
pub(super) struct Device {
    device: sys::CUdevice,
    context: sys::CUcontext,
    pub(super) name: String,
    /// Streaming multiprocessors.
    pub(super) multiprocessors: u32,
    /// 90 for Hopper.
    pub(super) capability: u32,
}

// SAFETY: a context may be used from any thread that makes it current; `bind` does.
unsafe impl Send for Device {}
// SAFETY: as above; the driver locks what threads share.
unsafe impl Sync for Device {}

impl Device {
    /// Opens GPU `ordinal` (as CUDA numbers those that this process sees) and makes it current here.
    pub(super) fn open(ordinal: i32) -> Result<Self, CudaError> {
        result::init().map_err(CudaError::driver("starting CUDA"))?;
        let device = result::device::get(ordinal).map_err(CudaError::driver("opening the GPU"))?;
        let name =
            result::device::get_name(device).map_err(CudaError::driver("asking for the GPU's name"))?;
        let ask = |attribute| {
            // SAFETY: `device` came from the driver.
            unsafe { result::device::get_attribute(device, attribute) }
                .map_err(CudaError::driver("asking what the GPU can do"))
        };
        use sys::CUdevice_attribute_enum as A;
        let multiprocessors = ask(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32;
        let major = ask(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = ask(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        if major < 8 {
            return Err(CudaError::Unsupported(format!(
                "{name} has compute capability {major}.{minor}; lockstep needs 8.0 (Ampere) or newer. \
                 Use parallel.device = \"cpu\" there"
            )));
        }
        // SAFETY: released when this is dropped.
        let context = unsafe { result::primary_ctx::retain(device) }
            .map_err(CudaError::driver("opening a context on the GPU"))?;
        let this = Self { device, context, name, multiprocessors, capability: (10 * major + minor) as u32 };
        this.bind()?;
        Ok(this)
    }

    /// Makes this GPU the calling thread's.
    pub(super) fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: the context is retained.
        unsafe { result::ctx::set_current(self.context) }.map_err(CudaError::driver("choosing the GPU"))
    }

    /// Bytes free, and in all.
    pub(super) fn memory(&self) -> (u64, u64) {
        result::mem_get_info().map_or((0, 0), |(free, total)| (free as u64, total as u64))
    }

    /// Memory of `bytes` of any content.
    pub(super) fn alloc(&self, bytes: usize) -> Result<Buffer, CudaError> {
        // SAFETY: freed when the buffer is dropped.
        match unsafe { result::malloc_sync(bytes.max(256)) } {
            Ok(ptr) => Ok(Buffer { ptr, bytes }),
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                let (free, total) = self.memory();
                Err(CudaError::OutOfMemory {
                    needed_mb: bytes as u64 >> 20,
                    free_mb: free >> 20,
                    total_mb: total >> 20,
                })
            }
            // A GPU that an earlier kernel has broken refuses memory, too.
            Err(error) => Err(CudaError::driver("taking memory of the GPU")(error)),
        }
    }

    /// Memory of `bytes` zeros.
    pub(super) fn zeros(&self, bytes: usize) -> Result<Buffer, CudaError> {
        self.filled(bytes, 0)
    }

    /// Memory of `bytes` bytes, all of them `value`.
    pub(super) fn filled(&self, bytes: usize, value: u8) -> Result<Buffer, CudaError> {
        let buffer = self.alloc(bytes)?;
        // SAFETY: the buffer has that many bytes.
        unsafe { result::memset_d8_sync(buffer.ptr, value, bytes) }
            .map_err(CudaError::driver("clearing memory"))?;
        // Whatever its name, that only starts it, on the default stream, for which ours do not wait.
        Stream(std::ptr::null_mut()).synchronize()?;
        Ok(buffer)
    }

    /// Memory with a copy of `values`.
    pub(super) fn upload<T: bytemuck::NoUninit>(&self, values: &[T]) -> Result<Buffer, CudaError> {
        let buffer = self.alloc(size_of_val(values))?;
        buffer.write(values)?;
        Ok(buffer)
    }

    /// Waits for everything that was started on this GPU.
    pub(super) fn synchronize(&self) -> Result<(), CudaError> {
        result::ctx::synchronize().map_err(CudaError::driver("waiting for the GPU"))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: retained by `open`. A process that ends gives it back anyway.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// Memory of the GPU.
#[derive(Debug)]
pub(super) struct Buffer {
    pub(super) ptr: Ptr,
    pub(super) bytes: usize,
}

impl Buffer {
    /// Copies `values` to the beginning, and waits until they are there.
    pub(super) fn write<T: bytemuck::NoUninit>(&self, values: &[T]) -> Result<(), CudaError> {
        self.write_at(0, values)
    }

    /// Copies `values` to `offset` bytes on.
    pub(super) fn write_at<T: bytemuck::NoUninit>(
        &self,
        offset: usize,
        values: &[T],
    ) -> Result<(), CudaError> {
        assert!(offset + size_of_val(values) <= self.bytes, "a copy past the end of a buffer");
        // SAFETY: checked above.
        unsafe { result::memcpy_htod_sync(self.ptr + offset as u64, values) }
            .map_err(CudaError::driver("copying to the GPU"))
    }

    /// Copies from `offset` bytes on into `values`.
    pub(super) fn read<T: bytemuck::AnyBitPattern>(
        &self,
        offset: usize,
        values: &mut [T],
    ) -> Result<(), CudaError> {
        assert!(offset + size_of_val(values) <= self.bytes, "a copy past the end of a buffer");
        // SAFETY: checked above; any bits are a value of the type.
        unsafe { result::memcpy_dtoh_sync(values, self.ptr + offset as u64) }
            .map_err(CudaError::driver("copying from the GPU"))
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated by `Device::alloc`; what still uses it has been waited for by its owner.
        let _ = unsafe { result::free_sync(self.ptr) };
    }
}

/// Page-locked memory of the host that the GPU reads and writes, too. Cached, so that the host reads
/// it at full speed.
pub(super) struct Pinned {
    host: NonNull<u8>,
    /// Where the GPU sees it.
    pub(super) device: Ptr,
    bytes: usize,
}

// SAFETY: the memory is its own, and only reached through methods that copy.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// `bytes` zeros.
    pub(super) fn new(bytes: usize) -> Result<Self, CudaError> {
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: freed when this is dropped; the address is the driver's for it.
        unsafe {
            let host = result::malloc_host(bytes, flags)
                .map_err(CudaError::driver("page-locking memory of the host"))?;
            let mut device = 0;
            sys::cuMemHostGetDevicePointer_v2(&mut device, host, 0)
                .result()
                .map_err(CudaError::driver("mapping memory of the host"))?;
            std::ptr::write_bytes(host.cast::<u8>(), 0, bytes);
            let host =
                NonNull::new(host.cast()).ok_or(CudaError::Unsupported("no page-locked memory".into()))?;
            Ok(Self { host, device, bytes })
        }
    }

    /// Copies `values` to `offset` bytes on.
    pub(super) fn write<T: bytemuck::NoUninit>(&self, offset: usize, values: &[T]) {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        assert!(offset + bytes.len() <= self.bytes, "a copy past the end of page-locked memory");
        // SAFETY: checked above.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.host.as_ptr().add(offset), bytes.len()) };
        std::sync::atomic::fence(std::sync::atomic::Ordering::Release);
    }

    /// The first `bytes`, which the GPU must have written before and must not write meanwhile.
    pub(super) fn bytes(&self, bytes: usize) -> &[u8] {
        assert!(bytes <= self.bytes, "a read past page-locked memory");
        // SAFETY: checked above, and initialised by `new`.
        unsafe { std::slice::from_raw_parts(self.host.as_ptr(), bytes) }
    }

    pub(super) fn room(&self) -> usize {
        self.bytes
    }

    /// The `u32` at `offset` bytes, which the GPU may be writing.
    pub(super) fn load(&self, offset: usize) -> u32 {
        assert!(offset + 4 <= self.bytes && offset.is_multiple_of(4), "a read past page-locked memory");
        // SAFETY: inside and aligned; volatile, as the GPU changes it.
        let value = unsafe { self.host.as_ptr().add(offset).cast::<u32>().read_volatile() };
        std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
        value
    }

    /// The value at `offset` bytes.
    pub(super) fn read<T: bytemuck::AnyBitPattern>(&self, offset: usize) -> T {
        assert!(offset + size_of::<T>() <= self.bytes, "a read past page-locked memory");
        // SAFETY: inside; any bits are a value of the type.
        unsafe { self.host.as_ptr().add(offset).cast::<T>().read_unaligned() }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`.
        let _ = unsafe { result::free_host(self.host.as_ptr().cast()) };
    }
}

/// A queue of work. A handle: its [`OwnedStream`] must outlive it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stream(pub(super) sys::CUstream);

/// Keeps a stream alive.
pub(super) struct OwnedStream(pub(super) Stream);

// SAFETY: a stream belongs to no thread.
unsafe impl Send for OwnedStream {}
// SAFETY: calls on a stream may come from several threads; the driver orders them.
unsafe impl Sync for OwnedStream {}

impl OwnedStream {
    /// A stream beside the default one; `urgent` work goes before other streams' work that waits.
    pub(super) fn new(urgent: bool) -> Result<Self, CudaError> {
        let (_, greatest) = result::stream::get_priority_range().unwrap_or((0, 0));
        let priority = if urgent { greatest } else { 0 };
        result::stream::create_with_priority(result::stream::StreamKind::NonBlocking, priority)
            .map(|s| Self(Stream(s)))
            .map_err(CudaError::driver("creating a stream"))
    }
}

impl Drop for OwnedStream {
    fn drop(&mut self) {
        // SAFETY: created by `new`.
        let _ = unsafe { result::stream::destroy(self.0.0) };
    }
}

impl Stream {
    /// Waits on the host.
    pub(super) fn synchronize(self) -> Result<(), CudaError> {
        // SAFETY: the stream is alive.
        unsafe { result::stream::synchronize(self.0) }.map_err(CudaError::driver("waiting for a stream"))
    }

    /// Makes the first `bytes` of a buffer `value`.
    pub(super) fn fill(self, buffer: &Buffer, bytes: usize, value: u8) -> Result<(), CudaError> {
        assert!(bytes <= buffer.bytes, "{bytes} of {} bytes", buffer.bytes);
        // SAFETY: the buffer has that many bytes, and the stream is alive.
        unsafe { result::memset_d8_async(buffer.ptr, value, bytes, self.0) }
            .map_err(CudaError::driver("clearing memory"))
    }

    /// Whether something that was started here, or on the GPU before it, has failed.
    pub(super) fn failure(self) -> Result<(), CudaError> {
        // SAFETY: the stream is alive.
        match unsafe { sys::cuStreamQuery(self.0) } {
            sys::CUresult::CUDA_SUCCESS | sys::CUresult::CUDA_ERROR_NOT_READY => Ok(()),
            error => error.result().map_err(CudaError::driver("a step")),
        }
    }

    /// Later work here waits for what `event` was recorded after.
    pub(super) fn wait(self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both are alive.
        unsafe { result::stream::wait_event(self.0, event.0, sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT) }
            .map_err(CudaError::driver("ordering streams"))
    }

    /// A copy within the GPU's memory.
    pub(super) fn copy(self, to: Ptr, from: Ptr, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: callers pass ranges of their own buffers.
        unsafe { result::memcpy_dtod_async(to, from, bytes, self.0) }.map_err(CudaError::driver("copying"))
    }

    /// A copy from page-locked memory that must stay as it is until this stream has gone past it.
    pub(super) fn upload(self, to: Ptr, from: &Pinned, offset: usize, bytes: usize) -> Result<(), CudaError> {
        assert!(offset + bytes <= from.bytes, "a copy past the end of page-locked memory");
        // SAFETY: checked above.
        unsafe {
            let source = std::slice::from_raw_parts(from.host.as_ptr().add(offset), bytes);
            result::memcpy_htod_async(to, source, self.0)
        }
        .map_err(CudaError::driver("copying to the GPU"))
    }

    /// A copy to page-locked memory, which is there once this stream has gone past it.
    pub(super) fn download(self, to: &mut Pinned, from: Ptr, bytes: usize) -> Result<(), CudaError> {
        assert!(bytes <= to.bytes, "a copy past the end of page-locked memory");
        // SAFETY: checked above.
        unsafe {
            let target = std::slice::from_raw_parts_mut(to.host.as_ptr(), bytes);
            result::memcpy_dtoh_async(target, from, self.0)
        }
        .map_err(CudaError::driver("copying from the GPU"))
    }

    /// Records what is started here from now on instead of running it.
    pub(super) fn begin_capture(self) -> Result<(), CudaError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive.
        unsafe { result::stream::begin_capture(self.0, mode) }.map_err(CudaError::driver("recording a step"))
    }

    /// Ends [`Stream::begin_capture`].
    pub(super) fn end_capture(self) -> Result<Graph, CudaError> {
        // SAFETY: capture began on this stream; the graph is destroyed once it is instantiated.
        unsafe {
            let graph = result::stream::end_capture(self.0).map_err(CudaError::driver("recording a step"))?;
            let mut nodes = 0;
            let _ = sys::cuGraphGetNodes(graph, std::ptr::null_mut(), &mut nodes);
            let executable = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0))
                .map_err(CudaError::driver("preparing a captured step"));
            let _ = result::graph::destroy(graph);
            let graph = Graph { executable: executable?, nodes };
            result::graph::upload(graph.executable, self.0)
                .map_err(CudaError::driver("preparing a captured step"))?;
            Ok(graph)
        }
    }
}

/// A point in a stream.
pub(super) struct Event(sys::CUevent, PhantomData<Cell<()>>);

// SAFETY: an event belongs to no thread.
unsafe impl Send for Event {}

impl Event {
    /// One that orders streams, and tells the time if `timed`.
    pub(super) fn new(timed: bool) -> Result<Self, CudaError> {
        let flags = match timed {
            true => sys::CUevent_flags::CU_EVENT_DEFAULT,
            false => sys::CUevent_flags::CU_EVENT_DISABLE_TIMING,
        };
        result::event::create(flags)
            .map(|e| Self(e, PhantomData))
            .map_err(CudaError::driver("creating an event"))
    }

    /// One whose [`Event::wait`] leaves the core to others, at the price of some 50 us: without it, a thread that waits
    /// keeps its core busy.
    pub(super) fn sleeping() -> Result<Self, CudaError> {
        use sys::CUevent_flags as F;
        let flags = F::CU_EVENT_BLOCKING_SYNC as u32 | F::CU_EVENT_DISABLE_TIMING as u32;
        let mut event = std::ptr::null_mut();
        // SAFETY: it writes a handle, destroyed when this is dropped. The flags are bits, of which cudarc's type holds one.
        unsafe { sys::cuEventCreate(&mut event, flags) }
            .result()
            .map_err(CudaError::driver("creating an event"))?;
        Ok(Self(event, PhantomData))
    }

    pub(super) fn record(&self, stream: Stream) -> Result<(), CudaError> {
        // SAFETY: both are alive.
        unsafe { result::event::record(self.0, stream.0) }.map_err(CudaError::driver("recording an event"))
    }

    /// Waits on the host.
    pub(super) fn wait(&self) -> Result<(), CudaError> {
        // SAFETY: the event is alive.
        unsafe { result::event::synchronize(self.0) }.map_err(CudaError::driver("waiting for an event"))
    }

    /// Milliseconds from this event to a later one, both waited for.
    pub(super) fn millis_to(&self, later: &Event) -> Result<f32, CudaError> {
        // SAFETY: both are alive and timed.
        unsafe {
            result::event::synchronize(later.0).map_err(CudaError::driver("waiting for an event"))?;
            result::event::elapsed(self.0, later.0).map_err(CudaError::driver("timing"))
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created by `new`.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}

/// A captured step, ready to run.
pub(super) struct Graph {
    executable: sys::CUgraphExec,
    pub(super) nodes: usize,
}

// SAFETY: a graph belongs to no thread; one at a time starts it, as there is no `Sync`.
unsafe impl Send for Graph {}

impl Graph {
    pub(super) fn launch(&self, stream: Stream) -> Result<(), CudaError> {
        // SAFETY: the buffers that it uses belong to the engine that owns it.
        unsafe { result::graph::launch(self.executable, stream.0) }
            .map_err(CudaError::driver("starting a step"))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: instantiated by `end_capture`.
        let _ = unsafe { result::graph::exec_destroy(self.executable) };
    }
}
