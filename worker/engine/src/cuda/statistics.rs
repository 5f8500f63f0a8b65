//! How batch norm's sums are reduced over the ranks of a group. A step's commands depend on this.

use super::{
    command::{Operand, Region},
    ops::Reduce,
};

#[derive(Debug, Clone, Copy)]
pub(super) enum NormPass {
    Forward,
    Backward,
}

/// The memory in which ranks exchange the sums of one batch norm.
#[derive(Debug, Clone, Copy)]
pub(super) struct ExchangeSlot {
    /// Byte offset of the sums in each rank's exchange buffer.
    offset: u64,
    /// For each exchanged value, the number of exchanges so far.
    sequence: Operand,
}

#[derive(Debug)]
pub(super) enum Statistics {
    /// Each rank has its own statistics.
    Local,
    /// Each rank has its own statistics, and ranks exchange other values between kernels.
    LocalWithExchanges,
    /// Kernels of a batch norm reduce sums over ranks through peer memory. By batch norm: the slot of the forward pass, then of the
    /// backward pass.
    PeerMemory(Vec<[ExchangeSlot; 2]>),
    /// NCCL reduces sums over ranks, between two kernels of the batch norm.
    Nccl,
}

impl Statistics {
    /// Exchange through the memory of `world` ranks. `channels` has each batch norm's number of channels. Also returns the bytes of an
    /// exchange buffer, and the bytes of the sequences.
    pub(super) fn peer_memory(channels: &[usize], world: usize) -> (Self, usize, usize) {
        let (mut offset, mut sequence) = (0, 0);
        let mut next_slot = |channels: usize| {
            let bytes = 4 * 2 * channels;
            let slot = ExchangeSlot {
                offset: offset as u64,
                sequence: Operand::new(Region::PeerSequences, sequence, bytes),
            };
            // Two alternating copies of each rank's two sums per channel, 8 bytes each (`peers.cu`).
            offset += (2 * world * 2 * channels * 8).next_multiple_of(256);
            sequence += bytes;
            slot
        };
        let slots = channels.iter().map(|c| [next_slot(*c), next_slot(*c)]).collect();
        (Self::PeerMemory(slots), offset, sequence)
    }

    /// How the sums of the batch norm with index `norm` and `channels` channels are reduced.
    pub(super) fn reduction(&self, norm: usize, channels: usize, pass: NormPass) -> Reduce {
        match self {
            Statistics::Local | Statistics::LocalWithExchanges => Reduce::Local,
            Statistics::PeerMemory(slots) => {
                let ExchangeSlot { offset, sequence } = slots[norm][pass as usize];
                Reduce::Exchange { peers: Operand::whole(Region::PeerTable), at: offset, sequence }
            }
            Statistics::Nccl => {
                Reduce::StoreSums { sums: Operand::new(Region::StatisticsSums, 0, 8 * channels) }
            }
        }
    }

    pub(super) fn kernels_wait_for_ranks(&self) -> bool {
        matches!(self, Statistics::PeerMemory(_))
    }

    /// Whether gradients are sent from the main stream, because ranks also use NCCL between the main stream's kernels. Two streams must not
    /// use one group of ranks at the same time, nor two groups that wait for each other's ranks.
    pub(super) fn reduces_gradients_on_main_stream(&self) -> bool {
        matches!(self, Statistics::Nccl | Statistics::LocalWithExchanges)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each direction of each batch norm has a separate part of the exchange buffers and of the sequences. The parts fill them.
    #[test]
    fn exchanges_do_not_share_memory() {
        let (channels, world) = ([64, 8, 256], 3);
        let (statistics, bytes, sequences) = Statistics::peer_memory(&channels, world);
        let (mut offset, mut sequence_offset) = (0, 0);
        for (norm, channels) in channels.into_iter().enumerate() {
            for pass in [NormPass::Forward, NormPass::Backward] {
                let Reduce::Exchange { at, sequence, .. } = statistics.reduction(norm, channels, pass) else {
                    panic!("{norm} has no exchange");
                };
                assert_eq!((at, sequence.offset, sequence.bytes), (offset, sequence_offset, 8 * channels));
                // Two copies of each rank's two sums per channel, 8 bytes each.
                offset += (2 * world * 2 * channels * 8).next_multiple_of(256) as u64;
                sequence_offset += 8 * channels;
            }
        }
        assert_eq!((bytes as u64, sequences), (offset, sequence_offset));
    }
}
