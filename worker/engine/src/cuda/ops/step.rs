//! The first and last kernels of a step; `step.cu`.

use super::{Arg, CONTROL, Kernel, Operand, Ops, Region, SCALER, kernel, plain};

/// Operands of the copy of the running statistics at the beginning of a step, whose forward pass changes them.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct StatisticsCopy {
    /// Running statistics of all batch norms, padded to whole groups of 4 float32.
    pub(in crate::cuda) running: Operand,
    /// The copy, with the length of `running`.
    pub(in crate::cuda) kept_values: Operand,
    /// For each of the [`Ops::statistics_copy_blocks`], a `u32`: the number of finished steps when the block copied; at first a number that
    /// no step has.
    pub(in crate::cuda) kept_steps: Operand,
    /// Number of finished steps so far: the counter of [`Ops::record`].
    pub(in crate::cuda) finished_steps: Operand,
}

impl Ops {
    /// Copies the next control block from a ring in page-locked host memory: the n-th fetch takes slot n % `slots`. A slot has `words`
    /// `u32` words, a multiple of 4. At the beginning of a training step, also copies the running statistics, because the step may never
    /// finish. Traffic: 4 bytes per word over PCIe.
    pub(in crate::cuda) fn fetch(&self, slots: u32, words: u32, copy: Option<StatisticsCopy>) -> Kernel {
        let none = StatisticsCopy {
            running: Operand::NONE,
            kept_values: Operand::NONE,
            kept_steps: Operand::NONE,
            finished_steps: Operand::NONE,
        };
        let StatisticsCopy { running, kept_values, kept_steps, finished_steps } = copy.unwrap_or(none);
        let args = [
            Arg::Out(CONTROL),
            Arg::In(Operand::whole(Region::InputRing)),
            Arg::InOut(Operand::new(Region::InputCounter, 0, 4)),
            Arg::Out(Operand::new(Region::HostInputCounter, 0, 4)),
            Arg::U32(slots),
            Arg::U32(words),
            Arg::In(running),
            Arg::InOut(kept_values),
            Arg::InOut(kept_steps),
            Arg::In(finished_steps),
            Arg::U32((running.bytes / size_of::<[f32; 4]>()) as u32),
        ];
        let threads = (words / 2).next_multiple_of(32).clamp(32, 1024);
        let blocks = 1 + copy.map_or(0, |_| self.statistics_copy_blocks());
        kernel("fetch", plain([blocks, 1, 1], [threads, 1, 1]), args)
    }

    /// Number of blocks that copy running statistics, in addition to the block that fetches: enough that the copy takes no longer than the
    /// fetch.
    pub(in crate::cuda) fn statistics_copy_blocks(&self) -> u32 {
        (self.multiprocessors / 2).max(1)
    }

    /// Writes the GPU's clock, in nanoseconds, to the `u64` at `at`, and sets `updating` (`u32`, may be absent) to 1.
    pub(in crate::cuda) fn stamp(&self, at: Operand, updating: Operand) -> Kernel {
        kernel("stamp", plain([1, 1, 1], [1, 1, 1]), [Arg::Out(at), Arg::Out(updating)])
    }

    /// The last kernel of a step. Writes the step's result to a ring of `slots` slots in page-locked host memory, 64 bytes per slot:
    /// `u32 sequence; f32 loss_sum; u32 correct, samples; f32 grad_norm, loss_scale; u32 finite, 0; u64 stamps[4]`.
    /// `sequence`, the step's number from 1, is written last (release at system scope). A step whose update was refused has no result.
    /// `totals` are the totals that the kernel of the loss has written.
    pub(in crate::cuda) fn record(&self, slots: u32, totals: Operand) -> Kernel {
        let args = [
            Arg::Out(Operand::whole(Region::ResultRing)),
            Arg::InOut(Operand::new(Region::ResultCounter, 0, 4)),
            Arg::U32(slots),
            Arg::In(totals),
            Arg::InOut(SCALER),
            Arg::In(Operand::new(Region::Stamps, 0, size_of::<[u64; 4]>())),
        ];
        kernel("record", plain([1, 1, 1], [1, 1, 1]), args)
    }
}
