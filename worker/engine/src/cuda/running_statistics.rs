//! Layout of the flat buffer of all batch norms' running statistics.

use super::command::{Operand, Region};
use crate::{fuse::Norm, net::Network};

/// Alignment, in values, of each mean and each variance.
const STRIDE: usize = 64;

/// The range of one batch norm.
#[derive(Debug, Clone)]
pub(super) struct RunningLayout {
    pub(super) name: String,
    /// Offset of the mean, in values.
    pub(super) offset: usize,
    pub(super) channels: usize,
    /// Number of values from the mean to the variance.
    pub(super) stride: usize,
    /// Whether a model group splits the channels.
    pub(super) is_split: bool,
}

impl RunningLayout {
    /// The ranges, by index of the batch norm. `norms` are in forward order.
    pub(super) fn for_network<'a>(network: &Network, norms: impl IntoIterator<Item = &'a Norm>) -> Vec<Self> {
        let mut all: Vec<(usize, Self)> = Vec::new();
        let mut offset = 0;
        for Norm { name, norm, input, .. } in norms {
            let channels = network.tensors[*input].channels;
            let stride = channels.next_multiple_of(STRIDE);
            let is_split = network.split_channels(*input).is_some();
            all.push((*norm, Self { name: name.clone(), offset, channels, stride, is_split }));
            offset += 2 * stride;
        }
        all.sort_by_key(|(norm, _)| *norm);
        all.into_iter().map(|(_, layout)| layout).collect()
    }

    /// Number of values in the buffer of `all`.
    pub(super) fn total_len(all: &[Self]) -> usize {
        all.iter().map(|layout| 2 * layout.stride).sum()
    }

    /// Size in bytes of a buffer whose last batch norm ends at byte `end`.
    pub(super) fn padded_bytes(end: usize) -> usize {
        end.next_multiple_of(4 * STRIDE)
    }

    /// The operands of mean and variance.
    pub(super) fn operands(&self) -> [Operand; 2] {
        [self.offset, self.offset + self.stride]
            .map(|offset| Operand::new(Region::RunningStatistics, 4 * offset, 4 * self.channels))
    }
}
