//! The first and last kernels of a step; `step.cu`.

use super::{Arg, CONTROL, FINISHED_STEPS, Kernel, Operand, Ops, Region, SCALER, kernel, plain};
use crate::cuda::rings;

impl Ops {
    /// Copies the next control block from a ring in page-locked host memory: the n-th fetch takes slot n % [`rings::SLOTS`]. A slot
    /// has `words` `u32` words, a multiple of 4. At the beginning of a training step, also copies `running_bytes` bytes of running
    /// statistics, because the step may never finish. Traffic: 4 bytes per word over PCIe.
    pub(in crate::cuda) fn fetch(&self, words: u32, running_bytes: Option<usize>) -> Kernel {
        let of_copy = |bytes: usize| {
            let [running, kept] = [Region::RunningStatistics, Region::KeptStatistics]
                .map(|region| Operand::new(region, 0, bytes));
            [running, kept, Operand::whole(Region::KeptSteps), FINISHED_STEPS]
        };
        let [running, kept, kept_steps, finished_steps] = running_bytes.map_or([Operand::NONE; 4], of_copy);
        let args = [
            Arg::Out(CONTROL),
            Arg::In(Operand::whole(Region::InputRing)),
            Arg::InOut(Operand::new(Region::InputCounter, 0, 4)),
            Arg::Out(Operand::new(Region::HostInputCounter, 0, 4)),
            Arg::U32(rings::SLOTS as u32),
            Arg::U32(words),
            Arg::In(running),
            Arg::InOut(kept),
            Arg::InOut(kept_steps),
            Arg::In(finished_steps),
            Arg::U32((running.bytes / size_of::<[f32; 4]>()) as u32),
        ];
        let threads = (words / 2).next_multiple_of(32).clamp(32, 1024);
        let blocks = 1 + running_bytes.map_or(0, |_| self.statistics_copy_blocks());
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

    /// The last kernel of a step. Writes the step's result to a ring in page-locked host memory, [`rings::RESULTS`] slots of 64 bytes:
    /// `u32 sequence; f32 loss_sum; u32 correct, samples; f32 grad_norm, loss_scale; u32 finite, 0; u64 stamps[4]`.
    /// `sequence`, the step's number from 1, is written last (release at system scope). A step whose update was refused has no result.
    pub(in crate::cuda) fn record(&self) -> Kernel {
        let args = [
            Arg::Out(Operand::whole(Region::ResultRing)),
            Arg::InOut(FINISHED_STEPS),
            Arg::U32(rings::RESULTS as u32),
            Arg::In(rings::TOTALS),
            Arg::InOut(SCALER),
            Arg::In(Operand::new(Region::Stamps, 0, size_of::<[u64; 4]>())),
        ];
        kernel("record", plain([1, 1, 1], [1, 1, 1]), args)
    }
}
