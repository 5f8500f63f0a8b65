//! The pictures of a part that were found to be broken while a job trains.

use std::{
    collections::BTreeSet,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// Broken pictures of a part; [`Part::with_others`](super::part::Part::with_others) says how they are replaced.
#[derive(Debug)]
pub(super) struct Broken {
    /// Whether broken files are allowed (`data.broken_files = "skip"`). Otherwise the first one is an error.
    pub(super) allowed: bool,
    counts: Mutex<BrokenCounts>,
}

#[derive(Debug, Default)]
pub(super) struct BrokenCounts {
    /// Pictures asked for so far, or all of them.
    pub(super) asked: usize,
    /// Places in the split.
    pub(super) broken: BTreeSet<u32>,
    /// Lines that were not reported yet.
    pub(super) news: Vec<String>,
}

impl Broken {
    pub(super) fn new(allowed: bool) -> Self {
        Self { allowed, counts: Mutex::default() }
    }

    /// Lines for the pictures found since the last call, and the number of all broken pictures so far.
    pub(super) fn news(&self) -> (Vec<String>, usize) {
        let mut counts = self.counts();
        (std::mem::take(&mut counts.news), counts.broken.len())
    }

    pub(super) fn counts(&self) -> MutexGuard<'_, BrokenCounts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
