//! The layout of the memory that ranks share.

use super::{mapping::whole_pages, wait_queue::WaitQueue};
use std::sync::atomic::AtomicU64;

/// Longest vector that is summed in shared memory: sums and sums of squares of 4096 channels.
pub(super) const SLOT: usize = 8192;

/// The beginning of the memory. Then a [`Line`] a rank, then two slots of [`SLOT`] numbers a rank.
#[repr(C, align(128))]
#[derive(Debug)]
pub(super) struct Head {
    pub(super) token: [AtomicU64; 2],
    pub(super) queue: WaitQueue,
}

/// A rank's announcement of its calls. There are two entries, used alternately, because a rank may be one call ahead of another.
#[repr(C, align(128))]
#[derive(Debug)]
pub(super) struct Line {
    /// Calls so far.
    pub(super) calls: AtomicU64,
    /// The two numbers of [`Call::packed`](crate::ring::Call::packed).
    pub(super) what: [[AtomicU64; 2]; 2],
}

/// Where the slots begin.
pub(super) fn slots_at(world: usize) -> usize {
    size_of::<Head>() + world * size_of::<Line>()
}

/// Bytes that the group itself uses.
pub(super) fn beginning(world: usize) -> usize {
    whole_pages(slots_at(world) + 2 * world * SLOT * size_of::<f64>())
}
