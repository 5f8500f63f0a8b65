//! Collectives between GPUs: NCCL, ordered by CUDA streams.
//!
//! [`Nccl`] is for device memory in the middle of a step; votes, checkpoints and the like go
//! over the TCP ring ([`super::ring`]), which GPU ranks have, too. The communicator is non-blocking:
//! every call returns, and what is under way can be aborted from another thread at any time. Who owns a communicator while
//! another thread aborts is [`owner`]. [`NcclProcessGroup`] is for values in the host's memory.
#![allow(unsafe_code)] // NCCL's calls take a communicator.

mod abort;
mod collective;
mod owner;
mod process_group;
mod staging;
mod status;
#[cfg(test)]
mod tests;

pub use abort::wait_for_aborts;
pub use process_group::NcclProcessGroup;

use super::{CommError, Exchange};
use abort::Comm;
use cudarc::{
    driver::CudaContext,
    nccl::sys::{self, ncclComm_t, ncclResult_t, ncclUniqueId},
};
use lockstep_host::gpu::libraries::{self, Library};
use owner::Owner;
use status::{asynchronous, config, error_text, failure};
use std::{
    ptr::null_mut,
    sync::{Arc, Mutex, PoisonError, mpsc},
    time::{Duration, Instant},
};

/// Between two polls of an operation that takes longer than a moment.
const POLL: Duration = Duration::from_micros(50);
/// For the end of a communicator: others may be gone.
const GOODBYE: Duration = Duration::from_secs(2);

/// Blocks of a collective at most, each of which takes a multiprocessor. Kernels that wait for other ranks leave as many free, so that a
/// collective on another stream can run to its end meanwhile. NVIDIA's own choice on Hopper is up to as many.
pub const MAX_BLOCKS: u32 = 32;

/// One rank's end of a group of GPUs.
///
/// A captured CUDA graph that holds collectives refers to it: graphs are destroyed first. Two groups
/// whose collectives run at the same time on two streams are two `Nccl`s of different names.
#[derive(Debug)]
pub struct Nccl {
    rank: u32,
    size: u32,
    timeout: Duration,
    context: Arc<CudaContext>,
    state: Arc<State>,
}

/// What an abort from another thread needs.
#[derive(Debug)]
struct State {
    name: String,
    comm: Owner<Comm>,
    /// Held from a call until NCCL has taken it up: calls of several threads do not mix.
    calls: Mutex<()>,
}

impl Nccl {
    /// Collective: joins the ranks of `place` to a group; `name` may be used once an attempt. Every rank
    /// calls it, with its own GPU's `ordinal` as CUDA numbers those that this process sees.
    ///
    /// # Errors
    /// NCCL is not there, ranks do not come within `timeout`, or this rank is asked to stop.
    pub fn connect(
        place: Exchange<'_>,
        name: &str,
        ordinal: i32,
        timeout: Duration,
    ) -> Result<Arc<Self>, CommError> {
        const OPERATION: &str = "NCCL start";
        let failed = |detail: String| CommError::Failed { operation: OPERATION, detail };
        libraries::ready(&[Library::Driver, Library::Nccl]).map_err(failed)?;
        let gpu = usize::try_from(ordinal).map_err(|_| failed(format!("no GPU {ordinal}")))?;
        let context = CudaContext::new(gpu).map_err(|e| failed(format!("GPU {ordinal}: {e}")))?;
        let (rank, size) = (place.rank(), place.size());
        let id = exchange_id(OPERATION, place, name)?;
        let mut config = config();
        let mut comm: ncclComm_t = null_mut();
        // SAFETY: `comm` and `config` outlive the call, which copies what it needs of `config`.
        let status = unsafe {
            sys::ncclCommInitRankConfig(&mut comm, size.cast_signed(), id, rank.cast_signed(), &mut config)
        };
        if comm.is_null() {
            return Err(failed(error_text(status, comm)));
        }
        let state =
            Arc::new(State { name: name.into(), comm: Owner::new(Comm(comm)), calls: Mutex::new(()) });
        let this = Self { rank, size, timeout, context, state };
        let connected = this.wait_while_in_progress(OPERATION, status, &|| place.gives_up());
        connected.inspect_err(|error| this.abort(&error.to_string()))?;
        Ok(Arc::new(this))
    }

    /// This process's rank, from 0.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Ranks in the group.
    pub fn size(&self) -> u32 {
        self.size
    }

    /// Whether what was enqueued has failed meanwhile: on this rank, or on another as far as NCCL knows.
    ///
    /// # Errors
    /// It has, or the group was aborted.
    pub fn async_error(&self) -> Result<(), CommError> {
        const OPERATION: &str = "NCCL";
        match self.with(OPERATION, asynchronous)? {
            ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress => Ok(()),
            status => Err(self.failure(OPERATION, status)),
        }
    }

    /// Ends what is under way in this group, from any thread, and in no other: waiting calls return with
    /// [`CommError::Aborted`], collectives that run on the GPU end, and streams behind them come free. What they leave is garbage, also
    /// on ranks that have not aborted: those get what this one would have sent them, and take it for its values.
    pub fn abort(&self, reason: &str) {
        self.state.comm.abort(reason);
    }

    /// Makes one call with the communicator, which nobody else uses or frees meanwhile.
    fn with<R>(&self, operation: &'static str, call: impl FnOnce(ncclComm_t) -> R) -> Result<R, CommError> {
        let using = self.state.comm.using().map_err(|reason| CommError::Aborted { operation, reason })?;
        Ok(call(using.handle.0))
    }

    /// What NCCL says of a status, if it can still be asked.
    fn failure(&self, operation: &'static str, status: ncclResult_t) -> CommError {
        self.with(operation, |comm| failure(operation, status, comm)).unwrap_or_else(|aborted| aborted)
    }

    /// Makes a call and waits until NCCL has taken it up.
    fn call(
        &self,
        operation: &'static str,
        call: impl FnOnce(ncclComm_t) -> ncclResult_t,
    ) -> Result<(), CommError> {
        let _held = self.state.calls.lock().unwrap_or_else(PoisonError::into_inner);
        self.context
            .bind_to_thread()
            .map_err(|e| CommError::Failed { operation, detail: format!("its GPU: {e}") })?;
        let status = self.with(operation, call)?;
        self.wait_while_in_progress(operation, status, &|| false)
    }

    /// Waits while NCCL is still at it.
    fn wait_while_in_progress(
        &self,
        operation: &'static str,
        mut status: ncclResult_t,
        stopped: &dyn Fn() -> bool,
    ) -> Result<(), CommError> {
        let began = Instant::now();
        loop {
            match status {
                ncclResult_t::ncclSuccess => return Ok(()),
                ncclResult_t::ncclInProgress => {}
                status => return Err(self.failure(operation, status)),
            }
            let waited = began.elapsed();
            if stopped() {
                return Err(CommError::Aborted { operation, reason: "asked to stop".into() });
            }
            if waited > self.timeout {
                let secs = waited.as_secs_f64();
                let detail = format!("group {}: not done after {secs:.0} s", self.state.name);
                return Err(CommError::Failed { operation, detail });
            }
            // Most calls are taken up within microseconds.
            if waited > Duration::from_millis(1) {
                std::thread::sleep(POLL);
            } else {
                std::thread::yield_now();
            }
            // An abort from elsewhere shows here.
            status = self.with(operation, asynchronous)?;
        }
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        let Some(comm) = self.state.comm.take() else { return };
        // With the others if they come, without them else; and never for long, whatever NCCL does.
        let (done, is_done) = mpsc::channel();
        let context = self.context.clone();
        let end = move || {
            let Comm(comm) = { comm };
            if context.bind_to_thread().is_ok() {
                // SAFETY: nobody else has `comm` any more: it was taken above.
                unsafe {
                    let mut status = sys::ncclCommFinalize(comm);
                    let began = Instant::now();
                    while status == ncclResult_t::ncclInProgress && began.elapsed() < GOODBYE {
                        std::thread::sleep(POLL);
                        status = asynchronous(comm);
                    }
                    // Others are late or gone otherwise. An abort of what is being finalized has crashed (NCCL 2.28), so this is left
                    // to the end of the process.
                    if status == ncclResult_t::ncclSuccess {
                        sys::ncclCommDestroy(comm);
                    }
                }
            }
            let _ = done.send(());
        };
        // Without a thread it goes with the process.
        if std::thread::Builder::new().name("nccl end".into()).spawn(end).is_ok() {
            let _ = is_done.recv_timeout(GOODBYE + Duration::from_secs(1));
        }
    }
}

/// Rank 0 makes the group's id, the others get it from there.
fn exchange_id(operation: &'static str, place: Exchange<'_>, name: &str) -> Result<ncclUniqueId, CommError> {
    let mut id = ncclUniqueId { internal: [0; 128] };
    let mut own = Vec::new();
    if place.rank() == 0 {
        // SAFETY: `id` is where it writes to.
        let status = unsafe { sys::ncclGetUniqueId(&mut id) };
        if status != ncclResult_t::ncclSuccess {
            return Err(failure(operation, status, null_mut()));
        }
        own = id.internal.iter().map(|byte| byte.cast_unsigned()).collect();
    }
    let bytes = place.exchange(operation, &format!("nccl/{name}"), &own)?.swap_remove(0);
    if bytes.len() != id.internal.len() {
        let detail = format!("gave an NCCL id of {} bytes", bytes.len());
        return Err(CommError::Mismatch { operation, peer: 0, detail });
    }
    for (into, byte) in id.internal.iter_mut().zip(bytes) {
        *into = byte.cast_signed();
    }
    Ok(id)
}
