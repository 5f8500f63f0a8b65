//! Computes the mean loss of a step over the job's ranks, for commands that print it.

use std::collections::BTreeMap;

/// Collects losses from ranks. Each rank reports in the order of steps.
#[derive(Debug, Default)]
pub(crate) struct JobLoss {
    ranks: usize,
    /// Losses of steps for which some ranks have not reported yet.
    incomplete: BTreeMap<u64, Vec<f32>>,
    /// The mean loss of the newest step that all ranks have reported.
    pub(crate) newest: Option<f32>,
}

impl JobLoss {
    /// Creates a collection for an attempt with this many ranks.
    pub(crate) fn new(ranks: usize) -> Self {
        Self { ranks, ..Self::default() }
    }

    /// Adds a rank's losses. Returns the steps that are complete, each with its mean loss.
    pub(crate) fn add(&mut self, losses: impl IntoIterator<Item = (u64, f32)>) -> Vec<(u64, f32)> {
        for (step, loss) in losses {
            self.incomplete.entry(step).or_default().push(loss);
        }
        let complete = self.incomplete.iter().rev().find(|(_, losses)| losses.len() >= self.ranks);
        let Some(last) = complete.map(|(step, _)| *step) else { return Vec::new() };
        // Ranks report in order. So if a step before a complete step lacks losses, some ranks had no pictures in it.
        let later = self.incomplete.split_off(&(last + 1));
        let steps = std::mem::replace(&mut self.incomplete, later);
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
        let mut loss = JobLoss::new(2);
        assert_eq!(loss.add([(1, 2.0), (2, 1.0), (3, 1.0)]), []);
        assert_eq!(loss.newest, None, "rank 0's loss is not the job's loss");
        assert_eq!(loss.add([(1, 4.0)]), [(1, 3.0)]);
        // In step 2, only one rank has pictures.
        assert_eq!(loss.add([(3, 2.0)]), [(2, 1.0), (3, 1.5)]);
        assert_eq!(loss.newest, Some(1.5));
        assert!(loss.add([(4, f32::NAN), (4, 1.0)])[0].1.is_nan());
    }
}
