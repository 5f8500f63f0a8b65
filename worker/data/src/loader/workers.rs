//! Threads that make pictures, and their buffers.

use super::part::Opener;
use crate::{DataError, transform::Pipeline};
use lockstep_host::lock;
use rayon::{ThreadPool, ThreadPoolBuilder, prelude::*};
use std::sync::{Mutex, MutexGuard};

/// The buffers of a thread.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    pub(super) opener: Opener,
    pub(super) pipeline: Pipeline,
}

/// The kind of work, which determines the threads that do it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// Decoding on CPU cores.
    Decoding,
    /// The work before and after decoding on a device.
    AroundDevice,
}

#[derive(Debug)]
pub(super) struct Workers {
    /// The threads that decode. `None` if the calling thread does all work.
    pool: Option<ThreadPool>,
    /// For work that must not wait for decoding on CPU cores: reading files for a device, and completing the device's
    /// pictures.
    side_pool: Option<ThreadPool>,
    /// The buffers, one set for each concurrent thread.
    scratch: Vec<Mutex<Scratch>>,
}

impl Workers {
    /// Starts no threads. Up to `callers` calling threads do the work themselves.
    pub(super) fn without_threads(callers: usize) -> Self {
        Self { pool: None, side_pool: None, scratch: new_scratch(callers) }
    }

    /// Starts `threads` threads, and half as many for [`Work::AroundDevice`] if a device decodes.
    pub(super) fn pool(threads: usize, has_device: bool) -> Result<Self, DataError> {
        let pool = |threads: usize| {
            ThreadPoolBuilder::new()
                .num_threads(threads)
                .thread_name(|number| format!("pictures {number}"))
                .build()
                .map_err(|e| DataError::Invalid(format!("threads that decode pictures: {e}")))
        };
        let side_threads = threads.div_ceil(2);
        let side_pool = has_device.then(|| pool(side_threads)).transpose()?;
        Ok(Self { pool: Some(pool(threads)?), side_pool, scratch: new_scratch(threads + side_threads) })
    }

    /// The threads that do `work`. `None` if the calling thread does it.
    fn threads(&self, work: Work) -> Option<&ThreadPool> {
        match work {
            Work::Decoding => self.pool.as_ref(),
            Work::AroundDevice => self.side_pool.as_ref().or(self.pool.as_ref()),
        }
    }

    /// Calls `make` with each of `numbers`, and returns the results in this order.
    ///
    /// # Errors
    /// Of several errors, the first in the order of `numbers`.
    pub(super) fn map<T: Send>(
        &self,
        work: Work,
        numbers: &[usize],
        make: impl Fn(usize, &mut Scratch) -> Result<T, DataError> + Sync,
    ) -> Result<Vec<T>, DataError> {
        match self.threads(work) {
            None => {
                let mut scratch = self.lock_scratch();
                numbers.iter().map(|number| make(*number, &mut scratch)).collect()
            }
            Some(pool) => pool.install(|| {
                let all = numbers.par_iter().with_max_len(1);
                let made: Vec<_> = all.map(|number| make(*number, &mut self.lock_scratch())).collect();
                made.into_iter().collect()
            }),
        }
    }

    fn lock_scratch(&self) -> MutexGuard<'_, Scratch> {
        let own = rayon::current_thread_index().unwrap_or(0) % self.scratch.len();
        let others = (0..self.scratch.len()).map(|i| &self.scratch[(own + i) % self.scratch.len()]);
        let free = others.into_iter().find_map(|scratch| scratch.try_lock().ok());
        free.unwrap_or_else(|| lock(&self.scratch[own]))
    }
}

fn new_scratch(count: usize) -> Vec<Mutex<Scratch>> {
    (0..count.max(1)).map(|_| Mutex::default()).collect()
}
