//! Preparation of a step, for all engines: which micro-batches have pictures, and the divisors of losses and statistics.

use super::{EngineConfig, EngineError};
use lockstep_data::loader::Batch;

/// A micro-batch of which at least one rank has pictures.
#[derive(Debug, Clone, Copy)]
pub(super) struct StepPart<'a> {
    pub(super) batch: &'a Batch,
    /// Whether this is the step's first part, whose gradients overwrite the previous step's gradients.
    pub(super) is_first: bool,
    /// Whether this is the step's last part, which the update follows.
    pub(super) is_last: bool,
    /// Number of pictures in batch norm's statistics: on all ranks if statistics are synchronised.
    pub(super) stat_pictures: f64,
}

#[derive(Debug)]
pub(super) struct PreparedStep<'a> {
    /// Empty if no rank has a picture.
    pub(super) parts: Vec<StepPart<'a>>,
    /// Factor of each picture's loss gradient: 1 / (pictures of the step on all ranks). The sum of all gradients is then the
    /// gradient of the mean loss, even if micro-batches have different sizes. With class weights, 1 / (sum of the
    /// weights of the pictures' labels). Without [`EngineConfig::gradients_mean`], this factor is multiplied by the number of ranks.
    pub(super) gradient_scale: f64,
}

impl<'a> PreparedStep<'a> {
    /// Prepares a step over `batches` on one of `ranks` ranks.
    ///
    /// # Errors
    /// There are more than [`EngineConfig::accumulate`] micro-batches, or a batch is inconsistent.
    pub(super) fn of(batches: &'a [Batch], config: &EngineConfig, ranks: u32) -> Result<Self, EngineError> {
        let max_batches = config.accumulate.max(1);
        if batches.len() > max_batches {
            let text =
                format!("a step of {} micro-batches; at most {max_batches} are allowed", batches.len());
            return Err(EngineError::Parameters(text));
        }
        // At the end of an epoch a rank may have no pictures, but still takes part in collectives.
        let counts: Vec<usize> = batches
            .iter()
            .map(|batch| batch.samples_of_all_ranks(ranks))
            .collect::<Result<_, _>>()
            .map_err(EngineError::Parameters)?;
        let divisor = |(batch, count): (&Batch, &usize)| batch.global_weight.unwrap_or(*count as f64);
        let total: f64 = batches.iter().zip(&counts).map(divisor).sum();
        let non_empty: Vec<_> = batches.iter().zip(&counts).filter(|(_, count)| **count > 0).collect();
        let part = |(index, &(batch, count)): (usize, &(&'a Batch, &usize))| {
            let pictures = if config.sync_batch_norm { *count } else { batch.labels.len() };
            let (is_first, is_last) = (index == 0, index + 1 == non_empty.len());
            StepPart { batch, is_first, is_last, stat_pictures: pictures as f64 }
        };
        let parts = non_empty.iter().enumerate().map(part).collect();
        let factor = if config.gradients_mean { 1.0 } else { f64::from(ranks) };
        Ok(Self { parts, gradient_scale: factor / total })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(accumulate: usize) -> EngineConfig {
        EngineConfig { accumulate, ..crate::fixtures::config(8) }
    }

    fn batch(own: usize, global_samples: usize) -> Batch {
        Batch { labels: vec![0; own], global_samples, ..Batch::default() }
    }

    /// A micro-batch is left out if no rank has pictures in it, but not if only this rank has none.
    #[test]
    fn a_step_has_the_micro_batches_with_pictures_on_any_rank() {
        let step = [batch(0, 0), batch(8, 16), batch(0, 4), batch(0, 0)];
        let prepare = |config: &EngineConfig| {
            let PreparedStep { parts, gradient_scale } = PreparedStep::of(&step, config, 2).unwrap();
            let parts: Vec<_> = parts.iter().map(|p| (p.is_first, p.is_last, p.stat_pictures)).collect();
            (parts, gradient_scale)
        };
        assert_eq!(prepare(&config(4)), (vec![(true, false, 16.0), (false, true, 4.0)], 1.0 / 20.0));
        let local = EngineConfig { sync_batch_norm: false, gradients_mean: false, ..config(4) };
        assert_eq!(prepare(&local), (vec![(true, false, 8.0), (false, true, 0.0)], 2.0 / 20.0));
        let weighted =
            step.map(|step| Batch { global_weight: Some(1.5 * step.global_samples as f64), ..step });
        assert_eq!(PreparedStep::of(&weighted, &config(4), 2).unwrap().gradient_scale, 1.0 / 30.0);
        let step = [batch(0, 0)];
        assert!(PreparedStep::of(&step[..1], &config(1), 2).unwrap().parts.is_empty());
        assert!(PreparedStep::of(&[], &config(1), 2).unwrap().parts.is_empty());
    }

    #[test]
    fn too_many_micro_batches_are_refused() {
        let full = [batch(8, 8), batch(8, 8)];
        assert_eq!(PreparedStep::of(&full, &config(2), 1).unwrap().parts.len(), 2);
        let refused = PreparedStep::of(&full, &config(1), 1).unwrap_err().to_string();
        assert!(refused.contains("a step of 2 micro-batches; at most 1 are allowed"), "{refused}");
        assert!(PreparedStep::of(&[batch(8, 7)], &config(1), 2).is_err());
    }
}
