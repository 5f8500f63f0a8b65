//! An update cut into tasks that any thread of any rank may do.

use super::layout::Layout;
use crate::sharding::Share;
use std::ops::Range;

/// Values of a piece, at most: a task of some 15 us.
const PIECE: usize = 1 << 14;

/// Some values of one parameter.
#[derive(Debug, Clone)]
pub(super) struct Piece {
    pub(super) slot: usize,
    pub(super) bucket: usize,
    /// In the flat buffer.
    pub(super) range: Range<usize>,
    /// In its bucket.
    pub(super) in_bucket: Range<usize>,
    /// In the optimizer's slots, which have no more than this rank's pieces.
    pub(super) in_slots: Range<usize>,
}

/// What is done with a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// Sum over the ranks and update.
    Whole,
    /// Only the sum, what the optimizer prepares of it, and norms: it needs those of the whole parameter first.
    Sum,
    /// Then the update.
    Update,
}

/// One task. Tasks are taken in order.
#[derive(Debug, Clone, Copy)]
pub(super) struct Task {
    pub(super) piece: usize,
    pub(super) work: Work,
    /// Tasks from the first on that must be done before: for an update all sums of its bucket.
    pub(super) after: usize,
}

/// The pieces of this rank's share of every bucket, in order; a piece has values of one parameter only. A parameter of which the rank
/// has nothing has an empty piece, where norms of all of it have room.
pub(super) fn pieces(layout: &Layout, shares: &[Share]) -> Vec<Piece> {
    let (mut pieces, mut kept) = (Vec::new(), 0);
    for (slot, at) in layout.slots.iter().enumerate() {
        let bucket = &layout.buckets[at.bucket];
        let own = shares[at.bucket].of(bucket.len());
        let from = own.start.max(at.in_bucket.start).min(at.in_bucket.end);
        let end = own.end.min(at.in_bucket.end).max(from);
        let mut start = from;
        loop {
            let in_bucket = start..end.min(start + PIECE);
            let range = bucket.start + in_bucket.start..bucket.start + in_bucket.end;
            let in_slots = kept..kept + in_bucket.len();
            (start, kept) = (in_bucket.end, in_slots.end);
            pieces.push(Piece { slot, bucket: at.bucket, range, in_bucket, in_slots });
            if start == end {
                break;
            }
        }
    }
    pieces
}

/// The tasks of a step; `in_two`: sums first, updates when those of a bucket are done (or, `at_once`, those of all buckets).
pub(super) fn tasks(pieces: &[Piece], in_two: bool, at_once: bool) -> Vec<Task> {
    if !in_two {
        return (0..pieces.len()).map(|piece| Task { piece, work: Work::Whole, after: 0 }).collect();
    }
    let mut tasks = Vec::new();
    let mut first = 0;
    for bucket in pieces.chunk_by(|a, b| at_once || a.bucket == b.bucket) {
        let these = first..first + bucket.len();
        first = these.end;
        tasks.extend(these.clone().map(|piece| Task { piece, work: Work::Sum, after: 0 }));
        let after = tasks.len();
        tasks.extend(these.map(|piece| Task { piece, work: Work::Update, after }));
    }
    tasks
}
