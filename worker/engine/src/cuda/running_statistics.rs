//! Layout of the flat buffer of all batch norms' running statistics.

use super::command::{Operand, Region};
use crate::{fuse::Norm, net::Network};
use std::ops::Range;

/// Alignment, in values, of each mean and each variance.
const STRIDE: usize = 64;

/// The range of one batch norm.
#[derive(Debug, Clone)]
pub(super) struct RunningLayout {
    name: String,
    /// Offset of the mean, in values.
    offset: usize,
    channels: usize,
    /// Number of values from the mean to the variance.
    stride: usize,
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

    /// The values of mean and variance in the buffer.
    fn ranges(&self) -> [Range<usize>; 2] {
        [self.offset, self.offset + self.stride].map(|offset| offset..offset + self.channels)
    }

    /// The operands of mean and variance.
    pub(super) fn operands(&self) -> [Operand; 2] {
        self.ranges().map(|range| Operand::new(Region::RunningStatistics, 4 * range.start, 4 * range.len()))
    }

    /// The names of the tensors of mean and variance, and their values in the buffer.
    pub(super) fn tensors(&self) -> impl Iterator<Item = (String, Range<usize>)> {
        let names = ["running_mean", "running_var"].map(|suffix| format!("{}.{suffix}", self.name));
        names.into_iter().zip(self.ranges())
    }
}
