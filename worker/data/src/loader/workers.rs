//! Threads that make pictures, and their buffers.

use super::part::Opener;
use crate::{DataError, transform::Pipeline};
use rayon::{ThreadPool, ThreadPoolBuilder, prelude::*};
use std::cell::Cell;

/// The buffers of a thread.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    pub(super) opener: Opener,
    pub(super) pipeline: Pipeline,
}

thread_local! {
    /// Kept from picture to picture and from epoch to epoch.
    static SCRATCH: Cell<Scratch> = Cell::default();
}

/// The kind of work, which determines the threads that do it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// Decoding on CPU cores.
    Decoding,
    /// The work before and after decoding on a device.
    AroundDevice,
}

#[derive(Debug, Default)]
pub(super) struct Workers {
    /// The threads that decode. `None` if the calling thread does all work.
    pool: Option<ThreadPool>,
    /// For work that must not wait for decoding on CPU cores: reading files for a device, and completing the device's
    /// pictures.
    side_pool: Option<ThreadPool>,
}

impl Workers {
    /// Starts `threads` threads, and half as many for [`Work::AroundDevice`] if a device decodes.
    pub(super) fn pool(threads: usize, has_device: bool) -> Result<Self, DataError> {
        let pool = |threads: usize| {
            ThreadPoolBuilder::new()
                .num_threads(threads)
                .thread_name(|number| format!("pictures {number}"))
                .build()
                .map_err(|e| DataError::Invalid(format!("threads that decode pictures: {e}")))
        };
        let side_pool = has_device.then(|| pool(threads.div_ceil(2))).transpose()?;
        Ok(Self { pool: Some(pool(threads)?), side_pool })
    }

    /// Whether these are the threads that [`Workers::pool`] starts for `threads` and `has_device`.
    pub(super) fn has_threads(&self, threads: usize, has_device: bool) -> bool {
        self.side_pool.is_some() == has_device
            && self.pool.as_ref().is_some_and(|pool| pool.current_num_threads() == threads)
    }

    /// Calls `make` with each of `numbers`, and returns the results in this order.
    /// Of several errors, the first in the order of `numbers` is returned.
    pub(super) fn map<T: Send>(
        &self,
        work: Work,
        numbers: &[usize],
        make: impl Fn(usize, &mut Scratch) -> Result<T, DataError> + Sync,
    ) -> Result<Vec<T>, DataError> {
        let make = |number: &usize| {
            let mut scratch = SCRATCH.take();
            let made = make(*number, &mut scratch);
            SCRATCH.set(scratch);
            made
        };
        let pool = match work {
            Work::Decoding => self.pool.as_ref(),
            Work::AroundDevice => self.side_pool.as_ref().or(self.pool.as_ref()),
        };
        match pool {
            None => numbers.iter().map(make).collect(),
            Some(pool) => pool.install(|| {
                let made: Vec<_> = numbers.par_iter().with_max_len(1).map(make).collect();
                made.into_iter().collect()
            }),
        }
    }
}
