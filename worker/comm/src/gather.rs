//! A test of GPU ranks: runs an all-gather and timed all-reduces over NCCL, and checks whether the ranks can share GPU
//! memory.
#![allow(unsafe_code)] // Raw device addresses; all device memory is allocated here and outlives its use.

use crate::{CommError, DataType, Exchange, nccl::Nccl, peers::Peers, rendezvous::Store};
use cudarc::driver::{
    CudaContext, DriverError, result,
    result::stream::StreamKind,
    sys::{self, CUdeviceptr, CUresult, CUstream},
};
use serde::{Deserialize, Serialize};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// Time limit for the work enqueued on a GPU.
const GPU_TIMEOUT: Duration = Duration::from_secs(60);
/// Number of values in the short all-reduce (1 KiB).
const SHORT: usize = 256;
/// Number of values in the long all-reduce (256 MiB). On H200s, all-reduces of 16 MiB reach three quarters of the throughput.
const LONG: usize = 64 << 20;

/// The results of a test of the connections between ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AllGatherResult {
    /// `CPU` or `GPU`.
    pub device: String,
    /// The gathered values. Rank `r` contributes the value `r`.
    pub values: Vec<f32>,
    /// Mean time of an all-reduce of 1 KiB, in microseconds. On GPUs, the all-reduces run one after the other in a CUDA
    /// graph, as in training.
    pub short_us: f64,
    /// Throughput of an all-reduce of 256 MiB (CPU ranks: 16 MiB), in bytes per second.
    pub bytes_per_second: f64,
    /// Why the ranks cannot share GPU memory. Absent if they can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_peer_memory: Option<String>,
}

/// Collective: runs the test on the GPUs of all ranks that meet at `store`. `ordinal` is CUDA's number for this rank's GPU.
///
/// # Errors
/// NCCL or a GPU fails, or does not finish within a minute.
pub fn run(store: &Store, ordinal: i32) -> Result<AllGatherResult, CommError> {
    const OPERATION: &str = "all-gather over NCCL";
    let failed =
        |e: DriverError| CommError::Failed { operation: OPERATION, detail: format!("GPU {ordinal}: {e}") };
    let nccl = Nccl::connect(Exchange::Store(store, GPU_TIMEOUT), "doctor", ordinal, GPU_TIMEOUT)?;
    let gpu = Gpu::open(ordinal).map_err(failed)?;
    let ranks = nccl.size() as usize;
    let own_value = gpu.memory(4).map_err(failed)?;
    let gathered = gpu.memory(4 * ranks).map_err(failed)?;
    let vector = gpu.memory(4 * LONG).map_err(failed)?;
    let finish = || {
        gpu.finish().map_err(|detail| {
            nccl.abort(&detail);
            CommError::Failed { operation: OPERATION, detail: format!("GPU {ordinal}: {detail}") }
        })
    };
    let mut values = vec![f32::NAN; ranks];
    // SAFETY: `own_value`, `gathered` and `vector` are large enough for the values that are copied, gathered and reduced. They
    // live until `finish` has waited for this work.
    unsafe {
        result::memcpy_htod_sync(own_value.0, &[nccl.rank() as f32]).map_err(failed)?;
        nccl.all_gather(own_value.0, gathered.0, 1, DataType::F32, gpu.stream)?;
        finish()?;
        result::memcpy_dtoh_sync(&mut values, gathered.0).map_err(failed)?;
    }
    let mean_secs = |count: usize, rounds: u32| -> Result<f64, CommError> {
        // SAFETY: as above; `count` is at most LONG. The graph is launched on the stream on which it was recorded,
        // and lives until `finish` has waited for it.
        unsafe {
            let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            result::stream::begin_capture(gpu.stream, mode).map_err(failed)?;
            let enqueued =
                (0..rounds).try_for_each(|_| nccl.all_reduce(vector.0, count, DataType::F32, gpu.stream));
            let recorded = result::stream::end_capture(gpu.stream).map_err(failed)?;
            enqueued?;
            let graph =
                result::graph::instantiate(recorded, sys::CUgraphInstantiate_flags(0)).map_err(failed)?;
            result::graph::destroy(recorded).map_err(failed)?;
            let time_launch = || -> Result<f64, CommError> {
                let began = Instant::now();
                result::graph::launch(graph, gpu.stream).map_err(failed)?;
                finish()?;
                Ok(began.elapsed().as_secs_f64() / f64::from(rounds))
            };
            time_launch()?;
            let secs = time_launch();
            result::graph::exec_destroy(graph).map_err(failed)?;
            secs
        }
    };
    let short_us = mean_secs(SHORT, 200)? * 1e6;
    let bytes_per_second = 4.0 * LONG as f64 / mean_secs(LONG, 5)?.max(1e-9);
    let exchange = Exchange::Store(store, GPU_TIMEOUT);
    let no_peer_memory = Peers::connect(exchange, "doctor", ordinal, 4096, Ok(()))?.err();
    Ok(AllGatherResult { device: "GPU".into(), values, short_us, bytes_per_second, no_peer_memory })
}

/// A GPU with a stream for the test.
struct Gpu {
    context: Arc<CudaContext>,
    stream: CUstream,
}

impl Gpu {
    fn open(ordinal: i32) -> Result<Self, DriverError> {
        let context = CudaContext::new(usize::try_from(ordinal).unwrap_or(usize::MAX))?;
        Ok(Self { context, stream: result::stream::create(StreamKind::NonBlocking)? })
    }

    fn memory(&self, bytes: usize) -> Result<Memory, DriverError> {
        // SAFETY: the context is current on this thread. `Memory` frees the allocation when dropped.
        unsafe {
            let memory = Memory(result::malloc_sync(bytes)?);
            result::memset_d8_sync(memory.0, 0, bytes)?;
            self.context.synchronize()?;
            Ok(memory)
        }
    }

    /// Waits until all work on the stream has completed, or for [`GPU_TIMEOUT`]. (`cuStreamSynchronize` has no time limit.)
    fn finish(&self) -> Result<(), String> {
        let began = Instant::now();
        loop {
            // SAFETY: the stream lives as long as `self`.
            match unsafe { sys::cuStreamQuery(self.stream) } {
                CUresult::CUDA_SUCCESS => return Ok(()),
                CUresult::CUDA_ERROR_NOT_READY if began.elapsed() > GPU_TIMEOUT => {
                    return Err(format!("not done after {} s", GPU_TIMEOUT.as_secs()));
                }
                CUresult::CUDA_ERROR_NOT_READY => std::thread::yield_now(),
                error => return Err(DriverError(error).to_string()),
            }
        }
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: created by `open`. CUDA completes pending work before it destroys the stream.
        let _ = unsafe { result::stream::destroy(self.stream) };
    }
}

struct Memory(CUdeviceptr);

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated by `Gpu::memory`.
        let _ = unsafe { result::free_sync(self.0) };
    }
}
