//! Activations of operators that the ranks of a model group split; `channels.cu`.

use super::{Arg, Kernel, Operand, Ops, kernel, plain};

/// Copies a range of the channels of each row. All numbers of channels and of values are multiples of 8.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct CopyChannels {
    /// T `[rows, from_channels]`, and the number of the first value that is copied.
    pub(in crate::cuda) from: Operand,
    pub(in crate::cuda) from_channels: usize,
    pub(in crate::cuda) first: usize,
    /// T `[rows, to_channels]`, and the number of the value that the first one becomes.
    pub(in crate::cuda) to: Operand,
    pub(in crate::cuda) to_channels: usize,
    pub(in crate::cuda) at: usize,
    pub(in crate::cuda) rows: usize,
    pub(in crate::cuda) channels: usize,
    /// Whether other values of `to` were written before.
    pub(in crate::cuda) adds: bool,
}

impl Ops {
    /// Traffic: the copied values twice.
    pub(in crate::cuda) fn copy_channels(&self, p: CopyChannels) -> Kernel {
        let mut args = vec![Arg::In(p.from), Arg::out(p.to, p.adds), Arg::U64(p.rows as u64)];
        args.extend(
            [p.channels, p.from_channels, p.to_channels].map(|channels| Arg::U32(channels as u32 / 8)),
        );
        args.extend([p.first, p.at].map(|value| Arg::U64(value as u64 / 8)));
        kernel("copy_channels", self.items((p.rows * p.channels / 8) as u64, 8), args)
    }

    /// Zeros the pictures of `y` that are padding: of `values` values each, `batch` of each of `ranks` ranks. `controls` has the control
    /// blocks of the ranks, of `words` `u32`s each.
    pub(in crate::cuda) fn clear_padding(
        &self,
        y: Operand,
        controls: Operand,
        words: u32,
        [ranks, batch]: [u32; 2],
        values: usize,
    ) -> Kernel {
        let numbers = [words, batch, values as u32 / 8].map(Arg::U32);
        let args = [&[Arg::InOut(y), Arg::In(controls)][..], &numbers].concat();
        kernel("clear_padded_pictures", plain([ranks * batch, 1, 1], [256, 1, 1]), args)
    }

    /// Copies the header of the control block `own` to `to`, with `pictures` real pictures.
    pub(in crate::cuda) fn group_control(&self, own: Operand, to: Operand, pictures: u32) -> Kernel {
        let args = [Arg::In(own), Arg::Out(to), Arg::U32(pictures)];
        kernel("group_control", plain([1, 1, 1], [1, 1, 1]), args)
    }
}
