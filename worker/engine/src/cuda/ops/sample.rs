//! The classes of a split head that a step samples, and their rows of parameters; `sample.cu`.

use super::{Arg, Kernel, Operand, Ops, SCALER, kernel, plain};

/// Bytes before a sample's classes.
const HEADER: usize = 16;
/// Threads of a block that draws classes.
const THREADS: u32 = 1024;

/// Samples classes of a split head.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct SampleClasses {
    /// This field and the following fields up to `first_class` are those of [`super::SplitLogits`].
    pub(in crate::cuda) controls: Operand,
    pub(in crate::cuda) control_words: u32,
    pub(in crate::cuda) batch: u32,
    pub(in crate::cuda) ranks: u32,
    pub(in crate::cuda) classes: u32,
    pub(in crate::cuda) first_class: u32,
    /// Number of this rank's classes that are drawn at random.
    pub(in crate::cuda) drawn_count: u32,
    pub(in crate::cuda) seed: u64,
    /// The sample, [`SampleClasses::bytes`] long.
    pub(in crate::cuda) sample: Operand,
    /// Two `u32` for each picture of the group: positions of the picture's labels in the sample.
    pub(in crate::cuda) label_positions: Operand,
    /// Four `u32` for each picture of the group: scratch memory of the kernel.
    pub(in crate::cuda) scratch: Operand,
}

impl SampleClasses {
    /// Bytes of a sample of at most `capacity` classes.
    pub(in crate::cuda) fn bytes(capacity: usize) -> usize {
        HEADER + 4 * capacity
    }
}

/// All rows of a parameter, and memory for the rows of a sample.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct ParameterRows {
    pub(in crate::cuda) all: Operand,
    pub(in crate::cuda) sampled: Operand,
    /// Bytes of a row: 4, or a multiple of 16.
    pub(in crate::cuda) row_bytes: usize,
    /// Maximum number of rows of the sample.
    pub(in crate::cuda) capacity: usize,
}

impl ParameterRows {
    /// Whether the kernels copy elements of 16 bytes, otherwise of 4.
    fn is_wide(&self) -> bool {
        self.row_bytes.is_multiple_of(16)
    }

    /// Number of elements of a row.
    fn width(&self) -> u32 {
        (self.row_bytes / if self.is_wide() { 16 } else { 4 }) as u32
    }

    /// Number of elements of the largest sample.
    fn length(&self) -> u64 {
        u64::from(self.width()) * self.capacity as u64
    }
}

impl Ops {
    pub(in crate::cuda) fn sample_classes(&self, p: SampleClasses) -> Kernel {
        let mut args = vec![Arg::In(p.controls)];
        let numbers = [p.control_words, p.batch, p.ranks, p.first_class, p.classes, p.drawn_count];
        args.extend(numbers.map(Arg::U32));
        // The number of updates, in `SCALER`, determines the random classes.
        args.extend([Arg::U64(p.seed), Arg::In(SCALER)]);
        args.extend([p.sample, p.label_positions, p.scratch].map(Arg::Out));
        let blocks = 1 + p.drawn_count.div_ceil(THREADS).clamp(1, self.multiprocessors);
        kernel("sample_classes", plain([blocks, 1, 1], [THREADS, 1, 1]), args)
    }

    /// Gathers the rows of a sample, followed by zeros.
    pub(in crate::cuda) fn gather_rows(&self, rows: ParameterRows, sample: Operand) -> Kernel {
        let (width, length) = (rows.width(), rows.length());
        let args =
            [Arg::In(rows.all), Arg::Out(rows.sampled), Arg::In(sample), Arg::U32(width), Arg::U64(length)];
        kernel(if rows.is_wide() { "gather_rows" } else { "gather_values" }, self.per_item(length, 8), args)
    }

    /// Writes the rows of a sample back to the parameter.
    pub(in crate::cuda) fn scatter_rows(&self, rows: ParameterRows, sample: Operand) -> Kernel {
        let args = [Arg::InOut(rows.all), Arg::In(rows.sampled), Arg::In(sample), Arg::U32(rows.width())];
        let name = if rows.is_wide() { "scatter_rows" } else { "scatter_values" };
        kernel(name, self.per_item(rows.length(), 8), args)
    }
}
