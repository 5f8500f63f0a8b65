//! Calls on device memory, in the order of a CUDA stream.

#![allow(unsafe_code)] // NCCL's calls take device pointers and streams, which callers vouch for.

use super::Nccl;
use crate::{CommError, DataType, Reduction};
use cudarc::{
    driver::sys::CUstream,
    nccl::sys::{self, ncclResult_t},
};

impl Nccl {
    /// Collective: replaces `count` values at `ptr` by their reduction over all ranks, in the order of `stream`.
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
        dtype: DataType,
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
    pub(crate) unsafe fn all_reduce_many(
        &self,
        ranges: &[(u64, usize)],
        dtype: DataType,
        reduction: Reduction,
        stream: CUstream,
    ) -> Result<(), CommError> {
        let operation = operation_of(reduction);
        self.call("all_reduce", |comm| {
            // SAFETY: the caller vouches for the ranges and the stream; `comm` is alive and this thread's
            // until the call is made.
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

    /// Collective: replaces `count` values at `ptr` by those of rank `root`, in the order of `stream`.
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

    /// Collective: gathers `count` values at `from` of every rank at `to`, in rank order.
    ///
    /// # Errors
    /// As [`Nccl::all_reduce`].
    ///
    /// # Safety
    /// As [`Nccl::all_reduce`]; `to` is large enough for `count` values of every rank.
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

    /// Collective: reduces `count` values a rank at `from`, and leaves this rank's part of the result at `to`.
    ///
    /// # Errors
    /// As [`Nccl::all_reduce`].
    ///
    /// # Safety
    /// As [`Nccl::all_reduce`]; `from` has `count` values for each rank, `to` is large enough for `count`.
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

    /// Collective: gives part `r` of those at `from`, `count` values each, to rank `r`, and leaves what it gets of each rank
    /// at `to`, in rank order.
    ///
    /// # Errors
    /// As [`Nccl::all_reduce`].
    ///
    /// # Safety
    /// As [`Nccl::all_reduce`]; `from` has `count` values for each rank, `to` is as large.
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
        // `ncclAlltoAll` came with NCCL 2.28.
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

    /// Sends `gives` to other ranks and receives `takes` from them, all at once and in the order of `stream`. Each message is `(rank, address,
    /// count)`. Two ranks list the messages between them in the same order.
    ///
    /// # Errors
    /// As [`Nccl::all_reduce`].
    ///
    /// # Safety
    /// As [`Nccl::all_reduce`], for each range.
    pub unsafe fn exchange(
        &self,
        gives: &[(u32, u64, usize)],
        takes: &[(u32, u64, usize)],
        dtype: DataType,
        stream: CUstream,
    ) -> Result<(), CommError> {
        let gives = gives.iter().map(|range| (true, range));
        let all: Vec<_> = gives.chain(takes.iter().map(|range| (false, range))).collect();
        self.call("exchange", |comm| {
            // SAFETY: as in `all_reduce_many`.
            unsafe {
                grouped(&all, |&(is_given, &(peer, at, count))| {
                    let (peer, dtype, stream) = (peer.cast_signed(), nccl_type(dtype), stream.cast());
                    if is_given {
                        sys::ncclSend(at as *const _, count, dtype, peer, comm, stream)
                    } else {
                        sys::ncclRecv(at as *mut _, count, dtype, peer, comm, stream)
                    }
                })
            }
        })
    }

    /// Gives `count` values at `from` to rank `to`, in the order of `stream`: not collective, but rank `to` calls
    /// [`Nccl::recv`], and work behind this on `stream` waits for that.
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

    /// Replaces `count` values at `to` by what rank `from` sends: see [`Nccl::send`].
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

/// Makes a call for each of `items`, as one group that NCCL starts together.
///
/// # Safety
/// That of the calls.
unsafe fn grouped<T>(items: &[T], call: impl Fn(&T) -> ncclResult_t) -> ncclResult_t {
    // SAFETY: begun and ended on this thread.
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
    // Also after a failure: a group that is begun is ended.
    // SAFETY: as above.
    let ended = unsafe { sys::ncclGroupEnd() };
    if worst == ncclResult_t::ncclSuccess { ended } else { worst }
}
