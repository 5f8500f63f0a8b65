//! Pictures of a part that were found to be broken during training.

use lockstep_host::lock;
use std::{
    collections::BTreeSet,
    sync::{Mutex, MutexGuard},
};

/// The broken pictures of a part. [`Part::with_replacements`](super::part::Part::with_replacements) describes how they
/// are replaced.
#[derive(Debug)]
pub(super) struct Broken {
    /// Whether broken files are allowed (`data.broken_files = "skip"`). Otherwise the first broken file is an error.
    pub(super) is_allowed: bool,
    counts: Mutex<BrokenCounts>,
}

#[derive(Debug, Default)]
pub(super) struct BrokenCounts {
    /// Number of pictures requested so far, at most the number of the part's pictures.
    pub(super) requested: usize,
    /// Positions of broken pictures in the split.
    pub(super) broken: BTreeSet<u32>,
    /// Log lines that have not been returned yet.
    pub(super) unlogged: Vec<String>,
}

impl Broken {
    pub(super) fn new(is_allowed: bool) -> Self {
        Self { is_allowed, counts: Mutex::default() }
    }

    /// Log lines for the pictures found since the last call, and the number of all broken pictures.
    pub(super) fn take_unlogged(&self) -> (Vec<String>, usize) {
        let mut counts = self.counts();
        (std::mem::take(&mut counts.unlogged), counts.broken.len())
    }

    pub(super) fn counts(&self) -> MutexGuard<'_, BrokenCounts> {
        lock(&self.counts)
    }
}
