//! Device memory that the GPUs of one machine read and write directly, for all-reduces so short that NCCL is slower.
//! Each rank writes its values into the buffers of all ranks, and sums the values in its own buffer.
//!
//! The buffers are plain allocations, shared between processes by CUDA IPC handles. Multicast and managed memory are
//! not used.
#![allow(unsafe_code)] // CUDA's IPC calls; their preconditions are checked before each.

use super::{CommError, Exchange};
use cudarc::driver::{
    CudaContext, DriverError, result,
    sys::{self, CUdeviceptr, CUipcMemHandle},
};
use lockstep_host::{
    boot_id,
    gpu::libraries::{self, Library},
    hostname,
};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Maximum number of ranks that share GPU memory. Kernels take arrays of this length.
pub const MAX_PEERS: usize = 8;
/// CUDA's allocation granularity. A smaller allocation could share a block with other allocations, and an IPC handle
/// opens whole blocks.
const BLOCK_BYTES: usize = 2 << 20;

/// One rank's view of the buffers of all ranks. Buffers are zero at first.
#[derive(Debug)]
pub struct Peers {
    pub rank: u32,
    pub world: u32,
    /// The addresses at which this rank's GPU accesses each rank's buffer, by rank. 0 if a buffer is not open.
    pub addresses: [CUdeviceptr; MAX_PEERS],
    /// The UUID of this rank's GPU.
    gpu: [u8; 16],
    context: Arc<CudaContext>,
}

/// A rank's description of its buffer, sent to the other ranks.
#[derive(Debug, Serialize, Deserialize)]
struct IpcDescriptor {
    /// Boot id and name of the machine or container.
    host: String,
    gpu: [u8; 16],
    /// An IPC handle of 64 bytes, or the reason why the buffer cannot be shared.
    handle: Result<Vec<u8>, String>,
}

impl Peers {
    /// Collective among the ranks of `exchange`: either all ranks get buffers of at least `bytes` bytes, or all get the same reason why
    /// they cannot share memory. `name` must be unique within an attempt. `ordinal` is CUDA's number for this rank's GPU. A rank that must
    /// not share its memory passes the reason in `permission`.
    ///
    /// Dropping the value frees the buffer. Before that, all ranks must have finished their last step with the
    /// buffers (for example, by a barrier).
    ///
    /// # Errors
    /// A rank does not arrive in time, or its connection is lost.
    pub fn connect(
        exchange: Exchange<'_>,
        name: &str,
        ordinal: i32,
        bytes: usize,
        permission: Result<(), String>,
    ) -> Result<Result<Self, String>, CommError> {
        const OPERATION: &str = "sharing GPU memory";
        let (rank, world) = (exchange.rank(), exchange.size());
        if world as usize > MAX_PEERS {
            return Ok(Err(format!("{world} ranks; at most {MAX_PEERS} can share GPU memory")));
        }
        let bytes = bytes.max(1).next_multiple_of(BLOCK_BYTES);
        let mut allocated = permission.and_then(|()| Self::allocate(rank, world, ordinal, bytes));
        let descriptor = IpcDescriptor {
            host: host(),
            gpu: allocated.as_ref().map_or([0; 16], |own| own.gpu),
            handle: allocated.as_ref().map_err(Clone::clone).and_then(Self::handle),
        };
        let message = serde_json::to_vec(&descriptor).unwrap_or_default();
        let messages = exchange.all_gather_bytes(OPERATION, &format!("peers/{name}"), &message)?;
        let opened = match &mut allocated {
            Ok(own) => parse_descriptors(&messages).and_then(|all| own.open(&all)),
            Err(reason) => Err(reason.clone()),
        };
        // If one rank cannot open a buffer, no rank uses them.
        let reason = opened.err().unwrap_or_default();
        let reasons =
            exchange.all_gather_bytes(OPERATION, &format!("peers/{name}/opened"), reason.as_bytes())?;
        Ok(match reasons.iter().position(|reason| !reason.is_empty()) {
            Some(rank) => Err(format!("rank {rank}: {}", String::from_utf8_lossy(&reasons[rank]))),
            None => allocated,
        })
    }

    fn allocate(rank: u32, world: u32, ordinal: i32, bytes: usize) -> Result<Self, String> {
        libraries::check_loadable(&[Library::Driver])?;
        let text = |e: DriverError| format!("GPU {ordinal}: {e}");
        let device = usize::try_from(ordinal).map_err(|_| format!("no GPU {ordinal}"))?;
        let context = CudaContext::new(device).map_err(text)?;
        let gpu = result::device::get_uuid(context.cu_device()).map_err(text)?.bytes.map(|b| b as u8);
        // SAFETY: the context is current on this thread.
        let own_buffer = unsafe { result::malloc_sync(bytes) }.map_err(text)?;
        let mut peers = Self { rank, world, addresses: [0; MAX_PEERS], gpu, context };
        peers.addresses[rank as usize] = own_buffer;
        // SAFETY: the buffer was just allocated, and is zeroed before another process can open it.
        unsafe { result::memset_d8_sync(own_buffer, 0, bytes) }.map_err(text)?;
        peers.context.synchronize().map_err(text)?;
        Ok(peers)
    }

    fn handle(&self) -> Result<Vec<u8>, String> {
        let mut handle = CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: the address is a plain allocation of this process.
        unsafe { sys::cuIpcGetMemHandle(&mut handle, self.addresses[self.rank as usize]) }
            .result()
            .map_err(|e| format!("GPU memory cannot be shared: {e}"))?;
        Ok(handle.reserved.map(|byte| byte as u8).to_vec())
    }

    fn open(&mut self, descriptors: &[IpcDescriptor]) -> Result<(), String> {
        let here = &descriptors[self.rank as usize].host;
        for (other, descriptor) in (0..).zip(descriptors) {
            let bytes = descriptor.handle.as_ref().map_err(|reason| format!("rank {other}: {reason}"))?;
            if other == self.rank {
                continue;
            }
            if descriptor.host != *here {
                return Err(format!("rank {other} is on another machine"));
            }
            self.check_access(other, descriptor.gpu)?;
            let Ok(reserved) = <[u8; 64]>::try_from(bytes.as_slice()) else {
                return Err(format!("rank {other} sent an IPC handle of {} bytes", bytes.len()));
            };
            let handle = CUipcMemHandle { reserved: reserved.map(|byte| byte as _) };
            let flags = sys::CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
            // SAFETY: another live process has just exported the handle; CUDA reports an error if it is invalid.
            unsafe { sys::cuIpcOpenMemHandle_v2(&mut self.addresses[other as usize], handle, flags) }
                .result()
                .map_err(|e| format!("the GPU memory of rank {other} cannot be opened: {e}"))?;
        }
        Ok(())
    }

    /// Fails if this GPU cannot access the memory of `gpu`, the GPU of rank `rank`.
    fn check_access(&self, rank: u32, gpu: [u8; 16]) -> Result<(), String> {
        if gpu == self.gpu {
            return Err(format!("rank {rank} has the same GPU"));
        }
        let text = |e: DriverError| e.to_string();
        for ordinal in 0..result::device::get_count().map_err(text)? {
            let device = result::device::get(ordinal).map_err(text)?;
            if result::device::get_uuid(device).map_err(text)?.bytes.map(|b| b as u8) != gpu {
                continue;
            }
            let mut can_access = 0;
            // SAFETY: the driver returned both devices.
            unsafe { sys::cuDeviceCanAccessPeer(&mut can_access, self.context.cu_device(), device) }
                .result()
                .map_err(text)?;
            return match can_access {
                0 => Err(format!("this GPU cannot access the memory of rank {rank}'s GPU")),
                _ => Ok(()),
            };
        }
        Err(format!("the GPU of rank {rank} is not visible to this process"))
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_err() {
            return;
        }
        // SAFETY: allocated by `allocate` and opened by `open`, and freed only here.
        unsafe {
            for (rank, address) in (0..).zip(self.addresses).filter(|(_, address)| *address != 0) {
                if rank == self.rank {
                    let _ = result::free_sync(address);
                } else {
                    let _ = sys::cuIpcCloseMemHandle(address);
                }
            }
        }
    }
}

fn parse_descriptors(messages: &[Vec<u8>]) -> Result<Vec<IpcDescriptor>, String> {
    messages
        .iter()
        .map(|message| {
            serde_json::from_slice(message).map_err(|e| format!("invalid description of a buffer: {e}"))
        })
        .collect()
}

/// Identifies the machine or container, because containers of one machine do not share IPC handles.
fn host() -> String {
    format!("{} {}", boot_id(), hostname())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::loopback::on_joined_ranks;
    use std::time::Duration;

    /// Also passes on machines with GPUs, because two ranks cannot share memory on the same GPU.
    #[test]
    fn all_ranks_get_the_reason_why_they_cannot_share_memory() {
        let reasons = reasons([Ok(()), Ok(())]);
        assert!(!reasons[0].is_empty());
        assert_eq!(reasons[0], reasons[1]);
    }

    #[test]
    fn one_rank_without_permission_prevents_sharing() {
        let reasons = reasons([Err("it is not wanted".into()), Ok(())]);
        assert_eq!(reasons, ["rank 0: it is not wanted"; 2]);
    }

    fn reasons(permission: [Result<(), String>; 2]) -> Vec<String> {
        on_joined_ranks(2, Duration::ZERO, |store| {
            let permission = permission[store.config().rank as usize].clone();
            let exchange = Exchange::Store(&store, store.config().timeout);
            let peers = Peers::connect(exchange, "test", 0, 4096, permission).unwrap();
            // The store closes when rank 0 drops it.
            store.barrier("done").unwrap();
            peers.unwrap_err()
        })
    }
}
