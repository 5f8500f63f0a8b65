//! Softmax cross-entropy whose classes are split over the ranks of a model group; `split_loss.cu`. A row is one of the
//! pictures of the whole group, in the order of ranks, `batch` per rank.

use super::{Arg, Kernel, Operand, Ops, SCALER, TOTALS, kernel, plain};

/// Number of classes of a row that a thread block reads: each of its 256 threads loads 8 classes at a time, 8 times.
const CLASSES_PER_BLOCK: u32 = 256 * 8 * 8;
/// Size in bytes of `ClassPart` in `split_loss.cu`.
const PART_BYTES: usize = 24;
/// Size in bytes of `ClassRecord` in `split_loss.cu`.
const RECORD_BYTES: usize = 48;
/// Size in bytes of `ClassRow` in `split_loss.cu`.
const ROW_BYTES: usize = 32;

/// The logits of one rank's classes for all pictures of the group. The pictures' labels are in the control blocks.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct SplitLogits {
    /// In the activations' format, one `[rows, chunk_classes]` array for each chunk of classes, before the bias is added.
    pub(in crate::cuda) logits: Operand,
    /// float32, for this rank's classes and padding; may be absent.
    pub(in crate::cuda) bias: Operand,
    /// The sampled classes ([`Ops::sample_classes`]); absent if all classes are computed.
    pub(in crate::cuda) sample: Operand,
    /// Positions of the pictures' labels in `sample`.
    pub(in crate::cuda) label_positions: Operand,
    /// Control blocks of all ranks of the group.
    pub(in crate::cuda) controls: Operand,
    /// Number of `u32` words of one control block.
    pub(in crate::cuda) control_words: u32,
    /// Number of pictures of each rank.
    pub(in crate::cuda) batch: u32,
    /// Number of ranks of the group.
    pub(in crate::cuda) ranks: u32,
    /// This rank's index in the group.
    pub(in crate::cuda) rank: u32,
    /// Number of classes of all ranks.
    pub(in crate::cuda) all_classes: u32,
    /// Number of this rank's classes.
    pub(in crate::cuda) classes: u32,
    /// Index of this rank's first class among all classes.
    pub(in crate::cuda) first_class: u32,
    /// Number of classes of a chunk, a multiple of 8.
    pub(in crate::cuda) chunk_classes: u32,
    pub(in crate::cuda) chunk_count: u32,
}

impl SplitLogits {
    pub(super) fn rows(&self) -> u32 {
        self.ranks * self.batch
    }

    /// Number of thread blocks that together read one row's classes in one chunk.
    fn blocks_per_chunk(&self) -> u32 {
        self.chunk_classes.div_ceil(CLASSES_PER_BLOCK).max(1)
    }

    /// Bytes of the partial results of [`Ops::class_records`].
    pub(in crate::cuda) fn part_bytes(&self) -> usize {
        self.rows() as usize * (self.chunk_count * self.blocks_per_chunk()) as usize * PART_BYTES
    }

    /// Bytes of this rank's records.
    pub(in crate::cuda) fn record_bytes(&self) -> usize {
        self.rows() as usize * RECORD_BYTES
    }

    /// Bytes of the `class_rows` that [`Ops::class_loss`] writes.
    pub(in crate::cuda) fn class_row_bytes(&self) -> usize {
        self.rows() as usize * ROW_BYTES
    }
}

impl Ops {
    /// Reduces the logits of this rank's classes to one record per row in `records`: the largest logit and its class, the sum of
    /// exponentials, the sum of logits, and the labels' logits. `parts` is scratch memory of [`SplitLogits::part_bytes`] bytes.
    /// `label_logits` is the result of [`Ops::put_margin`]; may be absent.
    pub(in crate::cuda) fn class_records(
        &self,
        p: SplitLogits,
        parts: Operand,
        records: Operand,
        label_logits: Operand,
    ) -> [Kernel; 2] {
        let (rows, blocks_per_chunk) = (p.rows(), p.blocks_per_chunk());
        let mut args = vec![Arg::In(p.logits), Arg::In(p.bias), Arg::Out(parts)];
        args.extend([p.chunk_classes, blocks_per_chunk, p.classes].map(Arg::U32));
        args.push(Arg::In(p.sample));
        let part_count = p.chunk_count * blocks_per_chunk;
        let class_parts = kernel("class_parts", plain([part_count, rows, 1], [256, 1, 1]), args);
        let mut args = vec![Arg::In(parts), Arg::U32(part_count)];
        args.extend([p.logits, p.bias, p.controls].map(Arg::In));
        args.extend([p.control_words, p.batch, p.chunk_classes, p.classes, p.first_class].map(Arg::U32));
        args.extend([
            Arg::In(p.sample),
            Arg::In(p.label_positions),
            Arg::Out(records),
            Arg::In(label_logits),
        ]);
        [class_parts, kernel("class_records", plain([rows, 1, 1], [32, 1, 1]), args)]
    }

    /// Computes the loss of this rank's pictures, from the `records` that [`Ops::class_records`] has written on all ranks of the group.
    /// Writes `class_rows` (may be absent), from which [`Ops::class_gradient`] computes gradients. With `accumulate`, adds to the totals
    /// instead of replacing them.
    pub(in crate::cuda) fn class_loss(
        &self,
        p: SplitLogits,
        records: Operand,
        class_rows: Operand,
        smoothing: f32,
        accumulate: bool,
    ) -> Kernel {
        let mut args = vec![Arg::In(records), Arg::In(p.controls)];
        args.extend([p.control_words, p.batch, p.ranks, p.rank, p.all_classes].map(Arg::U32));
        args.extend([Arg::F32(smoothing), Arg::In(SCALER), Arg::Out(class_rows)]);
        args.extend([Arg::out(TOTALS, accumulate), Arg::U32(accumulate.into())]);
        kernel("class_loss", plain([1, 1, 1], [256, 1, 1]), args)
    }

    /// Runs after [`Ops::class_loss`]. Replaces the logits by their gradient, and computes the gradient of the bias.
    /// With `accumulate`, the gradient of the bias is added to `dbias`.
    pub(in crate::cuda) fn class_gradient(
        &self,
        p: SplitLogits,
        class_rows: Operand,
        smoothing: f32,
        dbias: Operand,
        accumulate: bool,
    ) -> Kernel {
        let mut args = vec![Arg::InOut(p.logits), Arg::In(p.bias), Arg::In(class_rows)];
        args.extend([p.rows(), p.chunk_classes, p.classes, p.first_class].map(Arg::U32));
        args.push(Arg::F32(smoothing / p.all_classes as f32));
        args.extend([p.sample, p.label_positions].map(Arg::In));
        args.extend([Arg::out(dbias, accumulate), Arg::U32(accumulate.into())]);
        let grid = [p.chunk_classes.div_ceil(256), p.chunk_count, 1];
        kernel("class_gradient", plain(grid, [256, 1, 1]), args)
    }

    /// to = the sum of `count` parts of `length` values each; `length` is a multiple of 8.
    pub(in crate::cuda) fn sum_parts(&self, parts: Operand, to: Operand, length: u64, count: u32) -> Kernel {
        let args = [Arg::In(parts), Arg::Out(to), Arg::U64(length), Arg::U32(count)];
        kernel("sum_parts", self.per_item(length / 8, 8), args)
    }
}
