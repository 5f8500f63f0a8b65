//! The loss of a job's steps, as commands print it: the mean over its ranks.

use std::collections::BTreeMap;

/// Losses that ranks report; each rank reports in the order of its steps.
#[derive(Debug, Default)]
pub(crate) struct JobLoss {
    ranks: usize,
    /// Losses of steps that not all ranks have reported.
    open: BTreeMap<u64, Vec<f32>>,
    /// The mean of the newest step that all ranks have reported.
    pub(crate) newest: Option<f32>,
}

impl JobLoss {
    /// For an attempt with this many ranks.
    pub(crate) fn of(ranks: usize) -> Self {
        Self { ranks, ..Self::default() }
    }

    /// Adds a rank's losses. Returns the steps that all ranks have reported by now, each with the mean.
    pub(crate) fn add(&mut self, losses: impl IntoIterator<Item = (u64, f32)>) -> Vec<(u64, f32)> {
        for (step, loss) in losses {
            self.open.entry(step).or_default().push(loss);
        }
        let complete = self.open.iter().rev().find(|(_, losses)| losses.len() >= self.ranks);
        let Some(last) = complete.map(|(step, _)| *step) else { return Vec::new() };
        // Ranks report in order, so an earlier step that still lacks losses had no pictures for some ranks.
        let later = self.open.split_off(&(last + 1));
        let steps = std::mem::replace(&mut self.open, later);
        let mean = |losses: &[f32]| losses.iter().sum::<f32>() / losses.len() as f32;
        let means: Vec<_> = steps.into_iter().map(|(step, losses)| (step, mean(&losses))).collect();
        self.newest = means.last().map(|(_, mean)| *mean);
        means
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_counts_once_all_ranks_have_reported_it() {
        let mut loss = JobLoss::of(2);
        assert_eq!(loss.add([(1, 2.0), (2, 1.0), (3, 1.0)]), []);
        assert_eq!(loss.newest, None, "rank 0's is not the job's");
        assert_eq!(loss.add([(1, 4.0)]), [(1, 3.0)]);
        // In step 2, only one rank has pictures.
        assert_eq!(loss.add([(3, 2.0)]), [(2, 1.0), (3, 1.5)]);
        assert_eq!(loss.newest, Some(1.5));
        assert!(loss.add([(4, f32::NAN), (4, 1.0)])[0].1.is_nan());
    }
}
