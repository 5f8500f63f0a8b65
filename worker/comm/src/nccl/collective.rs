//! Calls on device memory, in the order of a CUDA stream.

#![allow(unsafe_code)] // NCCL's calls take device pointers and streams; callers guarantee that they are valid.

use super::Nccl;
use crate::{CommError, DataType, Reduction};
use cudarc::{
    driver::sys::CUstream,
    nccl::sys::{self, ncclResult_t},
};

impl Nccl {
    /// Collective: replaces `count` values at `ptr` by their reduction over all ranks, in the order of `stream`.
    /// Returns when NCCL has enqueued the operation or, if `stream` is being captured, has added it to the graph.
    ///
    /// # Errors
    /// The group has failed or was aborted. It is unusable afterwards.
    ///
    /// # Safety
    /// `ptr` points to `count` values of type `dtype` in the memory of this rank's GPU. They stay valid until
    /// `stream` has completed the operation. `stream` belongs to the same GPU.
    pub unsafe fn all_reduce(
        &self,
        ptr: u64,
        count: usize,
        dtype: DataType,
        reduction: Reduction,
        stream: CUstream,
    ) -> Result<(), CommError> {
        // SAFETY: as for this function.
        unsafe { self.all_reduce_many(&[(ptr, count)], dtype, reduction, stream) }
    }

    /// As [`Nccl::all_reduce`], for several ranges at once. NCCL may execute them in one kernel.
    ///
    /// # Errors
    /// As [`Nccl::all_reduce`].
    ///
    /// # Safety
    /// As [`Nccl::all_reduce`], for each range `(ptr, count)`.
    pub(crate) unsafe fn all_reduce_many(
        &self,
        ranges: &[(u64, usize)],
        dtype: DataType,
        reduction: Reduction,
        stream: CUstream,
    ) -> Result<(), CommError> {
        let operation = operation_of(reduction);
        self.call("all_reduce", |comm| {
            // SAFETY: the caller guarantees that the ranges and the stream are valid. `comm` is alive, and only this
            // thread uses it during the call.
            unsafe {
                if let [(ptr, count)] = ranges {
                    let at = *ptr as *mut _;
                    return sys::ncclAllReduce(
                        at,
                        at,
                        *count,
                        nccl_type(dtype),
                        operation,
                        comm,
                        stream.cast(),
                    );
                }
                grouped(ranges, |(ptr, count)| {
                    let at = *ptr as *mut _;
                    sys::ncclAllReduce(at, at, *count, nccl_type(dtype), operation, comm, stream.cast())
                })
            }
        })
    }

    /// Collective: replaces `count` values at `ptr` by the values of rank `root`, in the order of `stream`.
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
        dtype: DataType,
        root: u32,
        stream: CUstream,
    ) -> Result<(), CommError> {
        let at = ptr as *mut _;
        self.call("broadcast", |comm| {
            // SAFETY: as in `all_reduce_many`.
            unsafe {
                sys::ncclBroadcast(at, at, count, nccl_type(dtype), root.cast_signed(), comm, stream.cast())
            }
        })
    }

    /// Collective: gathers the `count` values at `from` of every rank. `to` receives them in rank order.
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
        dtype: DataType,
        stream: CUstream,
    ) -> Result<(), CommError> {
        self.call("all_gather", |comm| {
            // SAFETY: as in `all_reduce_many`.
            unsafe {
                sys::ncclAllGather(
                    from as *const _,
                    to as *mut _,
                    count,
                    nccl_type(dtype),
                    comm,
                    stream.cast(),
                )
            }
        })
    }

    /// Collective: reduces the values at `from` over all ranks. `to` receives this rank's part of the result, `count`
    /// values.
    ///
    /// # Errors
    /// As [`Nccl::all_reduce`].
    ///
    /// # Safety
    /// As [`Nccl::all_reduce`]; `from` has `count` values for each rank, and `to` has room for `count` values.
    pub unsafe fn reduce_scatter(
        &self,
        from: u64,
        to: u64,
        count: usize,
        dtype: DataType,
        reduction: Reduction,
        stream: CUstream,
    ) -> Result<(), CommError> {
        let operation = operation_of(reduction);
        self.call("reduce_scatter", |comm| {
            // SAFETY: as in `all_reduce_many`.
            unsafe {
                sys::ncclReduceScatter(
                    from as *const _,
                    to as *mut _,
                    count,
                    nccl_type(dtype),
                    operation,
                    comm,
                    stream.cast(),
                )
            }
        })
    }

    /// Collective: sends the `r`th part of `from` to rank `r`. `to` receives the parts from all ranks, in rank order.
    /// A part has `count` values.
    ///
    /// # Errors
    /// As [`Nccl::all_reduce`].
    ///
    /// # Safety
    /// As [`Nccl::all_reduce`]; `from` has `count` values for each rank, and `to` has room for as many.
    pub unsafe fn all_to_all(
        &self,
        from: u64,
        to: u64,
        count: usize,
        dtype: DataType,
        stream: CUstream,
    ) -> Result<(), CommError> {
        let part_bytes = (count * dtype.size_bytes()) as u64;
        let peers: Vec<u32> = (0..self.size()).collect();
        // Not `ncclAlltoAll`, which needs NCCL 2.28.
        self.call("all_to_all", |comm| {
            // SAFETY: as in `all_reduce_many`.
            unsafe {
                grouped(&peers, |&peer| {
                    let at = part_bytes * u64::from(peer);
                    let (peer, dtype, stream) = (peer.cast_signed(), nccl_type(dtype), stream.cast());
                    let sent = sys::ncclSend((from + at) as *const _, count, dtype, peer, comm, stream);
                    if is_failure(sent) {
                        return sent;
                    }
                    sys::ncclRecv((to + at) as *mut _, count, dtype, peer, comm, stream)
                })
            }
        })
    }

    /// Sends `sends` to other ranks and receives `receives` from them, in one NCCL group and in the order of `stream`.
    /// Each message is `(rank, address, count)`. Two ranks list the messages between them in the same order.
    ///
    /// # Errors
    /// As [`Nccl::all_reduce`].
    ///
    /// # Safety
    /// As [`Nccl::all_reduce`], for each range.
    pub unsafe fn exchange(
        &self,
        sends: &[(u32, u64, usize)],
        receives: &[(u32, u64, usize)],
        dtype: DataType,
        stream: CUstream,
    ) -> Result<(), CommError> {
        let sends = sends.iter().map(|range| (true, range));
        let all: Vec<_> = sends.chain(receives.iter().map(|range| (false, range))).collect();
        self.call("exchange", |comm| {
            // SAFETY: as in `all_reduce_many`.
            unsafe {
                grouped(&all, |&(is_send, &(peer, at, count))| {
                    let (peer, dtype, stream) = (peer.cast_signed(), nccl_type(dtype), stream.cast());
                    if is_send {
                        sys::ncclSend(at as *const _, count, dtype, peer, comm, stream)
                    } else {
                        sys::ncclRecv(at as *mut _, count, dtype, peer, comm, stream)
                    }
                })
            }
        })
    }

    /// Not collective: sends `count` values at `from` to rank `to`, in the order of `stream`. Rank `to` calls
    /// [`Nccl::recv`], and later work on `stream` waits for that.
    ///
    /// # Errors
    /// As [`Nccl::all_reduce`].
    ///
    /// # Safety
    /// As [`Nccl::all_reduce`].
    pub unsafe fn send(
        &self,
        from: u64,
        count: usize,
        dtype: DataType,
        to: u32,
        stream: CUstream,
    ) -> Result<(), CommError> {
        self.call("send", |comm| {
            // SAFETY: as in `all_reduce_many`.
            unsafe {
                let to = to.cast_signed();
                sys::ncclSend(from as *const _, count, nccl_type(dtype), to, comm, stream.cast())
            }
        })
    }

    /// Not collective: replaces `count` values at `to` by the values that rank `from` sends with [`Nccl::send`].
    ///
    /// # Errors
    /// As [`Nccl::all_reduce`].
    ///
    /// # Safety
    /// As [`Nccl::all_reduce`].
    pub unsafe fn recv(
        &self,
        to: u64,
        count: usize,
        dtype: DataType,
        from: u32,
        stream: CUstream,
    ) -> Result<(), CommError> {
        self.call("recv", |comm| {
            // SAFETY: as in `all_reduce_many`.
            unsafe {
                let from = from.cast_signed();
                sys::ncclRecv(to as *mut _, count, nccl_type(dtype), from, comm, stream.cast())
            }
        })
    }
}

fn nccl_type(of: DataType) -> sys::ncclDataType_t {
    match of {
        DataType::U8 => sys::ncclDataType_t::ncclUint8,
        DataType::F16 => sys::ncclDataType_t::ncclFloat16,
        DataType::Bf16 => sys::ncclDataType_t::ncclBfloat16,
        DataType::F32 => sys::ncclDataType_t::ncclFloat32,
        DataType::F64 => sys::ncclDataType_t::ncclFloat64,
    }
}

fn operation_of(reduction: Reduction) -> sys::ncclRedOp_t {
    match reduction {
        Reduction::Sum => sys::ncclRedOp_t::ncclSum,
        Reduction::Mean => sys::ncclRedOp_t::ncclAvg,
        Reduction::Max => sys::ncclRedOp_t::ncclMax,
    }
}

fn is_failure(status: ncclResult_t) -> bool {
    !matches!(status, ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress)
}

/// Makes one call for each of `items`, as a group that NCCL starts together.
///
/// # Safety
/// As for the calls.
unsafe fn grouped<T>(items: &[T], call: impl Fn(&T) -> ncclResult_t) -> ncclResult_t {
    // SAFETY: the group is started and ended on this thread.
    let begun = unsafe { sys::ncclGroupStart() };
    if begun != ncclResult_t::ncclSuccess {
        return begun;
    }
    let mut worst = ncclResult_t::ncclSuccess;
    for item in items {
        let status = call(item);
        if is_failure(status) {
            worst = status;
        }
    }
    // Also after a failure, because a started group must be ended.
    // SAFETY: as above.
    let ended = unsafe { sys::ncclGroupEnd() };
    if worst == ncclResult_t::ncclSuccess { ended } else { worst }
}
