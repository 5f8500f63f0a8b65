//! The layout of the shared memory.

use super::{mapping::whole_pages, wait_queue::WaitQueue};
use std::sync::atomic::AtomicU64;

/// Maximum length of a vector summed in shared memory: sums and sums of squares for 4096 channels.
pub(super) const SLOT_VALUES: usize = 8192;

/// The beginning of the memory. One [`Announcements`] per rank follows, then two slots of [`SLOT_VALUES`] numbers per rank.
#[repr(C, align(128))]
#[derive(Debug)]
pub(super) struct Head {
    pub(super) token: [AtomicU64; 2],
    pub(super) queue: WaitQueue,
}

/// A rank's announcements of its calls. Two entries are used alternately, because a rank may be one call ahead of
/// another.
#[repr(C, align(128))]
#[derive(Debug)]
pub(super) struct Announcements {
    /// The number of calls so far.
    pub(super) calls: AtomicU64,
    /// By entry: the two numbers of [`Call::pack`](crate::ring::Call::pack).
    pub(super) packed_calls: [[AtomicU64; 2]; 2],
}

/// The offset of the slots, in bytes.
pub(super) fn slots_at(world: usize) -> usize {
    size_of::<Head>() + world * size_of::<Announcements>()
}

/// The number of bytes that the group itself uses.
pub(super) fn group_bytes(world: usize) -> usize {
    whole_pages(slots_at(world) + 2 * world * SLOT_VALUES * size_of::<f64>())
}
