//! Streams, events and captured graphs.

#![allow(unsafe_code)] // As in `device.rs`.

use super::{Buffer, Pinned};
use crate::cuda::error::CudaError;
use cudarc::driver::{result, sys};
use std::{cell::Cell, marker::PhantomData};

/// A queue of work. A handle: its [`OwnedStream`] must outlive it.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct Stream(pub(in crate::cuda) sys::CUstream);

/// Keeps a stream alive.
pub(in crate::cuda) struct OwnedStream(pub(in crate::cuda) Stream);

// SAFETY: a stream belongs to no thread.
unsafe impl Send for OwnedStream {}
// SAFETY: calls on a stream may come from several threads; the driver orders them.
unsafe impl Sync for OwnedStream {}

impl OwnedStream {
    /// A stream that runs concurrently with the default one; `urgent` work goes before other streams' work that waits.
    pub(in crate::cuda) fn new(urgent: bool) -> Result<Self, CudaError> {
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
    pub(in crate::cuda) fn synchronize(self) -> Result<(), CudaError> {
        // SAFETY: the stream is alive.
        unsafe { result::stream::synchronize(self.0) }.map_err(CudaError::driver("waiting for a stream"))
    }

    /// Makes the first `bytes` of a buffer `value`.
    pub(in crate::cuda) fn fill(self, buffer: &Buffer, bytes: usize, value: u8) -> Result<(), CudaError> {
        assert!(bytes <= buffer.bytes, "{bytes} of {} bytes", buffer.bytes);
        // SAFETY: the buffer has that many bytes, and the stream is alive.
        unsafe { result::memset_d8_async(buffer.ptr, value, bytes, self.0) }
            .map_err(CudaError::driver("clearing memory"))
    }

    /// Whether all that was started here is done.
    pub(in crate::cuda) fn is_idle(self) -> Result<bool, CudaError> {
        // SAFETY: the stream is alive.
        match unsafe { sys::cuStreamQuery(self.0) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            answer => answer.result().map(|()| true).map_err(CudaError::driver("a copy past a step")),
        }
    }

    /// Whether something that was started here, or on the GPU before it, has failed.
    pub(in crate::cuda) fn failure(self) -> Result<(), CudaError> {
        // SAFETY: the stream is alive.
        match unsafe { sys::cuStreamQuery(self.0) } {
            sys::CUresult::CUDA_SUCCESS | sys::CUresult::CUDA_ERROR_NOT_READY => Ok(()),
            error => error.result().map_err(CudaError::driver("a step")),
        }
    }

    /// Later work here waits for what `event` was recorded after.
    pub(in crate::cuda) fn wait(self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both are alive.
        unsafe { result::stream::wait_event(self.0, event.0, sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT) }
            .map_err(CudaError::driver("ordering streams"))
    }

    /// Copies `bytes` from `offset` bytes on to the beginning of another buffer.
    pub(in crate::cuda) fn copy(
        self,
        to: &Buffer,
        from: &Buffer,
        offset: usize,
        bytes: usize,
    ) -> Result<(), CudaError> {
        assert!(bytes <= to.bytes && offset + bytes <= from.bytes, "a copy past the end of a buffer");
        // SAFETY: both ranges are inside of their buffers, as just checked; a buffer's owner waits for what uses it
        // before it drops it.
        unsafe { result::memcpy_dtod_async(to.ptr, from.ptr + offset as u64, bytes, self.0) }
            .map_err(CudaError::driver("copying"))
    }

    /// Copies `bytes` from `offset` bytes on of page-locked memory, which must stay as they are until this stream has
    /// gone past it, to the same offset of a buffer.
    pub(in crate::cuda) fn upload(
        self,
        to: &Buffer,
        from: &Pinned,
        offset: usize,
        bytes: usize,
    ) -> Result<(), CudaError> {
        assert!(offset + bytes <= from.bytes, "a copy past the end of page-locked memory");
        assert!(offset + bytes <= to.bytes, "a copy past the end of a buffer");
        // SAFETY: both ranges are inside, as just checked; owners wait for what uses their memory before they drop it.
        unsafe {
            let source = std::slice::from_raw_parts(from.host.as_ptr().add(offset), bytes);
            result::memcpy_htod_async(to.ptr + offset as u64, source, self.0)
        }
        .map_err(CudaError::driver("copying to the GPU"))
    }

    /// A copy to page-locked memory, which is there once this stream has gone past it.
    pub(in crate::cuda) fn download(
        self,
        to: &mut Pinned,
        from: &Buffer,
        bytes: usize,
    ) -> Result<(), CudaError> {
        assert!(bytes <= to.bytes, "a copy past the end of page-locked memory");
        assert!(bytes <= from.bytes, "a copy past the end of a buffer");
        // SAFETY: both ranges are inside, as just checked; owners wait for what uses their memory before they drop it.
        unsafe {
            let target = std::slice::from_raw_parts_mut(to.host.as_ptr(), bytes);
            result::memcpy_dtoh_async(target, from.ptr, self.0)
        }
        .map_err(CudaError::driver("copying from the GPU"))
    }

    /// Records what is started here from now on instead of running it.
    pub(in crate::cuda) fn begin_capture(self) -> Result<(), CudaError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive.
        unsafe { result::stream::begin_capture(self.0, mode) }.map_err(CudaError::driver("recording a step"))
    }

    /// Ends [`Stream::begin_capture`].
    pub(in crate::cuda) fn end_capture(self) -> Result<Graph, CudaError> {
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
pub(in crate::cuda) struct Event(sys::CUevent, PhantomData<Cell<()>>);

// SAFETY: an event belongs to no thread.
unsafe impl Send for Event {}

impl Event {
    /// One that orders streams, and records the time if `timed`.
    pub(in crate::cuda) fn new(timed: bool) -> Result<Self, CudaError> {
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
    pub(in crate::cuda) fn sleeping() -> Result<Self, CudaError> {
        use sys::CUevent_flags as F;
        let flags = F::CU_EVENT_BLOCKING_SYNC as u32 | F::CU_EVENT_DISABLE_TIMING as u32;
        let mut event = std::ptr::null_mut();
        // SAFETY: it writes a handle, destroyed when this is dropped. The flags are bits, of which cudarc's type holds one.
        unsafe { sys::cuEventCreate(&mut event, flags) }
            .result()
            .map_err(CudaError::driver("creating an event"))?;
        Ok(Self(event, PhantomData))
    }

    pub(in crate::cuda) fn record(&self, stream: Stream) -> Result<(), CudaError> {
        // SAFETY: both are alive.
        unsafe { result::event::record(self.0, stream.0) }.map_err(CudaError::driver("recording an event"))
    }

    /// Waits on the host.
    pub(in crate::cuda) fn wait(&self) -> Result<(), CudaError> {
        // SAFETY: the event is alive.
        unsafe { result::event::synchronize(self.0) }.map_err(CudaError::driver("waiting for an event"))
    }

    /// Whether [`Event::wait`] would not wait.
    pub(in crate::cuda) fn has_passed(&self) -> Result<bool, CudaError> {
        // SAFETY: the event is alive.
        match unsafe { sys::cuEventQuery(self.0) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            answer => answer.result().map(|()| true).map_err(CudaError::driver("waiting for an event")),
        }
    }

    /// Milliseconds from this event to a later one, both waited for.
    pub(in crate::cuda) fn millis_to(&self, later: &Event) -> Result<f32, CudaError> {
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
pub(in crate::cuda) struct Graph {
    executable: sys::CUgraphExec,
    pub(in crate::cuda) nodes: usize,
}

// SAFETY: a graph belongs to no thread; one at a time starts it, as there is no `Sync`.
unsafe impl Send for Graph {}

impl Graph {
    pub(in crate::cuda) fn launch(&self, stream: Stream) -> Result<(), CudaError> {
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
