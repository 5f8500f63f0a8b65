//! The pictures of a part that were found to be broken while a job trains.

use std::{
    collections::BTreeSet,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// What was met of a part; [`Part::with_others`](super::part::Part::with_others) says what becomes of it.
#[derive(Debug)]
pub(super) struct Broken {
    /// Else the first broken file is an error.
    pub(super) allowed: bool,
    met: Mutex<BrokenCounts>,
}

#[derive(Debug, Default)]
pub(super) struct BrokenCounts {
    /// Pictures asked for so far, or all of them.
    pub(super) asked: usize,
    /// Places in the split.
    pub(super) broken: BTreeSet<u32>,
    /// What was not reported yet.
    pub(super) news: Vec<String>,
}

impl Broken {
    pub(super) fn new(allowed: bool) -> Self {
        Self { allowed, met: Mutex::default() }
    }

    /// What was met since this was last asked, and how many there are by now.
    pub(super) fn news(&self) -> (Vec<String>, usize) {
        let mut met = self.met();
        (std::mem::take(&mut met.news), met.broken.len())
    }

    pub(super) fn met(&self) -> MutexGuard<'_, BrokenCounts> {
        self.met.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
