//! The same training on fewer ranks: each step and each micro-batch has the same pictures, divided over fewer ranks.

use super::JobSpec;

impl JobSpec {
    /// Number of pictures of all ranks in a micro-batch.
    fn micro_batch_of_all_ranks(&self) -> u64 {
        u64::from(self.micro_batch_size()) * u64::from(self.parallel.ranks)
    }

    /// The batch size of each of `ranks` ranks that keeps the micro-batch of all ranks unchanged; `None` if the pictures
    /// cannot be divided evenly.
    fn batch_size_on(&self, ranks: u32) -> Option<u32> {
        let pictures = self.micro_batch_of_all_ranks();
        let is_divisible = ranks > 0 && pictures.is_multiple_of(ranks.into());
        is_divisible.then(|| u32::try_from(pictures / u64::from(ranks)).ok()).flatten()
    }

    /// The smaller numbers of ranks with which the job may continue, largest first; empty without `recovery.min_ranks`.
    pub fn fewer_ranks(&self) -> Vec<u32> {
        let Some(least) = self.recovery.min_ranks else { return Vec::new() };
        (least..self.parallel.ranks).rev().filter(|ranks| self.batch_size_on(*ranks).is_some()).collect()
    }

    /// The same job on `ranks` ranks, one of [`JobSpec::fewer_ranks`], with the same global batch and the same micro-batches.
    pub fn on_ranks(mut self, ranks: u32) -> Self {
        // `global_batch_size` needs no change: it is divided over any number of ranks.
        if self.train.global_batch_size.is_none() {
            self.train.batch_size = self.batch_size_on(ranks).or(self.train.batch_size);
        }
        self.parallel.ranks = ranks;
        self
    }
}

/// Why `recovery.min_ranks` is impossible for this job; `None` if it is possible.
pub(super) fn mistake(spec: &JobSpec) -> Option<String> {
    let (least, ranks) = (spec.recovery.min_ranks?, spec.parallel.ranks);
    if least > ranks {
        return Some(format!("{least} is more than parallel.ranks = {ranks}: give {ranks} or less"));
    }
    for (key, is_on) in
        [("sync_batch_norm", spec.parallel.sync_batch_norm), ("gradients_mean", spec.parallel.gradients_mean)]
    {
        if !is_on {
            return Some(format!(
                "with parallel.{key} = false the loss depends on the number of ranks, so training on fewer ranks would give another \
                 result: set parallel.{key} = true, or leave min_ranks out"
            ));
        }
    }
    if least == ranks || !spec.fewer_ranks().is_empty() {
        return None;
    }
    let pictures = spec.micro_batch_of_all_ranks();
    let tried = if least + 1 == ranks { least.to_string() } else { format!("{least} to {}", ranks - 1) };
    let largest_possible = (1..least).rev().find(|n| spec.batch_size_on(*n).is_some()).unwrap_or(1);
    Some(format!(
        "the {pictures} pictures of a micro-batch cannot be divided over {tried} ranks: give {largest_possible} or less, or \
         another batch size"
    ))
}
