//! All-reduces between GPUs: gradients by NCCL, concurrently with the backward pass; batch norm's sums through peer memory over NVLink if
//! possible, otherwise also by NCCL.

#![allow(unsafe_code)] // NCCL takes addresses; all of them are ranges of the engine's own buffers.

use super::{
    command::{Collective, Group, Region},
    device::{Buffer, Device, OwnedStream, Pinned, Ptr, Stream},
    dtype::DType,
    groups::Groups,
    statistics::Statistics,
};
use crate::{DeviceConfig, EngineError};
use bytemuck::{Pod, Zeroable};
use lockstep_comm::{
    CommError, DataType, Exchange, ProcessGroup, first_differing_rank,
    nccl::Nccl,
    peers::{MAX_PEERS, Peers},
};
use std::{collections::HashMap, sync::Arc};

/// The addresses of all ranks' exchange buffers for kernels: `Peers` in `peers.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Table {
    rank: u32,
    world: u32,
    data: [u64; MAX_PEERS],
    abort: u64,
}

/// The connections between the GPUs of all ranks.
pub(super) struct Reducer {
    /// The communicators of the groups with several ranks. `World` has the ranks of this rank's stage. `Data` exists only if ranks share
    /// the network.
    communicators: Vec<(Group, Arc<Nccl>)>,
    pub(super) statistics: Statistics,
    /// Why statistics go through NCCL, if they do.
    why_nccl: String,
    /// Keeps the memory of all ranks open, if statistics go through peer memory.
    _peers: Option<Peers>,
    /// Memory for batch norm's sums.
    pub(super) buffers: HashMap<Region, Buffer>,
    /// A `u32` that ends all waits of kernels for other ranks if set.
    abort_flag: Pinned,
    /// The stream on which gradients are reduced, concurrently with the backward pass.
    pub(super) stream: OwnedStream,
}

impl Reducer {
    /// Connects the GPUs of the ranks of `comm`, which are all ranks of this rank's stage, and of `groups`. If `splits_operators`, ranks
    /// exchange activations between kernels. `gradients` describes the gradients, and must be equal on all ranks of `comm`.
    /// `synced_channels` has the number of channels of each batch norm; `None` if statistics are not synchronised.
    pub(super) fn new(
        device: &Device,
        gpu: &DeviceConfig,
        comm: &dyn ProcessGroup,
        groups: Option<&Groups>,
        splits_operators: bool,
        gradients: &str,
        synced_channels: Option<&[usize]>,
    ) -> Result<Self, EngineError> {
        // If `comm` is a subgroup of the job's ranks, only its ranks take part in the rendezvous.
        let rendezvous = Exchange::of(comm, gpu.store.as_deref());
        let name = |what: &str| format!("{what}/{}", gpu.generation);
        let connect = |rendezvous: Exchange<'_>, what: &str| {
            Nccl::connect(rendezvous, &name(what), gpu.ordinal, comm.timeout())
        };
        let mut communicators = Vec::new();
        if comm.size() > 1 {
            communicators.push((Group::World, connect(rendezvous, "gradients")?));
        }
        if let Some(Groups { model, height, data, stage }) = groups {
            for (group, ranks, what) in [
                (Group::Model, model, "model"),
                (Group::Height, height, "height"),
                (Group::Stage, stage, "stage"),
                (Group::Data, data, "data"),
            ] {
                // If each rank has the whole network, the data group has the ranks of `World`.
                let is_world = group == Group::Data && model.size() == 1;
                if ranks.size() > 1 && !is_world {
                    communicators.push((group, connect(Exchange::Group(ranks.as_ref()), what)?));
                }
            }
        }
        let has_group = |group: Group| communicators.iter().any(|(other, _)| *other == group);
        let exchanges_between_kernels =
            splits_operators || has_group(Group::Height) || has_group(Group::Stage);
        device.bind()?;
        let abort_flag = Pinned::new(256)?;
        let world = comm.size() as usize;
        let (mut why_nccl, mut opened_peers, mut buffers) = (String::new(), None, HashMap::new());
        let statistics = match synced_channels {
            None if exchanges_between_kernels => Statistics::LocalWithExchanges,
            None => Statistics::Local,
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
                        buffers.insert(Region::PeerTable, device.upload(&[table])?);
                        buffers.insert(Region::PeerSequences, device.zeros(sequence_bytes)?);
                        opened_peers = Some(peers);
                        statistics
                    }
                    Err(reason) => {
                        let max_channels = channels.iter().max().copied().unwrap_or(1);
                        buffers.insert(Region::StatisticsSums, device.zeros(4 * 2 * max_channels)?);
                        why_nccl = reason;
                        Statistics::Nccl
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
        Ok(Self {
            communicators,
            statistics,
            why_nccl,
            _peers: opened_peers,
            buffers,
            abort_flag,
            stream: OwnedStream::with_highest_priority()?,
        })
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
        // SAFETY: ranges of buffers of this engine, which outlive the stream's work. `command::verify` has checked their lengths.
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
        let reductions = match &self.statistics {
            Statistics::Local | Statistics::LocalWithExchanges => {
                "gradients go through NCCL; each rank has its own batch norm statistics"
            }
            Statistics::PeerMemory(_) => {
                "gradients go through NCCL, batch norm's statistics through the GPUs' memory"
            }
            Statistics::Nccl => {
                "gradients and batch norm's statistics go through NCCL, which is slower for statistics: "
            }
        };
        format!("{stages}{rows}{split}{reductions}{}", self.why_nccl)
    }

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
