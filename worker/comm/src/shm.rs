//! Memory shared by the ranks of one machine.
//!
//! Rank 0 creates an anonymous file in memory, and the other ranks open it through `/proc`. No file is left behind,
//! however a rank ends. [`ShmProcessGroup`] runs short collectives in this memory, without system calls as long as
//! ranks arrive at about the same time. An engine may keep weights and gradients in it ([`SharedMemory`]). The ring
//! stays connected: it carries long vectors, such as a loaded checkpoint, and shows at once that a rank has died.

mod descriptor;
mod layout;
mod mapping;
mod process_group;
#[cfg(test)]
mod tests;
mod wait_queue;

use super::CommError;
use mapping::Mapping;
pub use mapping::SharedSlice;
pub use process_group::ShmProcessGroup;
use std::{sync::Arc, time::Duration};

/// The environment variable that disables shared memory for the rank's attempt if its value is `0`.
pub const ENABLING_VARIABLE: &str = "LOCKSTEP_SHARED_MEMORY";

/// Zeroed memory that all ranks of a group share, and functions to wait for the writes of other ranks.
#[derive(Debug, Clone)]
pub struct SharedMemory {
    mapping: Arc<Mapping>,
    group: Arc<ShmProcessGroup>,
}

impl SharedMemory {
    /// A slice of `len` values, which starts at byte `offset`.
    ///
    /// # Safety
    /// Any bits, including all zeros, must be a valid `T`. Ranks must take turns: no rank uses a slice of values
    /// while another rank writes them.
    ///
    /// # Panics
    /// The slice is not inside the memory, or not aligned.
    #[allow(unsafe_code)]
    pub unsafe fn view<T>(&self, offset: usize, len: usize) -> SharedSlice<T> {
        // SAFETY: as required of the caller.
        unsafe { self.mapping.view(offset, len) }
    }

    /// Not collective: wakes waiting ranks, so that they check their condition again. Call it after every write for
    /// which a rank may wait.
    pub fn notify_all(&self) {
        self.group.queue().notify_all();
    }

    /// Waits until `is_ready` returns true, and returns the time for which there was no work. Meanwhile, `idle` does a piece of
    /// useful work and returns whether there was any. `awaited_rank` returns the rank for which this rank waits.
    ///
    /// # Errors
    /// A rank has exited, or nothing happened within the group's time-out. The group is then ended.
    pub fn wait(
        &self,
        operation: &'static str,
        idle: &mut dyn FnMut() -> bool,
        is_ready: &dyn Fn() -> bool,
        awaited_rank: &dyn Fn() -> usize,
    ) -> Result<Duration, CommError> {
        self.group.wait(operation, idle, is_ready, awaited_rank)
    }

    /// Collective: as [`super::ProcessGroup::all_reduce`]. As [`SharedMemory::wait`], calls `idle`, and
    /// returns the time for which there was no work.
    ///
    /// # Errors
    /// As [`super::ProcessGroup::all_reduce`].
    pub fn all_reduce_f64(
        &self,
        values: &mut [f64],
        idle: &mut dyn FnMut() -> bool,
    ) -> Result<Duration, CommError> {
        self.group.sum(values, idle)
    }
}
