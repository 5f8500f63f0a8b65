//! Collectives between GPUs: NCCL, ordered by CUDA streams.
//!
//! What goes through here is device memory in the middle of a step; votes, checkpoints and the like go
//! over the TCP ring ([`super::ring`]), which GPU ranks have, too. The communicator is non-blocking:
//! every call returns, and what is under way can be aborted from another thread at any time.
//!
//! Past 400 lines because what may be called when is one story; who owns a communicator while another thread aborts is
//! [`owner`].
#![allow(unsafe_code)] // NCCL's calls take device pointers and streams, which callers vouch for.

mod owner;

use super::{
    CommError, Reduction,
    rendezvous::{RendezvousError, Store},
};
use crate::gpu::libraries::{self, Which};
use cudarc::{
    driver::{CudaContext, sys::CUstream},
    nccl::sys::{self, ncclComm_t, ncclConfig_t, ncclResult_t, ncclUniqueId},
};
use std::{
    ffi::{CStr, c_int},
    mem::size_of,
    ptr::null_mut,
    sync::{Arc, Condvar, Mutex, PoisonError, Weak, mpsc},
    time::{Duration, Instant},
};

use owner::{Handle, Owner};

/// `ncclConfig_t.magic` of `nccl.h`.
const CONFIG_MAGIC: u32 = 0xcafe_beef;
/// The version whose `ncclConfig_t` is filled in here; later libraries take it as it is.
const CONFIG_VERSION: u32 = 2_27_00;
/// "Choose yourself" in `ncclConfig_t`.
const UNDEFINED: c_int = c_int::MIN;
/// Between two looks at what is under way, when it takes longer than a moment.
const POLL: Duration = Duration::from_micros(50);
/// For the end of a communicator: others may be gone.
const GOODBYE: Duration = Duration::from_secs(2);

/// Type of the values in device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    U8,
    F16,
    Bf16,
    F32,
    F64,
}

impl Dtype {
    fn nccl(self) -> sys::ncclDataType_t {
        match self {
            Self::U8 => sys::ncclDataType_t::ncclUint8,
            Self::F16 => sys::ncclDataType_t::ncclFloat16,
            Self::Bf16 => sys::ncclDataType_t::ncclBfloat16,
            Self::F32 => sys::ncclDataType_t::ncclFloat32,
            Self::F64 => sys::ncclDataType_t::ncclFloat64,
        }
    }
}

/// One rank's end of a group of GPUs.
///
/// A captured CUDA graph that holds collectives refers to it: graphs are destroyed first. Two groups
/// whose collectives run at the same time on two streams are two `Nccl`s of different names.
#[derive(Debug)]
pub struct Nccl {
    rank: u32,
    world_size: u32,
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

/// NCCL's pointer to a communicator.
#[derive(Debug, Clone, Copy)]
struct Comm(ncclComm_t);

// SAFETY: NCCL's communicators are not bound to threads.
unsafe impl Send for Comm {}

impl Handle for Comm {
    fn abort(self) {
        // It may take a while to end everything; whoever aborts has other things to end, too.
        let abort = move || {
            let Self(comm) = { self };
            // SAFETY: the owner gave it away for this, once, when no call was being made.
            unsafe { sys::ncclCommAbort(comm) };
            ABORTS.with(|under_way| *under_way -= 1);
        };
        ABORTS.with(|under_way| *under_way += 1);
        // Without a thread it goes with the process.
        if std::thread::Builder::new().name("nccl abort".into()).spawn(abort).is_err() {
            ABORTS.with(|under_way| *under_way -= 1);
        }
    }
}

/// Aborts that NCCL has not finished.
struct Aborts {
    under_way: Mutex<usize>,
    changed: Condvar,
}

static ABORTS: Aborts = Aborts { under_way: Mutex::new(0), changed: Condvar::new() };

impl Aborts {
    fn with(&self, change: impl FnOnce(&mut usize)) {
        change(&mut self.under_way.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }
}

/// Waits until every abort that was begun is finished, at most `limit`; says whether they are.
pub fn wait_for_aborts(limit: Duration) -> bool {
    let under_way = ABORTS.under_way.lock().unwrap_or_else(PoisonError::into_inner);
    match ABORTS.changed.wait_timeout_while(under_way, limit, |under_way| *under_way > 0) {
        Ok((under_way, _)) => *under_way == 0,
        Err(poisoned) => *poisoned.into_inner().0 == 0,
    }
}

/// Communicators of this process, which is one rank.
static LIVE: Mutex<Vec<Weak<State>>> = Mutex::new(Vec::new());

/// What else must end then.
type Hook = Box<dyn Fn() + Send>;
static HOOKS: Mutex<Vec<Hook>> = Mutex::new(Vec::new());

/// Has `hook` called by [`abort_all`]: for kernels that wait for other GPUs without NCCL.
pub fn on_abort(hook: impl Fn() + Send + 'static) {
    HOOKS.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(hook));
}

/// Ends what is under way in all groups of this process, from any thread: waiting calls return with
/// [`CommError::Aborted`], collectives that run on the GPU end, and streams behind them come free.
pub fn abort_all(reason: &str) {
    HOOKS.lock().unwrap_or_else(PoisonError::into_inner).iter().for_each(|hook| hook());
    let live: Vec<_> = std::mem::take(&mut *LIVE.lock().unwrap_or_else(PoisonError::into_inner));
    live.iter().filter_map(Weak::upgrade).for_each(|state| state.comm.abort(reason));
}

impl Nccl {
    /// Joins the ranks that meet at `store` to a group; `name` may be used once an attempt. Every rank
    /// calls it, with its own GPU's `ordinal` as CUDA numbers those that this process sees.
    ///
    /// # Errors
    /// NCCL is not there, ranks do not come within `timeout`, or this rank is told to stop.
    pub fn connect(
        store: &Store,
        name: &str,
        ordinal: i32,
        timeout: Duration,
    ) -> Result<Arc<Self>, CommError> {
        const OPERATION: &str = "NCCL start";
        let failed = |detail: String| CommError::Failed { operation: OPERATION, detail };
        libraries::ready(&[Which::Driver, Which::Nccl]).map_err(failed)?;
        let gpu = usize::try_from(ordinal).map_err(|_| failed(format!("no GPU {ordinal}")))?;
        let context = CudaContext::new(gpu).map_err(|e| failed(format!("GPU {ordinal}: {e}")))?;
        let meeting = store.meeting();
        let (rank, world_size) = (meeting.rank, meeting.world_size);
        let id = exchange_id(store, name)?;
        let mut config = config();
        let mut comm: ncclComm_t = null_mut();
        // SAFETY: `comm` and `config` outlive the call, which copies what it needs of `config`.
        let status = unsafe {
            sys::ncclCommInitRankConfig(
                &mut comm,
                world_size.cast_signed(),
                id,
                rank.cast_signed(),
                &mut config,
            )
        };
        if comm.is_null() {
            return Err(failed(error_text(status, comm)));
        }
        let state =
            Arc::new(State { name: name.into(), comm: Owner::new(Comm(comm)), calls: Mutex::new(()) });
        LIVE.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(&state));
        let this = Self { rank, world_size, timeout, context, state };
        this.settle(OPERATION, status, &|| store.gives_up())?;
        Ok(Arc::new(this))
    }

    /// This process's rank, from 0.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Ranks in the group.
    pub fn world_size(&self) -> u32 {
        self.world_size
    }

    /// Replaces `count` values at `ptr` by their reduction over all ranks, in the order of `stream`.
    /// Returns when NCCL has enqueued it (or, while `stream` is captured, added it to the graph).
    ///
    /// # Errors
    /// The group has failed or was aborted; it is unusable afterwards.
    ///
    /// # Safety
    /// `ptr` is device memory of this rank's GPU with `count` values of `dtype`, which stay there until
    /// `stream` has passed this point; `stream` is of the same GPU.
    pub unsafe fn all_reduce(
        &self,
        ptr: u64,
        count: usize,
        dtype: Dtype,
        reduction: Reduction,
        stream: CUstream,
    ) -> Result<(), CommError> {
        // SAFETY: as this function's.
        unsafe { self.all_reduce_many(&[(ptr, count)], dtype, reduction, stream) }
    }

    /// As [`Nccl::all_reduce`] for several ranges at once, which NCCL may put into one kernel.
    ///
    /// # Errors
    /// As [`Nccl::all_reduce`].
    ///
    /// # Safety
    /// As [`Nccl::all_reduce`], for each range `(ptr, count)`.
    pub unsafe fn all_reduce_many(
        &self,
        ranges: &[(u64, usize)],
        dtype: Dtype,
        reduction: Reduction,
        stream: CUstream,
    ) -> Result<(), CommError> {
        let operation = match reduction {
            Reduction::Sum => sys::ncclRedOp_t::ncclSum,
            Reduction::Mean => sys::ncclRedOp_t::ncclAvg,
        };
        self.call("all_reduce", |comm| {
            // SAFETY: the caller vouches for the ranges and the stream; `comm` is alive and this thread's
            // until the call is made.
            unsafe {
                if let [(ptr, count)] = ranges {
                    let at = *ptr as *mut _;
                    return sys::ncclAllReduce(at, at, *count, dtype.nccl(), operation, comm, stream.cast());
                }
                let begun = sys::ncclGroupStart();
                if begun != ncclResult_t::ncclSuccess {
                    return begun;
                }
                let mut worst = ncclResult_t::ncclSuccess;
                for (ptr, count) in ranges {
                    let at = *ptr as *mut _;
                    let status =
                        sys::ncclAllReduce(at, at, *count, dtype.nccl(), operation, comm, stream.cast());
                    if !matches!(status, ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress) {
                        worst = status;
                    }
                }
                // Also after a failure: a group that is begun is ended.
                let ended = sys::ncclGroupEnd();
                if worst == ncclResult_t::ncclSuccess { ended } else { worst }
            }
        })
    }

    /// Replaces `count` values at `ptr` by those of rank `root`, in the order of `stream`.
    ///
    /// # Errors
    /// As [`Nccl::all_reduce`].
    ///
    /// # Safety
    /// As [`Nccl::all_reduce`].
    pub unsafe fn broadcast(
        &self,
        ptr: u64,
        count: usize,
        dtype: Dtype,
        root: u32,
        stream: CUstream,
    ) -> Result<(), CommError> {
        let at = ptr as *mut _;
        self.call("broadcast", |comm| {
            // SAFETY: as in `all_reduce_many`.
            unsafe {
                sys::ncclBroadcast(at, at, count, dtype.nccl(), root.cast_signed(), comm, stream.cast())
            }
        })
    }

    /// Gathers `count` values at `from` of every rank at `to`, in rank order.
    ///
    /// # Errors
    /// As [`Nccl::all_reduce`].
    ///
    /// # Safety
    /// As [`Nccl::all_reduce`]; `to` has room for `count` values of every rank.
    pub unsafe fn all_gather(
        &self,
        from: u64,
        to: u64,
        count: usize,
        dtype: Dtype,
        stream: CUstream,
    ) -> Result<(), CommError> {
        self.call("all_gather", |comm| {
            // SAFETY: as in `all_reduce_many`.
            unsafe {
                sys::ncclAllGather(from as *const _, to as *mut _, count, dtype.nccl(), comm, stream.cast())
            }
        })
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

    /// Ends what is under way, from any thread: [`abort_all`] for this group alone.
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
        self.settle(operation, status, &|| false)
    }

    /// Waits while NCCL is still at it.
    fn settle(
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
                status => {
                    let error = self.failure(operation, status);
                    self.abort(&error.to_string());
                    return Err(error);
                }
            }
            let waited = began.elapsed();
            if stopped() {
                self.abort("told to stop");
                return Err(CommError::Aborted { operation, reason: "told to stop".into() });
            }
            if waited > self.timeout {
                let secs = waited.as_secs_f64();
                let detail = format!("group {}: not done after {secs:.0} s", self.state.name);
                self.abort(&detail);
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
                    if status == ncclResult_t::ncclSuccess {
                        sys::ncclCommDestroy(comm);
                    } else {
                        sys::ncclCommAbort(comm);
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

/// Rank 0 makes the group's id, the others take it from the store.
fn exchange_id(store: &Store, name: &str) -> Result<ncclUniqueId, CommError> {
    const OPERATION: &str = "NCCL start";
    let key = format!("nccl/{name}");
    let lost = |error: RendezvousError| match error {
        RendezvousError::Stopped => {
            CommError::Aborted { operation: OPERATION, reason: "told to stop".into() }
        }
        RendezvousError::Lost(detail) => {
            CommError::Disconnected { operation: OPERATION, peer: 0, detail: detail.to_string() }
        }
        other => CommError::Failed { operation: OPERATION, detail: other.to_string() },
    };
    let mut id = ncclUniqueId { internal: [0; 128] };
    if store.meeting().rank == 0 {
        // SAFETY: `id` is where it writes to.
        let status = unsafe { sys::ncclGetUniqueId(&mut id) };
        if status != ncclResult_t::ncclSuccess {
            return Err(failure(OPERATION, status, null_mut()));
        }
        let bytes: Vec<u8> = id.internal.iter().map(|byte| byte.cast_unsigned()).collect();
        store.set(&key, &bytes).map_err(lost)?;
        return Ok(id);
    }
    let bytes = store.get(&key).map_err(lost)?.ok_or_else(|| CommError::TimedOut {
        operation: OPERATION,
        peer: 0,
        secs: store.meeting().timeout.as_secs_f64(),
    })?;
    if bytes.len() != id.internal.len() {
        let detail = format!("gave an NCCL id of {} bytes", bytes.len());
        return Err(CommError::Mismatch { operation: OPERATION, peer: 0, detail });
    }
    for (into, byte) in id.internal.iter_mut().zip(bytes) {
        *into = byte.cast_signed();
    }
    Ok(id)
}

/// `NCCL_CONFIG_INITIALIZER` of `nccl.h` (a macro there), but non-blocking.
fn config() -> ncclConfig_t {
    ncclConfig_t {
        size: size_of::<ncclConfig_t>(),
        magic: CONFIG_MAGIC,
        version: CONFIG_VERSION,
        blocking: 0,
        cgaClusterSize: UNDEFINED,
        minCTAs: UNDEFINED,
        maxCTAs: UNDEFINED,
        netName: null_mut(),
        splitShare: UNDEFINED,
        trafficClass: UNDEFINED,
        commName: null_mut(),
        collnetEnable: UNDEFINED,
        CTAPolicy: UNDEFINED,
        shrinkShare: UNDEFINED,
        nvlsCTAs: UNDEFINED,
    }
}

fn asynchronous(comm: ncclComm_t) -> ncclResult_t {
    let mut status = ncclResult_t::ncclSuccess;
    // SAFETY: `comm` is alive: it is used under its owner's rule or by who took it.
    let asked = unsafe { sys::ncclCommGetAsyncError(comm, &mut status) };
    if asked == ncclResult_t::ncclSuccess { status } else { asked }
}

fn failure(operation: &'static str, status: ncclResult_t, comm: ncclComm_t) -> CommError {
    CommError::Failed { operation, detail: error_text(status, comm) }
}

/// NCCL's words for a status, and what it knows beyond that.
fn error_text(status: ncclResult_t, comm: ncclComm_t) -> String {
    let text = |words: *const std::ffi::c_char| -> String {
        if words.is_null() {
            return String::new();
        }
        // SAFETY: NCCL gives strings that end in a zero and live on.
        unsafe { CStr::from_ptr(words) }.to_string_lossy().trim().replace('\n', " ")
    };
    // SAFETY: takes any status; and a communicator, or null for the thread's own last error.
    let (words, more) = unsafe { (text(sys::ncclGetErrorString(status)), text(sys::ncclGetLastError(comm))) };
    if more.is_empty() { format!("NCCL: {words}") } else { format!("NCCL: {words}: {more}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        comm::rendezvous::{free_port, tests::meeting},
        doctor::gather::gather,
    };

    #[test]
    #[ignore = "needs a GPU"]
    fn gpu_a_group_of_one_gathers_and_is_aborted() {
        let store = Store::join(meeting(free_port("127.0.0.1").unwrap(), 0, 1)).unwrap();
        let found = gather(&store, 0).unwrap();
        assert_eq!(found.values, [0.0]);
        let patience = Duration::from_secs(60);
        let nccl = Nccl::connect(&store, "another", 0, patience).unwrap();
        nccl.async_error().unwrap();
        let began = Instant::now();
        abort_all("enough");
        assert!(matches!(nccl.async_error(), Err(CommError::Aborted { reason, .. }) if reason == "enough"));
        drop(nccl);
        assert!(wait_for_aborts(Duration::from_secs(10)));
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn gpu_an_abort_while_other_threads_ask_for_errors() {
        for round in 0..5 {
            let store = Store::join(meeting(free_port("127.0.0.1").unwrap(), 0, 1)).unwrap();
            let nccl = Nccl::connect(&store, "asked", 0, Duration::from_secs(60)).unwrap();
            std::thread::scope(|scope| {
                let asking: Vec<_> = (0..4)
                    .map(|_| {
                        scope.spawn(|| {
                            loop {
                                if let Err(error) = nccl.async_error() {
                                    return error;
                                }
                            }
                        })
                    })
                    .collect();
                std::thread::sleep(Duration::from_millis(10 * round));
                nccl.abort("enough");
                for thread in asking {
                    let error = thread.join().unwrap();
                    assert!(
                        matches!(&error, CommError::Aborted { reason, .. } if reason == "enough"),
                        "{error}"
                    );
                }
            });
            assert!(wait_for_aborts(Duration::from_secs(10)), "round {round}");
        }
    }

    #[test]
    fn without_nccl_its_absence_is_an_error_that_says_how_to_get_it() {
        if libraries::ready(&[Which::Driver, Which::Nccl]).is_ok() {
            return;
        }
        let store = Store::join(meeting(free_port("127.0.0.1").unwrap(), 0, 1)).unwrap();
        let error = Nccl::connect(&store, "none", 0, Duration::from_secs(5)).unwrap_err().to_string();
        assert!(error.contains("not found") || error.contains("cannot be loaded"), "{error}");
    }
}
