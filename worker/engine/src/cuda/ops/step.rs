//! The first and last kernels of a step; `step.cu`.

use super::{Arg, Kernel, Operand, Ops, kernel, plain};

/// Copies the next control block from a ring in page-locked host memory.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct Fetch {
    /// Device memory, 16-byte aligned.
    pub(in crate::cuda) control: Operand,
    /// The ring, 16-byte aligned; the n-th fetch takes slot n % slots.
    pub(in crate::cuda) ring: Operand,
    /// `u32` in device memory: number of fetches so far.
    pub(in crate::cuda) counter: Operand,
    /// `u32` in pinned host memory: the same number for the host.
    pub(in crate::cuda) taken: Operand,
    pub(in crate::cuda) slots: u32,
    /// `u32` words of a slot, a multiple of 4.
    pub(in crate::cuda) words: u32,
    /// Set at the beginning of a step that may never be finished.
    pub(in crate::cuda) keeps: Option<Keep>,
}

/// Copies of the values that a step's forward pass changes.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct Keep {
    /// Running statistics of all batch norms, whole groups of 4 float32.
    pub(in crate::cuda) running: Operand,
    /// The copy, with the length of `running`.
    pub(in crate::cuda) kept: Operand,
    /// `u32` for each of [`Ops::keeping_blocks`]: number of finished steps at the time of the copy; initially not a valid number.
    pub(in crate::cuda) kept_of: Operand,
    /// [`Record`]'s counter: number of finished steps so far.
    pub(in crate::cuda) finished: Operand,
}

/// Writes the step's result to a ring in pinned host memory, 64 bytes per slot:
/// `u32 sequence; f32 loss_sum; u32 correct, samples; f32 grad_norm, loss_scale; u32 finite, 0; u64 stamps[4]`.
/// `sequence`, the step's number from 1, is written last (release at system scope). A step with a refused update has no result.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct Record {
    pub(in crate::cuda) ring: Operand,
    /// `u32` in device memory, separate from [`Fetch`]'s counter: number of steps so far.
    pub(in crate::cuda) counter: Operand,
    pub(in crate::cuda) slots: u32,
    /// Totals of the loss kernel.
    pub(in crate::cuda) totals: Operand,
    pub(in crate::cuda) scaler: Operand,
    /// `u64 [4]`.
    pub(in crate::cuda) stamps: Operand,
}

impl Ops {
    /// Traffic: 4 bytes per word over PCIe.
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

    /// Number of blocks that copy running statistics, beside the block that fetches; enough that they take no longer.
    pub(in crate::cuda) fn keeping_blocks(&self) -> u32 {
        (self.multiprocessors / 2).max(1)
    }

    /// Writes the GPU's clock, in nanoseconds, to a `u64`, and sets `updating` (`u32`, may be absent).
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
