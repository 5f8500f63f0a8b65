//! Early stopping (`[stop]`): every rank follows the metric of the validations. The values are sums over all ranks, so
//! all ranks make the same decision. The progress is part of each checkpoint, so a continued run makes the same
//! decision too.

use super::{Outcome, Run, TrainError};
use crate::checkpoint::StopProgress;
use lockstep_protocol::{
    agent::{AttemptEvent, Evaluation},
    numbers::{percent, plural},
    spec::StopSpec,
};

impl Run<'_> {
    /// Updates the progress of early stopping after a validation. `averaged` is the evaluation of the averaged weights.
    pub(super) fn follow_validation(&mut self, evaluation: &Evaluation, averaged: Option<&Evaluation>) {
        let stop = &self.training.spec.stop;
        let followed = if stop.metric.starts_with("val_ema_") { averaged } else { Some(evaluation) };
        let Some(followed) = followed.filter(|_| stop.patience.is_some()) else { return };
        let value = if stop.metric.ends_with("loss") { followed.loss } else { followed.accuracy };
        self.stop_progress = Some(progress_after(self.stop_progress.take(), stop, value, followed.epoch));
    }

    /// Why the run ends before its last step. `None` if it continues.
    pub(super) fn early_stop_reason(&self) -> Option<String> {
        let progress = self.stop_progress.as_ref().filter(|_| self.step < self.plan.total_steps)?;
        stop_reason(progress, &self.training.spec.stop)
    }

    /// Ends a run that has not improved. All ranks are at the same step, whose checkpoint is written or being written.
    pub(super) fn stop_early(&mut self, why: String) -> Result<Outcome, TrainError> {
        let step = self.step;
        self.training.log([format!("stopped early after step {step}: {why}")]);
        if self.training.is_first() {
            self.training.observer.event(&AttemptEvent::StoppedEarly { step, why });
        }
        self.finish()
    }
}

/// The progress after another validation.
fn progress_after(before: Option<StopProgress>, stop: &StopSpec, value: f64, epoch: u32) -> StopProgress {
    match before {
        Some(before) if !stop.improves(value, before.value) => {
            StopProgress { without: before.without + 1, ..before }
        }
        _ => StopProgress { metric: stop.metric.clone(), value, epoch, without: 0 },
    }
}

/// Why a run with this progress ends. `None` if it continues.
fn stop_reason(progress: &StopProgress, stop: &StopSpec) -> Option<String> {
    let StopProgress { metric, value, epoch, without } = progress;
    if *without < stop.patience? {
        return None;
    }
    let is_loss = metric.ends_with("loss");
    let what = if is_loss { "loss" } else { "accuracy" };
    let whose = if metric.starts_with("val_ema_") { " of the averaged weights" } else { "" };
    let by = if stop.min_delta > 0.0 { format!(" by {}", stop.min_delta) } else { String::new() };
    let value = if is_loss { format!("{value:.4}") } else { percent(*value) };
    let count = plural((*without).into(), "validation");
    Some(format!("validation {what}{whose} has not improved{by} on the {value} of epoch {epoch} in {count}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of validations after which a run ends, and why.
    fn end(stop: &StopSpec, values: &[f64]) -> Option<(usize, String)> {
        let mut progress = None;
        values.iter().zip(1..).find_map(|(value, epoch)| {
            let current = progress_after(progress.take(), stop, *value, epoch);
            // A checkpoint in between changes nothing.
            let json = serde_json::to_string(&current).unwrap();
            let current: StopProgress = serde_json::from_str(&json).unwrap();
            let why = stop_reason(&current, stop);
            progress = Some(current);
            why.map(|why| (epoch as usize, why))
        })
    }

    #[test]
    fn a_run_ends_after_patience_validations_without_improvement() {
        let stop = |metric: &str, patience, min_delta| StopSpec {
            metric: metric.into(),
            patience: Some(patience),
            min_delta,
            goal: None,
        };
        // Equal values are no improvement, and an improvement resets the count.
        let (number, why) = end(&stop("val_accuracy", 2, 0.0), &[0.5, 0.5, 0.6, 0.6, 0.6, 0.9]).unwrap();
        assert_eq!(number, 5);
        assert_eq!(why, "validation accuracy has not improved on the 60.0 % of epoch 3 in 2 validations");
        // Small steps up to the best value plus min_delta are no improvement either.
        let (number, why) =
            end(&stop("val_accuracy", 3, 0.25), &[0.5, 0.625, 0.75, 0.75, 0.875, 1.0]).unwrap();
        assert_eq!(number, 4);
        assert_eq!(
            why,
            "validation accuracy has not improved by 0.25 on the 50.0 % of epoch 1 in 3 validations"
        );
        let (number, why) = end(&stop("val_ema_loss", 1, 0.0), &[2.0, 1.0, 1.5]).unwrap();
        assert_eq!(number, 3);
        assert_eq!(
            why,
            "validation loss of the averaged weights has not improved on the 1.0000 of epoch 2 in 1 validation"
        );
        assert_eq!(end(&stop("val_loss", 2, 0.0), &[3.0, 3.5, 2.5, 2.75, 2.0]), None);
        let up = StopSpec { goal: Some("maximize".into()), ..stop("val_loss", 2, 0.0) };
        assert_eq!(end(&up, &[1.0, 0.9, 0.8]).unwrap().0, 3);
    }
}
