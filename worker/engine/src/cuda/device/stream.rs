//! Streams, events and captured graphs.

#![allow(unsafe_code)] // As in `device.rs`.

use super::{Buffer, Pinned};
use crate::cuda::error::{CudaError, Result};
use cudarc::driver::{result, sys};
use std::{cell::Cell, marker::PhantomData};

/// A handle of a stream. The [`OwnedStream`] must outlive the handle.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct Stream(pub(in crate::cuda) sys::CUstream);

pub(in crate::cuda) struct OwnedStream(pub(in crate::cuda) Stream);

// SAFETY: a stream is not tied to a thread.
unsafe impl Send for OwnedStream {}
// SAFETY: several threads may call functions on a stream; the driver orders the calls.
unsafe impl Sync for OwnedStream {}

impl OwnedStream {
    /// Creates a stream that does not synchronise with the default stream.
    pub(in crate::cuda) fn new() -> Result<Self> {
        Self::with_priority(0)
    }

    /// As [`OwnedStream::new`], but the GPU prefers the work of this stream to the work of other streams.
    pub(in crate::cuda) fn with_highest_priority() -> Result<Self> {
        let (_, highest) = result::stream::get_priority_range().unwrap_or((0, 0));
        Self::with_priority(highest)
    }

    fn with_priority(priority: i32) -> Result<Self> {
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
    /// Blocks the host until all work on this stream is done.
    pub(in crate::cuda) fn synchronize(self) -> Result {
        // SAFETY: the stream is alive.
        unsafe { result::stream::synchronize(self.0) }.map_err(CudaError::driver("waiting for a stream"))
    }

    /// Fills the first `bytes` of a buffer with `value`.
    pub(in crate::cuda) fn fill(self, buffer: &Buffer, bytes: usize, value: u8) -> Result {
        assert!(bytes <= buffer.bytes, "{bytes} of {} bytes", buffer.bytes);
        // SAFETY: the buffer has that many bytes, and the stream is alive.
        unsafe { result::memset_d8_async(buffer.ptr, value, bytes, self.0) }
            .map_err(CudaError::driver("clearing memory"))
    }

    pub(in crate::cuda) fn is_idle(self) -> Result<bool> {
        // SAFETY: the stream is alive.
        match unsafe { sys::cuStreamQuery(self.0) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            answer => answer.result().map(|()| true).map_err(CudaError::driver("waiting for a stream")),
        }
    }

    /// Returns an error if work on this stream, or earlier work on the GPU, has failed.
    pub(in crate::cuda) fn check_failure(self) -> Result {
        // SAFETY: the stream is alive.
        match unsafe { sys::cuStreamQuery(self.0) } {
            sys::CUresult::CUDA_SUCCESS | sys::CUresult::CUDA_ERROR_NOT_READY => Ok(()),
            error => error.result().map_err(CudaError::driver("running a step")),
        }
    }

    /// Makes later work on this stream wait for `event`.
    pub(in crate::cuda) fn wait(self, event: &Event) -> Result {
        // SAFETY: stream and event are alive.
        unsafe { result::stream::wait_event(self.0, event.0, sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT) }
            .map_err(CudaError::driver("ordering streams"))
    }

    /// Copies `bytes` from byte offset `offset` to the beginning of another buffer.
    pub(in crate::cuda) fn copy(self, to: &Buffer, from: &Buffer, offset: usize, bytes: usize) -> Result {
        assert!(bytes <= to.bytes && offset + bytes <= from.bytes, "a copy past the end of a buffer");
        // SAFETY: both ranges are in bounds, as just checked; owners wait for all work that uses their memory.
        unsafe { result::memcpy_dtod_async(to.ptr, from.ptr + offset as u64, bytes, self.0) }
            .map_err(CudaError::driver("copying"))
    }

    /// Copies `bytes` from byte offset `offset` of page-locked memory to the same offset of a buffer. The host must not
    /// change the bytes before the copy is done.
    pub(in crate::cuda) fn upload(self, to: &Buffer, from: &Pinned, offset: usize, bytes: usize) -> Result {
        assert!(offset + bytes <= from.bytes, "a copy past the end of page-locked memory");
        assert!(offset + bytes <= to.bytes, "a copy past the end of a buffer");
        // SAFETY: both ranges are in bounds, as just checked; owners wait for all work that uses their memory.
        unsafe {
            let source = std::slice::from_raw_parts(from.host.as_ptr().add(offset), bytes);
            result::memcpy_htod_async(to.ptr + offset as u64, source, self.0)
        }
        .map_err(CudaError::driver("copying to the GPU"))
    }

    /// Copies the first `bytes` bytes of a buffer to the beginning of page-locked memory, asynchronously on this stream.
    pub(in crate::cuda) fn download(self, to: &mut Pinned, from: &Buffer, bytes: usize) -> Result {
        assert!(bytes <= to.bytes, "a copy past the end of page-locked memory");
        assert!(bytes <= from.bytes, "a copy past the end of a buffer");
        // SAFETY: both ranges are in bounds, as just checked; owners wait for all work that uses their memory.
        unsafe {
            let target = std::slice::from_raw_parts_mut(to.host.as_ptr(), bytes);
            result::memcpy_dtoh_async(target, from.ptr, self.0)
        }
        .map_err(CudaError::driver("copying from the GPU"))
    }

    /// Captures later work on this stream instead of running it.
    pub(in crate::cuda) fn begin_capture(self) -> Result {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive.
        unsafe { result::stream::begin_capture(self.0, mode) }.map_err(CudaError::driver("capturing a step"))
    }

    /// Ends the capture, and returns the captured work as a graph, ready to be launched.
    pub(in crate::cuda) fn end_capture(self) -> Result<Graph> {
        // SAFETY: capture began on this stream; the graph is destroyed after it is instantiated.
        unsafe {
            let graph = result::stream::end_capture(self.0).map_err(CudaError::driver("capturing a step"))?;
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

/// A point in a stream. Not `Sync`, because recording an event changes it.
pub(in crate::cuda) struct Event(sys::CUevent, PhantomData<Cell<()>>);

// SAFETY: an event is not tied to a thread.
unsafe impl Send for Event {}

impl Event {
    /// Creates an event that orders streams.
    pub(in crate::cuda) fn new() -> Result<Self> {
        Self::with_flags(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// Creates an event that also records the time.
    pub(in crate::cuda) fn timed() -> Result<Self> {
        Self::with_flags(sys::CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn with_flags(flags: sys::CUevent_flags) -> Result<Self> {
        result::event::create(flags)
            .map(|e| Self(e, PhantomData))
            .map_err(CudaError::driver("creating an event"))
    }

    /// Creates an event whose [`Event::wait`] blocks instead of spinning, which frees the core and takes about 50 us longer.
    pub(in crate::cuda) fn sleeping() -> Result<Self> {
        use sys::CUevent_flags as F;
        let flags = F::CU_EVENT_BLOCKING_SYNC as u32 | F::CU_EVENT_DISABLE_TIMING as u32;
        let mut event = std::ptr::null_mut();
        // SAFETY: writes a handle, which `drop` destroys. The flags are combined bits, but cudarc's enum can hold only one.
        unsafe { sys::cuEventCreate(&mut event, flags) }
            .result()
            .map_err(CudaError::driver("creating an event"))?;
        Ok(Self(event, PhantomData))
    }

    pub(in crate::cuda) fn record(&self, stream: Stream) -> Result {
        // SAFETY: stream and event are alive.
        unsafe { result::event::record(self.0, stream.0) }.map_err(CudaError::driver("recording an event"))
    }

    /// Blocks the host until the event has occurred.
    pub(in crate::cuda) fn wait(&self) -> Result {
        // SAFETY: the event is alive.
        unsafe { result::event::synchronize(self.0) }.map_err(CudaError::driver("waiting for an event"))
    }

    pub(in crate::cuda) fn has_passed(&self) -> Result<bool> {
        // SAFETY: the event is alive.
        match unsafe { sys::cuEventQuery(self.0) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            answer => answer.result().map(|()| true).map_err(CudaError::driver("waiting for an event")),
        }
    }

    /// Waits for the event `later`, and returns the milliseconds from this event to it. Both must be [timed](Event::timed).
    pub(in crate::cuda) fn millis_to(&self, later: &Event) -> Result<f32> {
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

/// An instantiated graph.
pub(in crate::cuda) struct Graph {
    executable: sys::CUgraphExec,
    pub(in crate::cuda) nodes: usize,
}

// SAFETY: a graph is not tied to a thread; without `Sync`, only one thread at a time launches it.
unsafe impl Send for Graph {}

impl Graph {
    pub(in crate::cuda) fn launch(&self, stream: Stream) -> Result {
        // SAFETY: the engine that owns this graph also owns the buffers that it uses.
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
