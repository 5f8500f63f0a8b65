//! Memory that the ranks of one machine share.
//!
//! Rank 0 makes a file in memory that has no name, and the others open it through `/proc`: nothing is left behind
//! however a rank ends. [`ShmProcessGroup`] makes the short collectives of it, which then need no system call while ranks
//! come together; an engine may keep weights and gradients in it ([`SharedMemory`]). The ring's connections
//! stay open: they carry long vectors (a checkpoint that is loaded), and show at once that a rank died.

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

/// Set to `0` in a rank's environment: its attempt does without shared memory.
pub const VARIABLE: &str = "LOCKSTEP_SHARED_MEMORY";

/// Zeroed memory that all ranks of a group see, and ways to wait for what others write there.
#[derive(Debug, Clone)]
pub struct SharedMemory {
    mapping: Arc<Mapping>,
    group: Arc<ShmProcessGroup>,
}

impl SharedMemory {
    /// Values `offset` bytes from the beginning.
    ///
    /// # Safety
    /// Any bits make a `T`, all zeros too; and ranks take turns: nobody uses a slice of values while another
    /// rank writes them.
    ///
    /// # Panics
    /// They are not inside, or not aligned.
    #[allow(unsafe_code)]
    pub unsafe fn view<T>(&self, offset: usize, len: usize) -> SharedSlice<T> {
        // SAFETY: the caller's promise.
        unsafe { self.mapping.view(offset, len) }
    }

    /// Wakes waiting ranks to check their condition again; called after every write that one may wait for. Not collective.
    pub fn notify_all(&self) {
        self.group.queue().notify_all();
    }

    /// Waits until `ready` and does meanwhile what `idle` finds to do (false: nothing now). Gives the time in which
    /// there was nothing. `behind` names the rank that is waited for.
    ///
    /// # Errors
    /// A rank is gone, or nothing happened for the group's time-out; the group is ended then.
    pub fn wait(
        &self,
        operation: &'static str,
        idle: &mut dyn FnMut() -> bool,
        ready: &dyn Fn() -> bool,
        behind: &dyn Fn() -> usize,
    ) -> Result<Duration, CommError> {
        self.group.wait(operation, idle, ready, behind)
    }

    /// Collective: [`super::ProcessGroup::all_reduce`] with a sum, which waits as [`SharedMemory::wait`] does.
    ///
    /// # Errors
    /// As there.
    pub fn all_reduce_f64(
        &self,
        values: &mut [f64],
        idle: &mut dyn FnMut() -> bool,
    ) -> Result<Duration, CommError> {
        self.group.sum(values, idle)
    }
}
