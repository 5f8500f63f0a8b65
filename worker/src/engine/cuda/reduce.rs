//! What ranks add up on their GPUs: gradients by NCCL, beside backward; batch norm's sums through each
//! other's memory over NVLink where that is possible, else by NCCL, too.

#![allow(unsafe_code)] // NCCL takes addresses; they are ranges of the engine's own buffers.

use super::{
    device::{Buffer, Device, Event, OwnedStream, Pinned, Ptr, Stream},
    error::CudaError,
    kernels::DType,
};
use crate::{
    comm::{
        CommError, DataType, Exchange, ProcessGroup, Reduction,
        nccl::{self, Nccl},
        peers::Peers,
    },
    engine::{EngineError, GpuConfig},
};
use std::sync::Arc;

/// `Peers` of the kernels.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Table {
    rank: u32,
    world: u32,
    data: [u64; 8],
    flags: [u64; 8],
    abort: u64,
}

// SAFETY: integers without a gap between them.
unsafe impl bytemuck::Zeroable for Table {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for Table {}

/// Where one batch norm's sums meet those of the other ranks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Meeting {
    /// The table of all ranks' buffers.
    pub(super) peers: Ptr,
    /// Of this batch norm in each of them.
    pub(super) offset: u64,
    /// Exchanges so far, by value.
    pub(super) sequence: Ptr,
}

/// How batch norm's sums are added.
enum Statistics {
    /// They are not.
    Apart,
    Exchanged {
        _peers: Box<Peers>,
        table: Buffer,
        sequences: Buffer,
        /// By batch norm: forward's and backward's.
        meetings: Vec<[(u64, u64); 2]>,
    },
    ByNccl {
        sums: Buffer,
        /// Why not through memory.
        reason: String,
    },
}

pub(super) struct Reducer {
    nccl: Arc<Nccl>,
    statistics: Statistics,
    /// Not 0: nobody waits for others any more.
    abort: Arc<Pinned>,
    stream: OwnedStream,
    ready: Vec<Event>,
    done: Event,
}

impl Reducer {
    /// Connects the ranks' GPUs. `sync` has the channels of each batch norm if statistics are synchronised.
    pub(super) fn new(
        device: &Device,
        gpu: &GpuConfig,
        comm: &dyn ProcessGroup,
        buckets: usize,
        sync: Option<&[usize]>,
    ) -> Result<Self, EngineError> {
        // Of a group that is not all ranks of the job only its own meet.
        let place = Exchange::of(comm, gpu.store.as_deref());
        let name = |what: &str| format!("{what}/{}", gpu.generation);
        let nccl = Nccl::connect(place, &name("gradients"), gpu.ordinal, comm.timeout())?;
        device.bind()?;
        let abort = Arc::new(Pinned::new(256)?);
        let word = Arc::downgrade(&abort);
        nccl::on_abort(move || {
            if let Some(word) = word.upgrade() {
                word.write(0, &[1u32]);
            }
        });
        let world = comm.size() as usize;
        let statistics = match sync {
            None => Statistics::Apart,
            Some(channels) => {
                let bytes = |channels: usize| (2 * world * 2 * channels * 8).next_multiple_of(256);
                let all = channels.iter().map(|c| 2 * bytes(*c)).sum::<usize>();
                let wanted = std::env::var_os("LOCKSTEP_NO_PEER_MEMORY").is_none();
                let shared = match wanted {
                    true => Peers::connect(place, &name("statistics"), gpu.ordinal, all, 256)?,
                    false => Err("LOCKSTEP_NO_PEER_MEMORY is set".into()),
                };
                device.bind()?;
                match shared {
                    Ok(peers) => {
                        let table = Table {
                            rank: comm.rank(),
                            world: comm.size(),
                            data: peers.data,
                            flags: peers.flags,
                            abort: abort.device,
                        };
                        let (mut offset, mut sequence) = (0u64, 0u64);
                        let mut next = |channels: usize| {
                            let at = (offset, sequence);
                            offset += bytes(channels) as u64;
                            sequence += 4 * 2 * channels as u64;
                            at
                        };
                        let meetings = channels.iter().map(|c| [next(*c), next(*c)]).collect();
                        let table = device.upload(&[table])?;
                        let sequences = device.zeros(sequence as usize)?;
                        Statistics::Exchanged { _peers: Box::new(peers), table, sequences, meetings }
                    }
                    Err(reason) => {
                        let most = channels.iter().max().copied().unwrap_or(1);
                        Statistics::ByNccl { sums: device.zeros(4 * 2 * most)?, reason }
                    }
                }
            }
        };
        // Nobody writes into a buffer that its owner has not cleared yet.
        comm.barrier()?;
        Ok(Self {
            nccl,
            statistics,
            abort,
            stream: OwnedStream::new(true)?,
            ready: (0..=buckets).map(|_| Event::new(false)).collect::<Result<_, _>>()?,
            done: Event::new(false)?,
        })
    }

    /// Where batch norm `norm` meets its like, forward or backward, if through memory.
    pub(super) fn meeting(&self, norm: usize, backward: bool) -> Option<Meeting> {
        match &self.statistics {
            Statistics::Exchanged { table, sequences, meetings, .. } => {
                let (offset, sequence) = meetings[norm][usize::from(backward)];
                Some(Meeting { peers: table.ptr, offset, sequence: sequences.ptr + sequence })
            }
            _ => None,
        }
    }

    /// Where kernels leave sums that [`Reducer::add_statistics`] adds.
    pub(super) fn sums(&self) -> Option<Ptr> {
        match &self.statistics {
            Statistics::ByNccl { sums, .. } => Some(sums.ptr),
            _ => None,
        }
    }

    /// Adds `count` sums over all ranks.
    pub(super) fn add_statistics(&self, main: Stream, count: usize) -> Result<(), CommError> {
        match &self.statistics {
            Statistics::ByNccl { sums, .. } => self.all_reduce(main, sums.ptr, count, DType::F32),
            _ => Ok(()),
        }
    }

    /// Adds a range of gradients over all ranks, once what `producer` was given so far is done.
    pub(super) fn start(
        &self,
        number: usize,
        producer: Stream,
        at: Ptr,
        count: usize,
        dtype: DType,
    ) -> Result<(), EngineError> {
        // One group of ranks must not be used from two streams at once.
        if matches!(self.statistics, Statistics::ByNccl { .. }) {
            return Ok(self.all_reduce(producer, at, count, dtype)?);
        }
        self.ready[number].record(producer)?;
        self.stream.0.wait(&self.ready[number])?;
        Ok(self.all_reduce(self.stream.0, at, count, dtype)?)
    }

    /// Whether [`Reducer::start`] must be called for the main stream alone.
    pub(super) fn is_ordered(&self) -> bool {
        matches!(self.statistics, Statistics::ByNccl { .. })
    }

    /// Has `main` wait for everything that was started.
    pub(super) fn finish(&self, main: Stream) -> Result<(), CudaError> {
        if !self.is_ordered() {
            self.done.record(self.stream.0)?;
            main.wait(&self.done)?;
        }
        Ok(())
    }

    fn all_reduce(&self, stream: Stream, at: Ptr, count: usize, dtype: DType) -> Result<(), CommError> {
        let dtype = match dtype {
            DType::F32 => DataType::F32,
            DType::F16 => DataType::F16,
            DType::Bf16 => DataType::Bf16,
        };
        // SAFETY: a range of a buffer of this engine, which outlives the stream's work.
        unsafe { self.nccl.all_reduce(at, count, dtype, Reduction::Sum, stream.0) }
    }

    /// How gradients and statistics reach other ranks, for the log.
    pub(super) fn exchange(&self) -> String {
        match &self.statistics {
            Statistics::Apart => {
                "gradients go through NCCL; each rank has its own batch norm statistics".into()
            }
            Statistics::Exchanged { .. } => {
                "gradients go through NCCL, batch norm's statistics through the GPUs' memory".into()
            }
            Statistics::ByNccl { reason, .. } => {
                format!(
                    "gradients and batch norm's statistics go through NCCL, which is slower for statistics: {reason}"
                )
            }
        }
    }

    /// Whether the group is still well.
    pub(super) fn health(&self) -> Result<(), CommError> {
        self.nccl.async_error()
    }

    /// Ends all waiting for other ranks on this GPU.
    pub(super) fn abort(&self, reason: &str) {
        self.abort.write(0, &[1u32]);
        self.nccl.abort(reason);
    }
}
