//! The same training on fewer ranks: each step and each micro-batch has the same pictures, divided over fewer ranks.

use super::JobSpec;

impl JobSpec {
    /// Pictures of a rank in a micro-batch when `ranks` ranks share the pictures of all ranks in a micro-batch; `None`
    /// if they cannot be divided evenly.
    fn batch_size_on(&self, ranks: u32) -> Option<u32> {
        let of_all = u64::from(self.micro_batch_size()) * u64::from(self.parallel.ranks);
        let comes_out_even = ranks > 0 && of_all.is_multiple_of(ranks.into());
        comes_out_even.then(|| u32::try_from(of_all / u64::from(ranks)).ok()).flatten()
    }

    /// The smaller numbers of ranks with which the job may continue, largest first; empty without `recovery.min_ranks`.
    pub fn fewer_ranks(&self) -> Vec<u32> {
        let Some(least) = self.recovery.min_ranks else { return Vec::new() };
        (least..self.parallel.ranks).rev().filter(|ranks| self.batch_size_on(*ranks).is_some()).collect()
    }

    /// The same job on `ranks` ranks, one of [`JobSpec::fewer_ranks`], with the same global batch and the same micro-batches.
    pub fn on_ranks(mut self, ranks: u32) -> Self {
        let batch_size = self.batch_size_on(ranks);
        // `global_batch_size` needs no change: it is divided over any number of ranks.
        if self.train.global_batch_size.is_none() && batch_size.is_some() {
            self.train.batch_size = batch_size;
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
                "with parallel.{key} = false losses depend on the number of ranks, so fewer ranks would train something else: \
                 set parallel.{key} = true, or leave min_ranks out"
            ));
        }
    }
    if least == ranks || !spec.fewer_ranks().is_empty() {
        return None;
    }
    let of_all = u64::from(spec.micro_batch_size()) * u64::from(ranks);
    let tried = if least + 1 == ranks { least.to_string() } else { format!("{least} to {}", ranks - 1) };
    let divides = (1..least).rev().find(|n| spec.batch_size_on(*n).is_some()).unwrap_or(1);
    Some(format!(
        "the {of_all} pictures of a micro-batch cannot be divided over {tried} ranks: give {divides} or less, or another batch size"
    ))
}
