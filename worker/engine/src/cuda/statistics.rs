//! How ranks reduce batch norm's sums, as far as a step's commands depend on it.

use super::{
    command::{Operand, Region},
    ops::Reduce,
};

/// A batch norm's slot in the exchange buffers, for one direction.
#[derive(Debug, Clone, Copy)]
pub(super) struct ExchangeSlot {
    /// Byte offset in each rank's exchange buffer.
    offset: u64,
    /// By value: number of exchanges so far.
    sequence: Operand,
}

#[derive(Debug)]
pub(super) enum Statistics {
    /// Each rank has its own statistics.
    Apart,
    /// Kernels exchange sums through peer memory. By batch norm: the slots of forward and backward.
    Exchanged(Vec<[ExchangeSlot; 2]>),
    /// NCCL reduces sums between kernels.
    ByNccl,
}

impl Statistics {
    /// Exchange through peer memory between `world` ranks, for batch norms with these numbers of channels. Also returns the
    /// sizes in bytes of an exchange buffer and of the sequences.
    pub(super) fn exchanged(channels: &[usize], world: usize) -> (Self, usize, usize) {
        let (mut offset, mut sequence) = (0, 0);
        let mut next = |channels: usize| {
            let bytes = 4 * 2 * channels;
            let slot = ExchangeSlot {
                offset: offset as u64,
                sequence: Operand::new(Region::PeerSequences, sequence, bytes),
            };
            offset += Self::room(channels, world);
            sequence += bytes;
            slot
        };
        let slots = channels.iter().map(|c| [next(*c), next(*c)]).collect();
        (Self::Exchanged(slots), offset, sequence)
    }

    /// Size in bytes of a slot in an exchange buffer.
    fn room(channels: usize, world: usize) -> usize {
        (2 * world * 2 * channels * 8).next_multiple_of(256)
    }

    /// How the sums of batch norm number `norm`, which has `channels`, are reduced.
    pub(super) fn reduction(&self, norm: usize, channels: usize, backward: bool) -> Reduce {
        match self {
            Statistics::Apart => Reduce::Local,
            Statistics::Exchanged(slots) => {
                let ExchangeSlot { offset, sequence } = slots[norm][usize::from(backward)];
                Reduce::Exchange { peers: Operand::whole(Region::PeerTable), at: offset, sequence }
            }
            Statistics::ByNccl => {
                Reduce::Leave { sums: Operand::new(Region::StatisticsSums, 0, 8 * channels) }
            }
        }
    }

    /// Whether kernels wait for other ranks.
    pub(super) fn waits(&self) -> bool {
        matches!(self, Statistics::Exchanged(_))
    }

    /// Whether NCCL reduces statistics between kernels. A communicator must not be used on two streams at once, so gradients are
    /// then also reduced on the main stream.
    pub(super) fn is_ordered(&self) -> bool {
        matches!(self, Statistics::ByNccl)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each direction of each batch norm has a separate range of the exchange buffers and sequences, and no bytes are unused.
    #[test]
    fn meetings_do_not_share_memory() {
        let (channels, world) = ([64, 8, 256], 3);
        let (statistics, bytes, sequences) = Statistics::exchanged(&channels, world);
        let (mut offset, mut counted) = (0, 0);
        for (norm, channels) in channels.into_iter().enumerate() {
            for backward in [false, true] {
                let Reduce::Exchange { at, sequence, .. } = statistics.reduction(norm, channels, backward)
                else {
                    panic!("batch norm {norm} exchanges no sums");
                };
                assert_eq!((at, sequence.offset, sequence.bytes), (offset, counted, 8 * channels));
                // Two slots of each rank's sums and sums of squares, 8 bytes each.
                offset += (2 * world * 2 * channels * 8).next_multiple_of(256) as u64;
                counted += 8 * channels;
            }
        }
        assert_eq!((bytes as u64, sequences), (offset, counted));
    }
}
