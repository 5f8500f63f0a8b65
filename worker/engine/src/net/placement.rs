//! Placements of activations when several ranks share one copy of a network. Terms as in PyTorch's DTensor.

use std::ops::Range;

/// Index of an activation in [`Network::tensors`](super::Network::tensors).
pub type TensorId = usize;

/// Placement of an activation on the ranks of a model group, which share one copy of the network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Placement {
    /// Each rank has its own pictures, as in data parallelism: `Shard` of the batch.
    Batch,
    /// Every rank has all pictures of the group: `Replicate`. The gradient is the sum of the ranks' partial gradients.
    Whole,
    /// Each rank has all pictures of the group, and a range of the channels: `Shard` of the channels. Rank `r` has the channels
    /// from `bounds[r]` to `bounds[r + 1]`.
    Channels(Vec<usize>),
    /// Each rank has a partial sum for all pictures of the group: `Partial`. The sum over the ranks is the activation. Every
    /// rank has the whole gradient.
    Partial,
}

impl Placement {
    /// Placement of the gradient of an activation with this placement.
    pub(crate) fn of_gradient(&self) -> Self {
        match self {
            Self::Whole => Self::Partial,
            Self::Partial => Self::Whole,
            other => other.clone(),
        }
    }
}

/// Axes of the mesh over which a sum over all pictures is reduced. The axis `data` is always one of them and is not listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Axes {
    /// The ranks that share one copy of the network.
    pub model: bool,
    /// The ranks that share the rows of each picture.
    pub height: bool,
}

/// The rows of an activation that each rank of a height group has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rows {
    /// Number of rows of the whole activation.
    pub whole: usize,
    /// By rank: the range of the rank's rows. A range of rows that windows reach may start above the picture, at a negative row,
    /// and end below the picture.
    pub of_rank: Vec<Range<isize>>,
}

impl Rows {
    /// `whole` rows divided over `ranks` ranks.
    pub fn shared(whole: usize, ranks: usize) -> Self {
        let bounds = bounds(whole, 1, ranks);
        Self { whole, of_rank: bounds.windows(2).map(|b| b[0] as isize..b[1] as isize).collect() }
    }

    /// The rows of this activation that each rank needs to compute its rows of `output`, with square windows of `kernel` pixels
    /// that are `stride` pixels apart.
    #[must_use]
    pub fn reached(&self, output: &Self, kernel: usize, stride: usize, padding: usize) -> Self {
        let [kernel, stride, padding] = [kernel, stride, padding].map(|n| n as isize);
        let reached = |rows: &Range<isize>| {
            if rows.is_empty() {
                rows.start * stride..rows.start * stride
            } else {
                rows.start * stride - padding..(rows.end - 1) * stride - padding + kernel
            }
        };
        Self { whole: self.whole, of_rank: output.of_rank.iter().map(reached).collect() }
    }

    /// The rows of rank `from` that are among the `reached` rows of rank `to`.
    pub fn rows_to_send(&self, from: usize, reached: &Self, to: usize) -> Range<isize> {
        let (own, needed) = (&self.of_rank[from], &reached.of_rank[to]);
        let start = own.start.max(needed.start);
        start..own.end.min(needed.end).max(start)
    }
}

/// Bounds of `parts` ranges that divide `count`. The length of each range is a multiple of `unit`. The first ranges are longer if
/// `count` does not divide evenly.
pub fn bounds(count: usize, unit: usize, parts: usize) -> Vec<usize> {
    let units = count / unit;
    (0..=parts).map(|part| (units / parts * part + part.min(units % parts)) * unit).collect()
}

/// One rank's part of a network that several ranks share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkPart {
    /// This process's rank in its model group.
    pub rank: usize,
    /// By tensor.
    pub placements: Vec<Placement>,
    /// This process's rank in its height group.
    pub height_rank: usize,
    /// By tensor. `None` if this rank has all rows.
    pub rows: Vec<Option<Rows>>,
    /// Index of this rank's stage. The rank has no operation and no parameter of other stages.
    pub stage: usize,
    pub stages: usize,
}

impl NetworkPart {
    /// For a tensor with split channels: this rank's channels, and the number of channels of the whole tensor.
    pub fn channels(&self, tensor: TensorId) -> Option<(Range<usize>, usize)> {
        let Placement::Channels(bounds) = &self.placements[tensor] else { return None };
        Some((bounds[self.rank]..bounds[self.rank + 1], *bounds.last()?))
    }

    /// For a tensor with shared rows: this rank's number of rows.
    pub fn height(&self, tensor: TensorId) -> Option<usize> {
        let rows = &self.rows[tensor].as_ref()?.of_rank[self.height_rank];
        Some((rows.end - rows.start) as usize)
    }
}

/// A rank's part of a split parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slice {
    /// The dimension along which ranks split the parameter.
    pub dimension: usize,
    /// This rank's indices in the dimension.
    pub range: Range<usize>,
    /// Shape of the whole parameter.
    pub whole: Vec<usize>,
}

impl Slice {
    /// Divides the range `own` of this part's values into runs that are contiguous in the whole parameter. Calls `visit` with each
    /// run's range in the part, and with the index of the run's first value in the whole parameter.
    fn for_each_run(&self, own: Range<usize>, mut visit: impl FnMut(Range<usize>, usize)) {
        let inner: usize = self.whole[self.dimension + 1..].iter().product();
        let run_len = self.range.len() * inner;
        let mut index = own.start;
        while index < own.end {
            let (block, within) = (index / run_len, index % run_len);
            let end = own.end.min(index + run_len - within);
            visit(index..end, (block * self.whole[self.dimension] + self.range.start) * inner + within);
            index = end;
        }
    }

    /// Fills `values` with the part's values from index `from` on. `read` gets an index in the whole parameter and a slice, and
    /// must fill the slice with the whole parameter's values from that index on.
    pub fn read(&self, from: usize, values: &mut [f32], mut read: impl FnMut(usize, &mut [f32])) {
        self.for_each_run(from..from + values.len(), |own, whole| {
            read(whole, &mut values[own.start - from..own.end - from]);
        });
    }

    /// Copies `values`, the part's values from index `from` on, to their places in the `whole` parameter.
    pub fn write(&self, from: usize, values: &[f32], whole: &mut [f32]) {
        self.for_each_run(from..from + values.len(), |own, start| {
            whole[start..start + own.len()].copy_from_slice(&values[own.start - from..own.end - from]);
        });
    }

    /// A part with all values of a parameter.
    pub(crate) fn all(shape: &[usize]) -> Self {
        Self { dimension: 0, range: 0..shape[0], whole: shape.to_vec() }
    }

    pub(crate) fn is_all(&self) -> bool {
        self.range.len() == self.whole[self.dimension]
    }

    pub(crate) fn shape(&self) -> Vec<usize> {
        let mut shape = self.whole.clone();
        shape[self.dimension] = self.range.len();
        shape
    }

    pub(crate) fn len(&self) -> usize {
        self.shape().iter().product()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_ranks_have_longer_ranges_if_the_count_does_not_divide_evenly() {
        assert_eq!(bounds(10, 1, 4), [0, 3, 6, 8, 10]);
        assert_eq!(bounds(12, 4, 2), [0, 8, 12]);
        assert_eq!(bounds(8, 1, 2), [0, 4, 8]);
    }

    #[test]
    fn windows_reach_beyond_the_rows_of_their_rank() {
        let rows = Rows::shared(7, 2);
        assert_eq!(rows.of_rank, [0..4, 4..7]);
        assert_eq!(rows.reached(&Rows::shared(7, 2), 3, 1, 1).of_rank, [-1..5, 3..8]);
        assert_eq!(rows.reached(&Rows::shared(4, 2), 7, 2, 3).of_rank, [-3..6, 1..10]);
        assert_eq!(rows.reached(&Rows::shared(1, 2), 1, 8, 0).of_rank, [0..1, 8..8]);
        assert_eq!(rows.reached(&rows, 1, 1, 0), rows);
    }

    /// Every row that a window reaches comes from exactly one rank, or is outside the picture.
    #[test]
    fn each_row_that_a_window_reaches_comes_from_one_rank() {
        for (whole, ranks, kernel, stride, padding) in
            [(7, 2, 3, 1, 1), (8, 4, 7, 2, 3), (5, 3, 1, 2, 0), (4, 4, 5, 1, 2)]
        {
            let rows = Rows::shared(whole, ranks);
            let output = Rows::shared((whole + 2 * padding - kernel) / stride + 1, ranks);
            let reached = rows.reached(&output, kernel, stride, padding);
            for to in 0..ranks {
                let received: Vec<isize> =
                    (0..ranks).flat_map(|from| rows.rows_to_send(from, &reached, to)).collect();
                let inside = reached.of_rank[to].clone().filter(|row| (0..whole as isize).contains(row));
                assert_eq!(received, inside.collect::<Vec<_>>(), "{whole} rows, rank {to}");
            }
        }
    }

    #[test]
    fn parts_are_read_from_the_parameter_and_written_to_it() {
        for (whole, dimension, bounds) in
            [(vec![5, 3], 0, [0, 3, 5]), (vec![2, 5, 3], 1, [0, 1, 5]), (vec![4], 0, [0, 4, 4])]
        {
            let values: Vec<f32> = (0..whole.iter().product::<usize>()).map(|n| n as f32 + 1.0).collect();
            let mut written = vec![0.0; values.len()];
            for part in 0..2 {
                let slice = Slice { dimension, range: bounds[part]..bounds[part + 1], whole: whole.clone() };
                let mut own = vec![0.0; slice.len()];
                // Pieces may begin and end inside a run.
                for (piece, own) in own.chunks_mut(2).enumerate() {
                    slice.read(2 * piece, own, |at, to| to.copy_from_slice(&values[at..at + to.len()]));
                }
                for (piece, own) in own.chunks(4).enumerate() {
                    slice.write(4 * piece, own, &mut written);
                }
            }
            assert_eq!(written, values);
        }
    }
}
