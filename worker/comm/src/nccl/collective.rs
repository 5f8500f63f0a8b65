//! Calls that operate on device memory and are enqueued on a CUDA stream.

#![allow(unsafe_code)] // NCCL's calls take device pointers and streams; callers guarantee that they are valid.

use super::Nccl;
use crate::{CommError, DataType};
use cudarc::{
    driver::sys::CUstream,
    nccl::sys::{self, ncclResult_t},
};
use std::ffi::c_void;

const SUM: sys::ncclRedOp_t = sys::ncclRedOp_t::ncclSum;

/// All methods fail if the group has failed or was aborted. It is unusable afterwards.
#[allow(clippy::missing_errors_doc)] // The errors of all methods are above.
impl Nccl {
    /// Collective: enqueues on `stream` an operation that replaces the `count` values at `ptr` by their sums over all
    /// ranks. Returns when NCCL has enqueued it or, if `stream` is being captured, has added it to the graph.
    ///
    /// # Safety
    /// `ptr` points to `count` values of type `dtype` in the memory of this rank's GPU. They stay valid until
    /// `stream` has completed the operation. `stream` belongs to the same GPU.
    pub unsafe fn all_reduce(
        &self,
        ptr: u64,
        count: usize,
        dtype: DataType,
        stream: CUstream,
    ) -> Result<(), CommError> {
        self.call("all_reduce", |comm| {
            let (at, stream) = (ptr as *mut c_void, stream.cast());
            // SAFETY: the caller guarantees that the range and the stream are valid. `comm` is alive, and only this
            // thread uses it during the call.
            unsafe { sys::ncclAllReduce(at, at, count, nccl_type(dtype), SUM, comm, stream) }
        })
    }

    /// Collective: gathers the `count` values at `from` of every rank. `to` receives them in rank order.
    ///
    /// # Safety
    /// As [`Nccl::all_reduce`]. `to` has room for `count` values of every rank.
    pub unsafe fn all_gather(
        &self,
        from: u64,
        to: u64,
        count: usize,
        dtype: DataType,
        stream: CUstream,
    ) -> Result<(), CommError> {
        let dtype = nccl_type(dtype);
        self.call("all_gather", |comm| {
            // SAFETY: as in `all_reduce`.
            unsafe { sys::ncclAllGather(from as *const _, to as *mut _, count, dtype, comm, stream.cast()) }
        })
    }

    /// Collective: sums the values at `from` over all ranks. `to` receives this rank's part of the sum, `count` values.
    ///
    /// # Safety
    /// As [`Nccl::all_reduce`]. `from` has `count` values for each rank, and `to` has room for `count` values.
    pub unsafe fn reduce_scatter(
        &self,
        from: u64,
        to: u64,
        count: usize,
        dtype: DataType,
        stream: CUstream,
    ) -> Result<(), CommError> {
        let dtype = nccl_type(dtype);
        self.call("reduce_scatter", |comm| {
            let (from, to, stream) = (from as *const _, to as *mut _, stream.cast());
            // SAFETY: as in `all_reduce`.
            unsafe { sys::ncclReduceScatter(from, to, count, dtype, SUM, comm, stream) }
        })
    }

    /// Enqueues on `stream` one NCCL group that sends the messages `sends` to other ranks and receives the messages
    /// `receives` from other ranks. A message is `(rank, address, number of values)`. If rank `a` sends several messages
    /// to rank `b`, `b` must list them in the same order.
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
        let dtype = nccl_type(dtype);
        self.call("exchange", |comm| {
            // SAFETY: as in `all_reduce`. The group is started and ended on this thread.
            unsafe {
                let begun = sys::ncclGroupStart();
                if begun != ncclResult_t::ncclSuccess {
                    return begun;
                }
                let sent = sends.iter().map(|&(peer, at, count)| {
                    sys::ncclSend(at as *const _, count, dtype, peer.cast_signed(), comm, stream.cast())
                });
                let received = receives.iter().map(|&(peer, at, count)| {
                    sys::ncclRecv(at as *mut _, count, dtype, peer.cast_signed(), comm, stream.cast())
                });
                let failed = sent.chain(received).fold(None, |failed, status| match status {
                    ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress => failed,
                    status => Some(status),
                });
                // Also after a failure, because a started group must be ended.
                let ended = sys::ncclGroupEnd();
                failed.unwrap_or(ended)
            }
        })
    }
}

fn nccl_type(dtype: DataType) -> sys::ncclDataType_t {
    match dtype {
        DataType::U8 => sys::ncclDataType_t::ncclUint8,
        DataType::F16 => sys::ncclDataType_t::ncclFloat16,
        DataType::Bf16 => sys::ncclDataType_t::ncclBfloat16,
        DataType::F32 => sys::ncclDataType_t::ncclFloat32,
        DataType::F64 => sys::ncclDataType_t::ncclFloat64,
    }
}
