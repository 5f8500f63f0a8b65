//! Division of an update into tasks, each of which any thread of any rank may run.

use super::layout::Layout;
use crate::sharding::Share;
use std::ops::Range;

/// Maximum number of values of a piece: a task of about 15 us.
const PIECE: usize = 1 << 14;

/// A range of the values of one parameter.
#[derive(Debug, Clone)]
pub(super) struct Piece {
    pub(super) parameter: usize,
    pub(super) bucket: usize,
    /// Range in the flat buffer.
    pub(super) range: Range<usize>,
    pub(super) in_bucket: Range<usize>,
    /// Range in the optimizer's slots, which hold only this rank's pieces.
    pub(super) in_slots: Range<usize>,
}

/// What a task does with its piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// The only pass: the sum over the ranks, and the update.
    SumAndUpdate,
    /// First pass: the sum, [`lockstep_kernels::optimizer::Update::prepare`], and the piece's sums of squares.
    Sum,
    /// Second pass: the update, which needs the norms of the whole parameter.
    Update,
    /// Second pass for the filters of a convolution with Muon: the update of the whole parameter. Only the parameter's first
    /// piece has this task.
    Orthogonalise,
}

/// One task. Threads take tasks in order.
#[derive(Debug, Clone, Copy)]
pub(super) struct Task {
    pub(super) piece: usize,
    pub(super) work: Work,
    /// Number of leading tasks that must be done before this one: for an update, up to the last sum of its bucket, or of
    /// all buckets with [`Passes::TwoPerStep`].
    pub(super) required_tasks: usize,
}

/// The pieces of this rank's share of every bucket, in order. A piece has values of only one parameter. A parameter without values on this
/// rank has one empty piece, which holds the parameter's sums of squares.
pub(super) fn pieces(layout: &Layout, shares: &[Share]) -> Vec<Piece> {
    let (mut pieces, mut slots_len) = (Vec::new(), 0);
    for (parameter, place) in layout.parameters.iter().enumerate() {
        let bucket = &layout.buckets[place.bucket];
        let own = shares[place.bucket].of(bucket.len());
        let mut start = own.start.max(place.in_bucket.start).min(place.in_bucket.end);
        let end = own.end.min(place.in_bucket.end).max(start);
        loop {
            let in_bucket = start..end.min(start + PIECE);
            let range = bucket.start + in_bucket.start..bucket.start + in_bucket.end;
            let in_slots = slots_len..slots_len + in_bucket.len();
            (start, slots_len) = (in_bucket.end, in_slots.end);
            pieces.push(Piece { parameter, bucket: place.bucket, range, in_bucket, in_slots });
            if start == end {
                break;
            }
        }
    }
    pieces
}

/// How many passes over its gradients an update needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Passes {
    One,
    /// Two passes over each bucket: its updates follow all its sums.
    TwoPerBucket,
    /// Two passes over all buckets: all updates follow all sums.
    TwoPerStep,
}

/// The tasks of a step. `is_matrix` tells which parameters have one task for the update of the whole parameter.
pub(super) fn tasks(pieces: &[Piece], passes: Passes, is_matrix: impl Fn(usize) -> bool) -> Vec<Task> {
    if passes == Passes::One {
        return (0..pieces.len())
            .map(|piece| Task { piece, work: Work::SumAndUpdate, required_tasks: 0 })
            .collect();
    }
    let mut tasks = Vec::new();
    let mut first = 0;
    for chunk in pieces.chunk_by(|a, b| passes == Passes::TwoPerStep || a.bucket == b.bucket) {
        let indices = first..first + chunk.len();
        first = indices.end;
        tasks.extend(indices.clone().map(|piece| Task { piece, work: Work::Sum, required_tasks: 0 }));
        let required_tasks = tasks.len();
        tasks.extend(indices.filter_map(|piece| {
            let parameter = pieces[piece].parameter;
            if !is_matrix(parameter) {
                return Some(Task { piece, work: Work::Update, required_tasks });
            }
            let is_first = piece == 0 || pieces[piece - 1].parameter != parameter;
            is_first.then_some(Task { piece, work: Work::Orthogonalise, required_tasks })
        }));
    }
    tasks
}
