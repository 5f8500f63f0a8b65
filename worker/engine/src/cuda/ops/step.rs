//! The ends of a step; `step.cu`.

use super::{Arg, Kernel, Operand, Ops, kernel, plain};

/// The next control block from a ring in pinned host memory.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct Fetch {
    /// Device memory, 16-byte aligned.
    pub(in crate::cuda) control: Operand,
    /// The ring as the device sees it, 16-byte aligned; slot n % slots is taken for the n-th fetch.
    pub(in crate::cuda) ring: Operand,
    /// `u32` in device memory: fetches so far.
    pub(in crate::cuda) counter: Operand,
    /// The same number as the host sees it: `u32` in pinned host memory.
    pub(in crate::cuda) taken: Operand,
    pub(in crate::cuda) slots: u32,
    /// Of a slot: 8 + 3 x pictures `u32`, rounded up to a multiple of 4.
    pub(in crate::cuda) words: u32,
    /// Where it begins a step that may turn out not to be finished.
    pub(in crate::cuda) keeps: Option<Keep>,
}

/// What a step's forward pass changes, kept as it was before.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct Keep {
    /// Running statistics of all batch norms, whole groups of 4 float32.
    pub(in crate::cuda) running: Operand,
    /// As long.
    pub(in crate::cuda) kept: Operand,
    /// `u32` for each of [`Ops::keeping_blocks`], none of them a number of steps at first: finished steps that `kept` is of.
    pub(in crate::cuda) kept_of: Operand,
    /// [`Record`]'s counter: steps finished so far.
    pub(in crate::cuda) finished: Operand,
}

/// The step's result to a ring in pinned host memory, 64 bytes a slot:
/// `u32 sequence; f32 loss_sum; u32 correct, samples; f32 grad_norm, loss_scale; u32 finite, 0; u64 stamps[4]`.
/// `sequence`, the step's number from 1, is written last (released to the whole system). A step whose update was refused has none.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct Record {
    pub(in crate::cuda) ring: Operand,
    /// `u32` in device memory, not [`Fetch`]'s: steps so far.
    pub(in crate::cuda) counter: Operand,
    pub(in crate::cuda) slots: u32,
    /// What the loss wrote.
    pub(in crate::cuda) totals: Operand,
    pub(in crate::cuda) scaler: Operand,
    /// `u64 [4]`.
    pub(in crate::cuda) stamps: Operand,
}

impl Ops {
    /// Moves: 4 bytes a word over the bus.
    pub(in crate::cuda) fn fetch(&self, p: Fetch) -> Kernel {
        let none = Keep {
            running: Operand::NONE,
            kept: Operand::NONE,
            kept_of: Operand::NONE,
            finished: Operand::NONE,
        };
        let Keep { running, kept, kept_of, finished } = p.keeps.unwrap_or(none);
        let args = [
            Arg::Out(p.control),
            Arg::In(p.ring),
            Arg::InOut(p.counter),
            Arg::Out(p.taken),
            Arg::U32(p.slots),
            Arg::U32(p.words),
            Arg::In(running),
            Arg::InOut(kept),
            Arg::InOut(kept_of),
            Arg::In(finished),
            Arg::U32((running.bytes / size_of::<[f32; 4]>()) as u32),
        ];
        let threads = (p.words / 2).next_multiple_of(32).clamp(32, 1024);
        let blocks = 1 + p.keeps.map_or(0, |_| self.keeping_blocks());
        kernel("fetch", plain([blocks, 1, 1], [threads, 1, 1]), args)
    }

    /// Blocks that keep running statistics, beside the one that fetches: together they take no longer than it does.
    pub(in crate::cuda) fn keeping_blocks(&self) -> u32 {
        (self.multiprocessors / 2).max(1)
    }

    /// Writes the GPU's clock, nanoseconds, to a `u64`. `updating` (`u32`, may be 0) is set.
    pub(in crate::cuda) fn stamp(&self, at: Operand, updating: Operand) -> Kernel {
        kernel("stamp", plain([1, 1, 1], [1, 1, 1]), [Arg::Out(at), Arg::Out(updating)])
    }

    /// The last kernel of a step.
    pub(in crate::cuda) fn record(&self, p: Record) -> Kernel {
        let args = [
            Arg::Out(p.ring),
            Arg::InOut(p.counter),
            Arg::U32(p.slots),
            Arg::In(p.totals),
            Arg::InOut(p.scaler),
            Arg::In(p.stamps),
        ];
        kernel("record", plain([1, 1, 1], [1, 1, 1]), args)
    }
}
