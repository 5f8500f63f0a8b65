//! Batches, prepared ahead of the step by threads of their own.

use super::DataError;
use lockstep_protocol::spec::DataSpec;
use std::path::Path;

/// A batch ready for an engine.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Batch {
    /// NHWC, normalised: `labels.len() * image_size * image_size * channels` values.
    pub images: Vec<f32>,
    pub labels: Vec<u32>,
    /// Position of each picture in its split, for tests and for naming mistakes.
    pub indices: Vec<u64>,
}

/// What a training split looks like to a rank.
#[derive(Debug, Clone, PartialEq)]
pub struct Shape {
    pub image_size: usize,
    pub channels: usize,
    pub classes: Vec<String>,
    pub train_samples: u64,
    pub validation_samples: u64,
    pub mean: Vec<f32>,
    pub std: Vec<f32>,
    /// Broken files left out (`broken_files = "skip"`), each `path: what is wrong`.
    pub skipped: Vec<String>,
}

/// Opens a dataset for one rank. Same files on every rank; which samples a rank gets follows from
/// its number.
#[derive(Debug)]
pub struct DataSource {
    /// What was found.
    pub shape: Shape,
}

impl DataSource {
    /// Reads the dataset's index (and, when small, its pictures).
    ///
    /// # Errors
    /// Broken files when the job says `fail`; splits and sizes that do not fit the job.
    pub fn open(_path: &Path, _spec: &DataSpec, _seed: u64) -> Result<Self, DataError> {
        Err(DataError::Invalid("not built yet".into()))
    }

    /// The micro-batches of `rank` in one epoch (from 0), starting at optimizer step
    /// `first_step` of that epoch; prepared ahead by `threads` threads.
    ///
    /// The epoch is one seeded permutation of the split. Optimizer step `s` takes its pictures
    /// `[s * global, (s + 1) * global)`; micro-batch `a` of rank `r` is a contiguous run of them,
    /// in the order (a, r), so that the union over ranks is the same at any number of ranks.
    /// Augmentation is seeded by (seed, epoch, position of the picture in its split).
    pub fn epoch(&self, _plan: EpochPlan) -> Box<dyn Iterator<Item = Result<Batch, DataError>> + Send> {
        Box::new(std::iter::empty())
    }

    /// The part of the validation split that is `rank`'s, in batches: every sample on exactly one rank.
    pub fn validation(
        &self,
        _rank: u32,
        _world_size: u32,
        _batch_size: usize,
        _threads: usize,
    ) -> Box<dyn Iterator<Item = Result<Batch, DataError>> + Send> {
        Box::new(std::iter::empty())
    }
}

/// Which batches of an epoch a rank wants.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EpochPlan {
    /// From 0.
    pub epoch: u32,
    /// Optimizer step within the epoch to start at, from 0.
    pub first_step: u64,
    pub rank: u32,
    pub world_size: u32,
    /// Pictures of a rank in a micro-batch.
    pub batch_size: usize,
    /// Micro-batches a step.
    pub accumulate: usize,
    pub drop_remainder: bool,
    /// Threads that prepare batches.
    pub threads: usize,
}
