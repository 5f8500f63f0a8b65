//! Memory that the GPUs of one machine read and write in each other directly, for all-reduces that are
//! too short for NCCL: a rank writes its few numbers into everybody's buffer, raises a flag, and adds up.
//!
//! Plain allocations shared by CUDA IPC handles, between processes; no multicast, no managed memory.
#![allow(unsafe_code)] // CUDA's IPC calls; what they need is checked before each.

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

/// Ranks at most; kernels are compiled for so many.
pub const MAX_PEERS: usize = 8;
/// CUDA hands out memory in blocks of this size: a smaller allocation would share one with others, and
/// an IPC handle opens whole blocks.
const BLOCK: usize = 2 << 20;
/// Data and flags lie on boundaries of this.
const ALIGNMENT: usize = 256;

/// One rank's view of the buffers of all; zero at first.
#[derive(Debug)]
pub struct Peers {
    pub rank: u32,
    pub world: u32,
    /// By rank: device addresses, as this rank's GPU sees them, of `data_bytes` each.
    pub data: [u64; MAX_PEERS],
    /// By rank: of `flag_bytes` each.
    pub flags: [u64; MAX_PEERS],
    own: CUdeviceptr,
    /// The memory of the others.
    opened: Vec<CUdeviceptr>,
    context: Arc<CudaContext>,
}

/// What a rank sends to the others.
#[derive(Debug, Serialize, Deserialize)]
struct IpcDescriptor {
    /// Boot and name of its machine.
    host: String,
    gpu: [u8; 16],
    /// 64 bytes; or why there is none.
    handle: Result<Vec<u8>, String>,
}

impl Peers {
    /// Collective: every rank of `place` calls it, and all get buffers or none does; then with the reason. `name` may be used
    /// once an attempt. A rank that must not share its memory says why in `wanted`.
    ///
    /// Buffers are freed when it is dropped, which must not be before all ranks have done their last
    /// step with them (a barrier between the two).
    ///
    /// # Errors
    /// Ranks do not come.
    pub fn connect(
        place: Exchange<'_>,
        name: &str,
        ordinal: i32,
        data_bytes: usize,
        flag_bytes: usize,
        wanted: Result<(), String>,
    ) -> Result<Result<Self, String>, CommError> {
        const OPERATION: &str = "sharing GPU memory";
        let (rank, world) = (place.rank(), place.size());
        if world as usize > MAX_PEERS {
            return Ok(Err(format!("{world} ranks; up to {MAX_PEERS} share memory")));
        }
        let flags_at = data_bytes.next_multiple_of(ALIGNMENT);
        let bytes = (flags_at + flag_bytes).next_multiple_of(BLOCK);
        let allocated = wanted.and_then(|()| Allocated::new(ordinal, bytes));
        let descriptor = IpcDescriptor {
            host: host(),
            gpu: allocated.as_ref().map_or([0; 16], |a| a.gpu),
            handle: allocated.as_ref().map_err(Clone::clone).and_then(Allocated::handle),
        };
        let said = serde_json::to_vec(&descriptor).unwrap_or_default();
        let said_by_all = place.exchange(OPERATION, &format!("peers/{name}"), &said)?;
        let opened = match (&allocated, understood(&said_by_all)) {
            (Ok(own), Ok(descriptors)) => own.open(rank, &descriptors),
            (Err(reason), _) => Err(reason.clone()),
            (_, Err(reason)) => Err(reason),
        };
        // One that cannot open a buffer keeps all from using them.
        let reason = opened.as_ref().err().cloned().unwrap_or_default();
        let reasons = place.exchange(OPERATION, &format!("peers/{name}/opened"), reason.as_bytes())?;
        let failed = (0..).zip(&reasons).find(|(_, reason)| !reason.is_empty());
        let (Ok(own), Ok(mapped), None) = (allocated, opened, failed) else {
            let reason = failed.map_or_else(
                || "no GPU memory".to_owned(),
                |(rank, reason): (u32, _)| format!("rank {rank}: {}", String::from_utf8_lossy(reason)),
            );
            return Ok(Err(reason));
        };
        let mut peers = Self {
            rank,
            world,
            data: [0; MAX_PEERS],
            flags: [0; MAX_PEERS],
            own: own.release(),
            opened: Vec::new(),
            context: own.context.clone(),
        };
        for (of, address) in mapped.release().into_iter().enumerate() {
            let address = address.unwrap_or(peers.own);
            peers.data[of] = address;
            peers.flags[of] = address + flags_at as u64;
            if address != peers.own {
                peers.opened.push(address);
            }
        }
        Ok(Ok(peers))
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_err() {
            return;
        }
        // SAFETY: opened and allocated by `connect`, and nobody else ends them.
        unsafe {
            for address in &self.opened {
                let _ = sys::cuIpcCloseMemHandle(*address);
            }
            let _ = result::free_sync(self.own);
        }
    }
}

/// This rank's own buffer, freed unless it is released.
struct Allocated {
    context: Arc<CudaContext>,
    gpu: [u8; 16],
    address: std::cell::Cell<CUdeviceptr>,
}

impl Allocated {
    fn new(ordinal: i32, bytes: usize) -> Result<Self, String> {
        libraries::ready(&[Library::Driver])?;
        let text = |e: DriverError| format!("GPU {ordinal}: {e}");
        let number = usize::try_from(ordinal).map_err(|_| format!("no GPU {ordinal}"))?;
        let context = CudaContext::new(number).map_err(text)?;
        let gpu = result::device::get_uuid(context.cu_device()).map_err(text)?.bytes.map(|b| b as u8);
        // SAFETY: the context is current on this thread since it was made; the address is the one just
        // given, and the buffer is zero before anybody else can open it.
        let address = unsafe {
            let address = result::malloc_sync(bytes).map_err(text)?;
            let zeroed = result::memset_d8_sync(address, 0, bytes).and_then(|()| context.synchronize());
            if let Err(error) = zeroed {
                let _ = result::free_sync(address);
                return Err(text(error));
            }
            address
        };
        Ok(Self { context, gpu, address: address.into() })
    }

    fn handle(&self) -> Result<Vec<u8>, String> {
        let mut handle = CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: the address is that of a plain allocation of this process.
        unsafe { sys::cuIpcGetMemHandle(&mut handle, self.address.get()) }
            .result()
            .map_err(|e| format!("its memory cannot be shared: {e}"))?;
        Ok(handle.reserved.iter().map(|byte| *byte as u8).collect())
    }

    /// Opens the others' buffers; its own is `None`.
    fn open(&self, rank: u32, descriptors: &[IpcDescriptor]) -> Result<Mapped, String> {
        let mut mapped = Mapped { addresses: Vec::new() };
        let here = &descriptors[rank as usize].host;
        for (other, descriptor) in (0..).zip(descriptors) {
            let bytes = descriptor.handle.as_ref().map_err(|reason| format!("rank {other}: {reason}"))?;
            if other == rank {
                mapped.addresses.push(None);
                continue;
            }
            if descriptor.host != *here {
                return Err(format!("rank {other} is on another machine"));
            }
            self.reaches(other, descriptor.gpu)?;
            let mut handle = CUipcMemHandle { reserved: [0; 64] };
            if bytes.len() != handle.reserved.len() {
                return Err(format!("rank {other} gave a handle of {} bytes", bytes.len()));
            }
            for (into, byte) in handle.reserved.iter_mut().zip(bytes) {
                *into = *byte as _;
            }
            let mut address: CUdeviceptr = 0;
            let flags = sys::CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
            // SAFETY: the handle is one that its process has just given; it is alive, or CUDA says no.
            unsafe { sys::cuIpcOpenMemHandle_v2(&mut address, handle, flags) }
                .result()
                .map_err(|e| format!("rank {other}'s memory cannot be opened: {e}"))?;
            mapped.addresses.push(Some(address));
        }
        Ok(mapped)
    }

    /// Whether this GPU may access the memory of another one.
    fn reaches(&self, rank: u32, gpu: [u8; 16]) -> Result<(), String> {
        if gpu == self.gpu {
            return Err(format!("rank {rank} has the same GPU"));
        }
        let text = |e: DriverError| e.to_string();
        for ordinal in 0..result::device::get_count().map_err(text)? {
            let device = result::device::get(ordinal).map_err(text)?;
            if result::device::get_uuid(device).map_err(text)?.bytes.map(|b| b as u8) != gpu {
                continue;
            }
            let mut can = 0;
            // SAFETY: both devices are ones that the driver gave.
            unsafe { sys::cuDeviceCanAccessPeer(&mut can, self.context.cu_device(), device) }
                .result()
                .map_err(text)?;
            return match can {
                0 => Err(format!("its GPU does not reach that of rank {rank}")),
                _ => Ok(()),
            };
        }
        Err(format!("the GPU of rank {rank} is not visible to it"))
    }

    fn release(&self) -> CUdeviceptr {
        self.address.replace(0)
    }
}

impl Drop for Allocated {
    fn drop(&mut self) {
        if self.address.get() != 0 && self.context.bind_to_thread().is_ok() {
            // SAFETY: allocated by `new`, not released.
            let _ = unsafe { result::free_sync(self.address.get()) };
        }
    }
}

/// Opened buffers by rank, closed unless they are released.
struct Mapped {
    addresses: Vec<Option<CUdeviceptr>>,
}

impl Mapped {
    fn release(mut self) -> Vec<Option<CUdeviceptr>> {
        std::mem::take(&mut self.addresses)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        for address in self.addresses.iter().flatten() {
            // SAFETY: opened by `open`, not released; the context is current on this thread.
            let _ = unsafe { sys::cuIpcCloseMemHandle(*address) };
        }
    }
}

fn understood(said_by_all: &[Vec<u8>]) -> Result<Vec<IpcDescriptor>, String> {
    said_by_all
        .iter()
        .map(|said| serde_json::from_slice(said).map_err(|e| format!("a descriptor of memory: {e}")))
        .collect()
}

/// Tells machines apart, also two containers' of one machine, which share no memory handles.
fn host() -> String {
    format!("{} {}", boot_id(), hostname())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::{
        Store,
        loopback::{rendezvous_config, unused_port},
    };

    /// Where a machine has GPUs two ranks on one of them must not share memory either.
    #[test]
    fn ranks_that_cannot_share_all_learn_why() {
        let reasons = reasons([Ok(()), Ok(())]);
        assert!(!reasons[0].is_empty());
        assert_eq!(reasons[0], reasons[1]);
    }

    #[test]
    fn a_rank_that_must_not_share_keeps_all_from_it() {
        let reasons = reasons([Err("it is not wanted".into()), Ok(())]);
        assert_eq!(reasons, ["rank 0: it is not wanted"; 2]);
    }

    fn reasons(wanted: [Result<(), String>; 2]) -> Vec<String> {
        let port = unused_port();
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..)
                .zip(wanted)
                .map(|(rank, wanted)| {
                    scope.spawn(move || {
                        let store = Store::join(rendezvous_config(port, rank, 2)).unwrap();
                        let place = Exchange::Store(&store, store.config().timeout);
                        let peers = Peers::connect(place, "test", 0, 4096, 64, wanted).unwrap();
                        // The store goes with rank 0's.
                        store.barrier("done").unwrap();
                        peers.unwrap_err()
                    })
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }
}
