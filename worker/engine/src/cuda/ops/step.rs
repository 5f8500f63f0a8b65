//! The first and last kernels of a step; `step.cu`.

use super::{Arg, CONTROL, Kernel, Operand, Ops, Region, SCALER, kernel, plain};

/// Operands of the copy of the running statistics, which a step's forward pass changes.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct Keep {
    /// Running statistics of all batch norms, whole groups of 4 float32.
    pub(in crate::cuda) running: Operand,
    /// The copy, with the length of `running`.
    pub(in crate::cuda) kept: Operand,
    /// `u32` for each of [`Ops::keeping_blocks`]: number of finished steps at the time of the copy; initially no valid number.
    pub(in crate::cuda) kept_steps: Operand,
    /// [`Ops::record`]'s counter: number of finished steps so far.
    pub(in crate::cuda) finished: Operand,
}

impl Ops {
    /// Copies the next control block from a ring in page-locked host memory: the n-th fetch takes slot n % `slots`. `words`: `u32` words of
    /// a slot, a multiple of 4. `keeps` is set at the beginning of a training step, because the step may never finish. Traffic: 4 bytes per
    /// word over PCIe.
    pub(in crate::cuda) fn fetch(&self, slots: u32, words: u32, keeps: Option<Keep>) -> Kernel {
        let none = Keep {
            running: Operand::NONE,
            kept: Operand::NONE,
            kept_steps: Operand::NONE,
            finished: Operand::NONE,
        };
        let Keep { running, kept, kept_steps, finished } = keeps.unwrap_or(none);
        let args = [
            Arg::Out(CONTROL),
            Arg::In(Operand::whole(Region::InputRing)),
            Arg::InOut(Operand::new(Region::InputCounter, 0, 4)),
            Arg::Out(Operand::new(Region::HostInputCounter, 0, 4)),
            Arg::U32(slots),
            Arg::U32(words),
            Arg::In(running),
            Arg::InOut(kept),
            Arg::InOut(kept_steps),
            Arg::In(finished),
            Arg::U32((running.bytes / size_of::<[f32; 4]>()) as u32),
        ];
        let threads = (words / 2).next_multiple_of(32).clamp(32, 1024);
        let blocks = 1 + keeps.map_or(0, |_| self.keeping_blocks());
        kernel("fetch", plain([blocks, 1, 1], [threads, 1, 1]), args)
    }

    /// Number of blocks that copy running statistics, in addition to the block that fetches: enough that the copy takes no longer than the
    /// fetch.
    pub(in crate::cuda) fn keeping_blocks(&self) -> u32 {
        (self.multiprocessors / 2).max(1)
    }

    /// Writes the GPU's clock, in nanoseconds, to a `u64`, and sets `updating` (`u32`, may be absent).
    pub(in crate::cuda) fn stamp(&self, at: Operand, updating: Operand) -> Kernel {
        kernel("stamp", plain([1, 1, 1], [1, 1, 1]), [Arg::Out(at), Arg::Out(updating)])
    }

    /// The last kernel of a step. Writes the step's result to a ring of `slots` slots in page-locked host memory, 64 bytes per slot:
    /// `u32 sequence; f32 loss_sum; u32 correct, samples; f32 grad_norm, loss_scale; u32 finite, 0; u64 stamps[4]`.
    /// `sequence`, the step's number from 1, is written last (release at system scope). A step with a refused update has no result.
    /// `totals`: loss and correct predictions, from the kernel of the loss.
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
