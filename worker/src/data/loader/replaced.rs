//! Pictures that break while a job trains on them (`data.broken_files = "skip"`): in training the next picture of the split
//! that can be read takes the place, in validation there is one less.
//!
//! Which one is next follows from the split alone, not from what a rank has met before, so ranks that come to a file at
//! different times, or another number of ranks, replace it by the same one.

use super::{Batch, Part, Pixels};
use crate::data::DataError;
use std::{
    collections::BTreeSet,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// So many may break in any split.
const ALWAYS: usize = 16;
/// And this share of it: when more are gone, a disk is, and nobody would want to train on the rest.
const SHARE: usize = 10;

/// What a part's pictures are replaced by.
#[derive(Debug)]
pub(super) struct Replaced {
    /// Else the first broken file is an error.
    allowed: bool,
    met: Mutex<Met>,
}

#[derive(Debug, Default)]
struct Met {
    /// Places in the split.
    broken: BTreeSet<u32>,
    /// What was not told yet.
    news: Vec<String>,
}

impl Replaced {
    pub(super) fn new(allowed: bool) -> Self {
        Self { allowed, met: Mutex::default() }
    }

    /// A batch of the `chosen` places, each broken one replaced by the next of `part` that can be read.
    pub(super) fn with_others(
        &self,
        part: &Part,
        chosen: &[u32],
        make: impl Fn(&[u32]) -> Result<Batch, DataError>,
    ) -> Result<Batch, DataError> {
        self.made(part, |broken| chosen.iter().map(|place| next(part, *place, broken)).collect(), make)
    }

    /// A batch of the `chosen` places, broken ones left out.
    pub(super) fn without(
        &self,
        part: &Part,
        chosen: &[u32],
        make: impl Fn(&[u32]) -> Result<Batch, DataError>,
    ) -> Result<Batch, DataError> {
        let whole =
            |broken: &BTreeSet<u32>| chosen.iter().copied().filter(|p| !broken.contains(p)).collect();
        self.made(part, whole, make)
    }

    fn made(
        &self,
        part: &Part,
        places: impl Fn(&BTreeSet<u32>) -> Vec<u32>,
        make: impl Fn(&[u32]) -> Result<Batch, DataError>,
    ) -> Result<Batch, DataError> {
        loop {
            let places = places(&self.met().broken);
            match make(&places) {
                Err(error) if self.allowed => self.note(part, &places, error)?,
                made => return made,
            }
        }
    }

    /// Remembers which of `places` an error is about.
    fn note(&self, part: &Part, places: &[u32], error: DataError) -> Result<(), DataError> {
        let (DataError::File { path, detail }, Pixels::Files { files, .. }) = (&error, &part.pixels) else {
            return Err(error);
        };
        let Some(place) = places.iter().find(|place| files.name(**place as usize) == *path) else {
            return Err(error);
        };
        let mut met = self.met();
        if met.broken.insert(*place) {
            met.news.push(format!("{path} {detail}"));
        }
        let (count, all) = (met.broken.len(), part.chosen.len());
        if count > ALWAYS.max(all / SHARE) || count >= all {
            return Err(DataError::Invalid(format!(
                "{count} of {all} pictures cannot be read any more, the last one {path}, which {detail}. Is the \
                 dataset's disk still there? Bring it back and retry the job"
            )));
        }
        Ok(())
    }

    /// What was met since this was last asked, and how many there are by now.
    pub(super) fn news(&self) -> (Vec<String>, usize) {
        let mut met = self.met();
        (std::mem::take(&mut met.news), met.broken.len())
    }

    fn met(&self) -> MutexGuard<'_, Met> {
        self.met.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The first of the part's places from `place` on that is not broken, round its end.
fn next(part: &Part, place: u32, broken: &BTreeSet<u32>) -> u32 {
    if !broken.contains(&place) {
        return place;
    }
    let from = part.chosen.partition_point(|chosen| *chosen < place);
    let all = part.chosen[from..].iter().chain(&part.chosen[..from]);
    all.copied().find(|place| !broken.contains(place)).unwrap_or(place)
}
