//! Collectives between GPUs: NCCL, enqueued on CUDA streams.
//!
//! [`Nccl`] operates on device memory during a step. Votes, checkpoints and other host data use the TCP ring
//! ([`super::ring`]), which GPU ranks also have. The communicator is non-blocking: every call returns at once, and
//! another thread can abort the work in progress at any time. [`owner`] decides which thread frees a communicator that
//! is aborted during a call.
#![allow(unsafe_code)] // NCCL's calls take a communicator.

mod collective;
mod owner;
mod status;
#[cfg(test)]
mod tests;

use super::{CommError, Exchange};
use cudarc::{
    driver::CudaContext,
    nccl::sys::{self, ncclComm_t, ncclResult_t, ncclUniqueId},
};
use lockstep_host::{
    gpu::libraries::{self, Library},
    lock,
};
use owner::{Handle, Owner};
use status::{async_status, config, error_text, failure};
use std::{
    ptr::null_mut,
    sync::{Arc, Mutex, mpsc},
    time::{Duration, Instant},
};

/// Interval between two polls of an operation that takes longer than 1 ms.
const POLL: Duration = Duration::from_micros(50);
/// Time limit for finalizing a communicator. Other ranks may have exited.
const FINALIZE_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum number of thread blocks of a collective. Each block occupies a multiprocessor. Kernels that wait for other
/// ranks leave this many multiprocessors free, so that a collective on another stream can complete meanwhile.
/// NCCL's own limit on Hopper is equal.
pub const MAX_BLOCKS: u32 = 32;

/// Loads NCCL's kernels onto GPU `ordinal` and opens its network, so that the first group connects sooner (on two H200s, in 0.05 instead
/// of 0.35 s). [`Nccl::connect`] reports errors.
pub fn load(ordinal: i32) {
    let mut comm: ncclComm_t = null_mut();
    // SAFETY: the pointers outlive the calls, and no other thread has the communicator.
    unsafe {
        if sys::ncclCommInitAll(&mut comm, 1, &ordinal) == ncclResult_t::ncclSuccess {
            sys::ncclCommDestroy(comm);
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Comm(ncclComm_t);

// SAFETY: NCCL's communicators are not bound to a thread.
unsafe impl Send for Comm {}

impl Handle for Comm {
    fn abort(self) {
        // On a separate thread, because an abort may take long and the caller may have more groups to abort.
        let abort = move || {
            // Moves all of `self` into the closure, because the pointer in it is not `Send`.
            let Self(comm) = { self };
            // SAFETY: the owner passes the handle on once, while no call uses it.
            unsafe { sys::ncclCommAbort(comm) };
        };
        // If no thread can be started, the end of the process frees the communicator.
        let _ = std::thread::Builder::new().name("nccl abort".into()).spawn(abort);
    }
}

/// One rank of a group of GPUs.
/// Captured CUDA graphs with collectives refer to the communicator, so graphs must be destroyed before the
/// communicator. Collectives that run concurrently on two streams need two `Nccl`s with different names.
#[derive(Debug)]
pub struct Nccl {
    rank: u32,
    size: u32,
    timeout: Duration,
    context: Arc<CudaContext>,
    name: String,
    comm: Owner<Comm>,
    /// Held from a call until NCCL has enqueued it, so that calls of several threads are not interleaved.
    calls: Mutex<()>,
}

impl Nccl {
    /// Collective: joins the ranks of `exchange` in a group. `name` must be unique within an attempt. `ordinal` is this
    /// rank's GPU, as CUDA numbers the devices visible to this process.
    ///
    /// # Errors
    /// NCCL is not installed, a rank does not arrive within `timeout`, or this rank is asked to stop.
    pub fn connect(
        exchange: Exchange<'_>,
        name: &str,
        ordinal: i32,
        timeout: Duration,
    ) -> Result<Arc<Self>, CommError> {
        const OPERATION: &str = "NCCL start";
        let failed = |detail: String| CommError::Failed { operation: OPERATION, detail };
        libraries::check_loadable(&[Library::Driver, Library::Nccl]).map_err(failed)?;
        let gpu = usize::try_from(ordinal).map_err(|_| failed(format!("no GPU {ordinal}")))?;
        let context = CudaContext::new(gpu).map_err(|e| failed(format!("GPU {ordinal}: {e}")))?;
        let (rank, size) = (exchange.rank(), exchange.size());
        let id = exchange_id(OPERATION, exchange, name)?;
        let mut config = config();
        let mut comm: ncclComm_t = null_mut();
        // SAFETY: `comm` and `config` outlive the call, which copies the values of `config` that it needs.
        let status = unsafe {
            sys::ncclCommInitRankConfig(&mut comm, size.cast_signed(), id, rank.cast_signed(), &mut config)
        };
        if comm.is_null() {
            return Err(failed(error_text(status, comm)));
        }
        let (name, comm, calls) = (name.into(), Owner::new(Comm(comm)), Mutex::new(()));
        let this = Self { rank, size, timeout, context, name, comm, calls };
        let connected = this.wait_while_in_progress(OPERATION, status, &|| exchange.should_stop_waiting());
        connected.inspect_err(|error| this.abort(&error.to_string()))?;
        Ok(Arc::new(this))
    }

    /// This process's rank, from 0.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    pub fn size(&self) -> u32 {
        self.size
    }

    /// Checks whether enqueued work has failed, on this rank or (as far as NCCL knows) on another.
    ///
    /// # Errors
    /// Enqueued work has failed, or the group was aborted.
    pub fn async_error(&self) -> Result<(), CommError> {
        const OPERATION: &str = "NCCL";
        match self.with_comm(OPERATION, async_status)? {
            ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress => Ok(()),
            status => Err(self.failure(OPERATION, status)),
        }
    }

    /// Ends the work in progress in this group, from any thread. Other groups continue. Waiting calls return
    /// [`CommError::Aborted`], collectives that run on the GPU end, and work behind them on their streams continues.
    /// The results of these collectives are undefined, also on ranks that have not aborted. Those ranks use incomplete data as if
    /// this rank had sent it.
    pub fn abort(&self, reason: &str) {
        self.comm.abort(reason);
    }

    /// Makes one call with the communicator. No other thread uses or frees the communicator meanwhile.
    fn with_comm<R>(
        &self,
        operation: &'static str,
        call: impl FnOnce(ncclComm_t) -> R,
    ) -> Result<R, CommError> {
        let guard = self.comm.acquire().map_err(|reason| CommError::Aborted { operation, reason })?;
        Ok(call(guard.handle.0))
    }

    /// The error for `status`, with NCCL's text if the communicator still exists.
    fn failure(&self, operation: &'static str, status: ncclResult_t) -> CommError {
        self.with_comm(operation, |comm| failure(operation, status, comm)).unwrap_or_else(|aborted| aborted)
    }

    /// Makes a call and waits until NCCL has enqueued it.
    fn call(
        &self,
        operation: &'static str,
        call: impl FnOnce(ncclComm_t) -> ncclResult_t,
    ) -> Result<(), CommError> {
        let _held = lock(&self.calls);
        self.context.bind_to_thread().map_err(|e| CommError::Failed {
            operation,
            detail: format!("cannot use this rank's GPU: {e}"),
        })?;
        let status = self.with_comm(operation, call)?;
        self.wait_while_in_progress(operation, status, &|| false)
    }

    /// Waits while NCCL reports that the call with this `status` is in progress, unless `should_stop` returns true.
    fn wait_while_in_progress(
        &self,
        operation: &'static str,
        mut status: ncclResult_t,
        should_stop: &dyn Fn() -> bool,
    ) -> Result<(), CommError> {
        let began = Instant::now();
        loop {
            match status {
                ncclResult_t::ncclSuccess => return Ok(()),
                ncclResult_t::ncclInProgress => {}
                status => return Err(self.failure(operation, status)),
            }
            let waited = began.elapsed();
            if should_stop() {
                return Err(CommError::Aborted { operation, reason: "asked to stop".into() });
            }
            if waited > self.timeout {
                let secs = waited.as_secs_f64();
                let detail = format!("group {}: not done after {secs:.0} s", self.name);
                return Err(CommError::Failed { operation, detail });
            }
            // Most calls are enqueued within microseconds.
            if waited > Duration::from_millis(1) {
                std::thread::sleep(POLL);
            } else {
                std::thread::yield_now();
            }
            // Fails if another thread has aborted the group.
            status = self.with_comm(operation, async_status)?;
        }
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        let Some(comm) = self.comm.take() else { return };
        // Finalizes the communicator together with the other ranks if they arrive in time. The wait is bounded,
        // whatever NCCL does.
        let (done, is_done) = mpsc::channel();
        let context = self.context.clone();
        let end = move || {
            // Moves the whole `Comm` into the closure, because the pointer in it is not `Send`.
            let Comm(comm) = { comm };
            if context.bind_to_thread().is_ok() {
                // SAFETY: `comm` was taken above, so no other thread has it.
                unsafe {
                    let mut status = sys::ncclCommFinalize(comm);
                    let began = Instant::now();
                    while status == ncclResult_t::ncclInProgress && began.elapsed() < FINALIZE_TIMEOUT {
                        std::thread::sleep(POLL);
                        status = async_status(comm);
                    }
                    // Without success, another rank is late or has exited. Aborting a communicator during finalization
                    // has crashed (NCCL 2.28), so the end of the process then frees it.
                    if status == ncclResult_t::ncclSuccess {
                        sys::ncclCommDestroy(comm);
                    }
                }
            }
            let _ = done.send(());
        };
        // If no thread can be started, the end of the process frees the communicator.
        if std::thread::Builder::new().name("nccl end".into()).spawn(end).is_ok() {
            let _ = is_done.recv_timeout(FINALIZE_TIMEOUT + Duration::from_secs(1));
        }
    }
}

/// Rank 0 creates the group's id and sends it to the other ranks.
fn exchange_id(
    operation: &'static str,
    exchange: Exchange<'_>,
    name: &str,
) -> Result<ncclUniqueId, CommError> {
    let mut id = ncclUniqueId { internal: [0; 128] };
    if exchange.rank() == 0 {
        // SAFETY: `id` is valid for writes.
        let status = unsafe { sys::ncclGetUniqueId(&mut id) };
        if status != ncclResult_t::ncclSuccess {
            return Err(failure(operation, status, null_mut()));
        }
    }
    let own: [u8; 128] = bytemuck::must_cast(id.internal);
    let bytes = exchange.all_gather_bytes(operation, &format!("nccl/{name}"), &own)?.swap_remove(0);
    let bytes: [u8; 128] = bytes.try_into().map_err(|bytes: Vec<u8>| {
        let detail = format!("sent an NCCL id of {} bytes", bytes.len());
        CommError::Mismatch { operation, peer: 0, detail }
    })?;
    Ok(ncclUniqueId { internal: bytemuck::must_cast(bytes) })
}
