//! All-reduces between GPUs: gradients by NCCL, concurrently with the backward pass; batch norm's sums through peer memory over NVLink if
//! possible, otherwise also by NCCL.

#![allow(unsafe_code)] // NCCL takes addresses; all of them are ranges of the engine's own buffers.

use super::{
    command::{Collective, Group, Region},
    device::{Buffer, Device, Event, OwnedStream, Pinned, Ptr, Stream},
    dtype::DType,
    groups::Groups,
    statistics::Statistics,
};
use crate::{DeviceConfig, EngineError};
use lockstep_comm::{
    CommError, DataType, Exchange, ProcessGroup, first_differing_rank,
    nccl::Nccl,
    peers::{MAX_PEERS, Peers},
};
use std::sync::Arc;

/// The addresses of all ranks' exchange buffers for kernels: `Peers` in `peers.cu`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Table {
    rank: u32,
    world: u32,
    data: [u64; MAX_PEERS],
    abort: u64,
}

// SAFETY: integers without padding.
unsafe impl bytemuck::Zeroable for Table {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for Table {}

/// Memory for batch norm's sums.
enum Memory {
    /// Each rank has its own statistics.
    None,
    Peers {
        _peers: Box<Peers>,
        table: Buffer,
        sequences: Buffer,
    },
    Nccl {
        sums: Buffer,
        /// Why statistics do not use peer memory.
        reason: String,
    },
}

/// The connections between the GPUs of all ranks.
pub(super) struct Reducer {
    /// The communicators of the groups with several ranks. `World` has the ranks of this rank's stage. `Data` exists only if ranks share
    /// the network.
    communicators: Vec<(Group, Arc<Nccl>)>,
    pub(super) statistics: Statistics,
    memory: Memory,
    /// A `u32` that ends all waits of kernels for other ranks if set.
    abort_flag: Pinned,
    /// The stream on which gradients are reduced, concurrently with the backward pass.
    pub(super) stream: OwnedStream,
    /// For each bucket of matrices, and last for all vectors: recorded when the gradients are complete.
    pub(super) ready: Vec<Event>,
    /// Recorded when all reductions are done.
    pub(super) done: Event,
}

impl Reducer {
    /// Connects the GPUs of the ranks of `comm`, which are all ranks of this rank's stage, and of `groups`. If `splits_operators`, ranks
    /// exchange activations between kernels. `buckets` is the number of buckets of gradients. `gradients` describes the gradients, and must
    /// be equal on all ranks of `comm`. `synced_channels` has the number of channels of each batch norm; `None` if statistics are not
    /// synchronised.
    #[allow(clippy::too_many_arguments)] // All inputs of the connections.
    pub(super) fn new(
        device: &Device,
        gpu: &DeviceConfig,
        comm: &dyn ProcessGroup,
        groups: Option<&Groups>,
        splits_operators: bool,
        buckets: usize,
        gradients: &str,
        synced_channels: Option<&[usize]>,
    ) -> Result<Self, EngineError> {
        // If `comm` is a subgroup of the job's ranks, only its ranks take part in the rendezvous.
        let rendezvous = Exchange::of(comm, gpu.store.as_deref());
        let name = |what: &str| format!("{what}/{}", gpu.generation);
        let connect = || Nccl::connect(rendezvous, &name("gradients"), gpu.ordinal, comm.timeout());
        let nccl = (comm.size() > 1).then(connect).transpose()?;
        let connect_group = |group: Option<&Arc<dyn ProcessGroup>>, what: &str| {
            let connect = |group: &Arc<dyn ProcessGroup>| {
                let rendezvous = Exchange::Group(group.as_ref());
                Nccl::connect(rendezvous, &name(what), gpu.ordinal, comm.timeout())
            };
            group.filter(|group| group.size() > 1).map(connect).transpose()
        };
        let model = connect_group(groups.map(|groups| &groups.model), "model")?;
        let height = connect_group(groups.map(|groups| &groups.height), "height")?;
        let stage = connect_group(groups.map(|groups| &groups.stage), "stage")?;
        let exchanges_between_kernels = splits_operators || height.is_some() || stage.is_some();
        // If each rank has the whole network, the data group has all ranks, like `nccl`.
        let data = connect_group(
            groups.filter(|groups| groups.model.size() > 1).map(|groups| &groups.data),
            "data",
        )?;
        device.bind()?;
        let abort_flag = Pinned::new(256)?;
        let world = comm.size() as usize;
        let (statistics, memory) = match synced_channels {
            None if exchanges_between_kernels => (Statistics::LocalWithExchanges, Memory::None),
            None => (Statistics::Local, Memory::None),
            Some(channels) => {
                let (statistics, exchange_bytes, sequence_bytes) = Statistics::peer_memory(channels, world);
                let permission = if exchanges_between_kernels {
                    Err("GPUs that split operators, share rows of pictures or have stages exchange data between kernels anyway".into())
                } else if std::env::var_os("LOCKSTEP_NO_PEER_MEMORY").is_some() {
                    Err("LOCKSTEP_NO_PEER_MEMORY is set".into())
                } else {
                    Ok(())
                };
                let name = name("statistics");
                let peers = Peers::connect(rendezvous, &name, gpu.ordinal, exchange_bytes, permission)?;
                device.bind()?;
                match peers {
                    Ok(peers) => {
                        let table = Table {
                            rank: comm.rank(),
                            world: comm.size(),
                            data: peers.addresses,
                            abort: abort_flag.device,
                        };
                        let table = device.upload(&[table])?;
                        let sequences = device.zeros(sequence_bytes)?;
                        (statistics, Memory::Peers { _peers: Box::new(peers), table, sequences })
                    }
                    Err(reason) => {
                        let max_channels = channels.iter().max().copied().unwrap_or(1);
                        (Statistics::Nccl, Memory::Nccl { sums: device.zeros(4 * 2 * max_channels)?, reason })
                    }
                }
            }
        };
        // This is also a barrier, so no rank writes to another rank's buffer before the owner has cleared the buffer.
        let all_gradients = comm.all_gather_bytes(gradients.as_bytes())?;
        if let Some(rank) = first_differing_rank(&all_gradients) {
            return Err(EngineError::Device(format!(
                "the gradients of rank {rank} have another layout than those of rank 0 and cannot be added to them: the two ranks have \
                 different GPU models or different versions of lockstep. Give the job GPUs of one model, and install the same version \
                 on all machines"
            )));
        }
        let communicators = [
            (Group::World, nccl),
            (Group::Model, model),
            (Group::Data, data),
            (Group::Height, height),
            (Group::Stage, stage),
        ];
        Ok(Self {
            communicators: communicators
                .into_iter()
                .filter_map(|(group, nccl)| Some((group, nccl?)))
                .collect(),
            statistics,
            memory,
            abort_flag,
            stream: OwnedStream::with_highest_priority()?,
            ready: (0..=buckets).map(|_| Event::new()).collect::<Result<_, _>>()?,
            done: Event::new()?,
        })
    }

    /// Address of a region for exchanges between ranks, if it exists.
    pub(super) fn address(&self, region: Region) -> Option<Ptr> {
        match (region, &self.memory) {
            (Region::PeerTable, Memory::Peers { table, .. }) => Some(table.ptr),
            (Region::PeerSequences, Memory::Peers { sequences, .. }) => Some(sequences.ptr),
            (Region::StatisticsSums, Memory::Nccl { sums, .. }) => Some(sums.ptr),
            _ => None,
        }
    }

    /// Starts a collective. `count` is as in `command::Command::Collective`.
    pub(super) fn collective(
        &self,
        stream: Stream,
        (kind, group): (Collective, Group),
        [from, to]: [Ptr; 2],
        count: usize,
        dtype: DataType,
    ) -> Result<(), EngineError> {
        let (nccl, stream) = (self.communicator(group)?, stream.0);
        // SAFETY: ranges of buffers of this engine, which outlive the stream's work. `command::verify` has checked
        // their lengths.
        Ok(unsafe {
            match kind {
                Collective::AllReduce => nccl.all_reduce(to, count, dtype, stream),
                Collective::AllGather => nccl.all_gather(from, to, count, dtype, stream),
                Collective::ReduceScatter => nccl.reduce_scatter(from, to, count, dtype, stream),
            }
        }?)
    }

    /// Sends values to other ranks of a group and receives values from them. A message is a rank, an address and the number of values.
    pub(super) fn send_and_receive(
        &self,
        stream: Stream,
        group: Group,
        [sends, receives]: [&[(u32, Ptr, usize)]; 2],
        dtype: DType,
    ) -> Result<(), EngineError> {
        // SAFETY: as in `collective`.
        Ok(unsafe { self.communicator(group)?.exchange(sends, receives, dtype.into(), stream.0) }?)
    }

    fn communicator(&self, group: Group) -> Result<&Arc<Nccl>, EngineError> {
        let error_text = || format!("this engine has no communicator for a collective{group}");
        let nccl = self.communicators.iter().find(|(other, _)| *other == group).map(|(_, nccl)| nccl);
        nccl.ok_or_else(|| EngineError::Device(error_text()))
    }

    fn has_group(&self, group: Group) -> bool {
        self.communicators.iter().any(|(other, _)| *other == group)
    }

    /// Whether gradients are summed over several ranks.
    pub(super) fn reduces_gradients(&self) -> bool {
        self.has_group(Group::World)
    }

    /// How gradients and statistics are exchanged between ranks, for the log.
    pub(super) fn describe_exchange(&self) -> String {
        let stages =
            if self.has_group(Group::Stage) { "stages exchange activations through NCCL" } else { "" };
        if !self.reduces_gradients() {
            return stages.into();
        }
        let stages = if stages.is_empty() { String::new() } else { format!("{stages}; ") };
        let split = if self.has_group(Group::Model) { "the network is split over ranks; " } else { "" };
        let rows = if self.has_group(Group::Height) { "ranks share the rows of pictures; " } else { "" };
        let reductions = match &self.memory {
            Memory::None => {
                String::from("gradients go through NCCL; each rank has its own batch norm statistics")
            }
            Memory::Peers { .. } => {
                "gradients go through NCCL, batch norm's statistics through the GPUs' memory".into()
            }
            Memory::Nccl { reason, .. } => {
                format!(
                    "gradients and batch norm's statistics go through NCCL, which is slower for statistics: {reason}"
                )
            }
        };
        format!("{stages}{rows}{split}{reductions}")
    }

    /// Checks for asynchronous NCCL errors.
    pub(super) fn check_errors(&self) -> Result<(), CommError> {
        self.communicators.iter().try_for_each(|(_, nccl)| nccl.async_error())
    }

    /// Ends all waits for other ranks on this GPU, in kernels and in NCCL. Values that other ranks receive from this GPU afterwards are
    /// garbage.
    pub(super) fn abort(&self, reason: &str) {
        self.abort_flag.write(0, &[1u32]);
        self.communicators.iter().for_each(|(_, nccl)| nccl.abort(reason));
    }
}
