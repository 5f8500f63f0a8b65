//! Activations of operators that the ranks of a model group split; `channels.cu`.

use super::{Arg, Kernel, Operand, Ops, kernel, plain};

/// Rows of channels that are read or written.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct ChannelRows {
    /// T `[rows, channels]`.
    pub(in crate::cuda) memory: Operand,
    pub(in crate::cuda) channels: usize,
    /// Index of the first value that is read or written.
    pub(in crate::cuda) first: usize,
}

impl Ops {
    /// Copies `channels` channels of each of `rows` rows. All numbers of channels and of values are multiples of 8. `keeps_others` must be
    /// set if other values of `to` were written before and are still needed.
    pub(in crate::cuda) fn copy_channels(
        &self,
        from: ChannelRows,
        to: ChannelRows,
        [rows, channels]: [usize; 2],
        keeps_others: bool,
    ) -> Kernel {
        let mut args = vec![Arg::In(from.memory), Arg::out(to.memory, keeps_others), Arg::U64(rows as u64)];
        args.extend([channels, from.channels, to.channels].map(|channels| Arg::U32(channels as u32 / 8)));
        args.extend([from.first, to.first].map(|value| Arg::U64(value as u64 / 8)));
        kernel("copy_channels", self.per_item((rows * channels / 8) as u64, 8), args)
    }

    /// Zeros the pictures of `y` that are padding. `y` has `batch` pictures from each of `ranks` ranks, with `values` values each.
    /// `controls` has the control blocks of the ranks, of `control_words` `u32`s each.
    pub(in crate::cuda) fn clear_padding(
        &self,
        y: Operand,
        controls: Operand,
        control_words: u32,
        [ranks, batch]: [u32; 2],
        values: usize,
    ) -> Kernel {
        let numbers = [control_words, batch, values as u32 / 8].map(Arg::U32);
        let args = [&[Arg::InOut(y), Arg::In(controls)][..], &numbers].concat();
        kernel("clear_padded_pictures", plain([ranks * batch, 1, 1], [256, 1, 1]), args)
    }

    /// Copies the header of the control block `from` to `to`, with `pictures` real pictures.
    pub(in crate::cuda) fn group_control(&self, from: Operand, to: Operand, pictures: u32) -> Kernel {
        let args = [Arg::In(from), Arg::Out(to), Arg::U32(pictures)];
        kernel("group_control", plain([1, 1, 1], [1, 1, 1]), args)
    }
}
