//! Threads that make pictures, each with buffers of its own.

use super::Opener;
use crate::data::{DataError, transform::Pipeline};
use rayon::{ThreadPool, ThreadPoolBuilder, prelude::*};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What one thread works with.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    pub(super) opener: Opener,
    pub(super) pipeline: Pipeline,
}

#[derive(Debug)]
pub(super) struct Workers {
    /// Absent: whoever asks does the work.
    pool: Option<ThreadPool>,
    /// One for each that works at a time.
    scratch: Vec<Mutex<Scratch>>,
}

impl Workers {
    /// For up to `callers` threads that do the work themselves.
    pub(super) fn alone(callers: usize) -> Self {
        Self { pool: None, scratch: scratch(callers) }
    }

    /// `threads` of their own.
    ///
    /// # Errors
    /// The system gives no more threads.
    pub(super) fn pool(threads: usize) -> Result<Self, DataError> {
        let pool = ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|number| format!("pictures {number}"))
            .build()
            .map_err(|e| DataError::Invalid(format!("threads that decode pictures: {e}")))?;
        Ok(Self { pool: Some(pool), scratch: scratch(threads) })
    }

    /// Calls `make(0, ...)`, `make(1, ...)` for each `size` values.
    ///
    /// # Errors
    /// The first one in this order, whichever came first in time.
    pub(super) fn each<T: Send>(
        &self,
        values: &mut [T],
        size: usize,
        make: impl Fn(usize, &mut [T], &mut Scratch) -> Result<(), DataError> + Sync,
    ) -> Result<(), DataError> {
        match &self.pool {
            None => {
                let mut scratch = self.scratch();
                let mut all = values.chunks_exact_mut(size).enumerate();
                all.try_for_each(|(number, values)| make(number, values, &mut scratch))
            }
            Some(pool) => pool.install(|| {
                let all = values.par_chunks_exact_mut(size).with_max_len(1).enumerate();
                let made: Vec<_> =
                    all.map(|(number, values)| make(number, values, &mut self.scratch())).collect();
                made.into_iter().collect()
            }),
        }
    }

    /// `make(0)`, `make(1)`, ... up to `count`.
    ///
    /// # Errors
    /// The first one in this order, whichever came first in time.
    pub(super) fn map<T: Send>(
        &self,
        count: usize,
        make: impl Fn(usize) -> Result<T, DataError> + Sync,
    ) -> Result<Vec<T>, DataError> {
        match &self.pool {
            None => (0..count).map(&make).collect(),
            Some(pool) => pool.install(|| {
                let made: Vec<_> = (0..count).into_par_iter().with_max_len(1).map(&make).collect();
                made.into_iter().collect()
            }),
        }
    }

    fn scratch(&self) -> MutexGuard<'_, Scratch> {
        let own = rayon::current_thread_index().unwrap_or(0) % self.scratch.len();
        let others = (0..self.scratch.len()).map(|i| &self.scratch[(own + i) % self.scratch.len()]);
        let free = others.into_iter().find_map(|scratch| scratch.try_lock().ok());
        free.unwrap_or_else(|| self.scratch[own].lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn scratch(count: usize) -> Vec<Mutex<Scratch>> {
    (0..count.max(1)).map(|_| Mutex::default()).collect()
}
