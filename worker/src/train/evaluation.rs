//! Evaluation: validation passes with the weights and with their moving average (EMA), votes to stop during an
//! evaluation, and reports.

use super::{Run, TrainError, Training, dataset::report_broken, plan::RunPlan, votes::Votes};
use lockstep_comm::any_rank;
use lockstep_data::{
    DataError,
    loader::{Batch, Shape, View, replaced},
};
use lockstep_engine::{Engine, EngineError, EvalResult};
use lockstep_host::tensors::NamedTensors;
use lockstep_kernels::loss;
use lockstep_protocol::numbers::{plural, standard_error};
use lockstep_protocol::{
    agent::{AttemptEvent, Evaluation},
    spec::Precision,
};
use std::{sync::atomic::Ordering, time::Instant};

impl Run<'_> {
    /// Evaluates the current weights, in bfloat16 if the range of float16 does not suffice. Returns false if the ranks voted to stop
    /// before the end. Nothing was measured then, and the evaluation is due when the run continues.
    pub(super) fn evaluate(&mut self) -> Result<bool, TrainError> {
        if self.data.shape.validation_samples == 0 {
            return Ok(true);
        }
        self.drain()?;
        self.check_state()?;
        let is_complete = match self.validate() {
            // All ranks have the same sums over all ranks, so either all ranks take this path or none does.
            Err(TrainError::Diverged { .. }) if self.engine.precision() == Precision::Fp16 => {
                self.fall_back_to_bfloat16("the validation's loss")? && self.validate()?
            }
            result => result?,
        };
        if !is_complete {
            let step = self.step;
            self.training.log([format!(
                "the evaluation after step {step} is interrupted; it is repeated when the job continues"
            )]);
        }
        Ok(is_complete)
    }

    /// Runs a validation pass with the weights and, if it exists, with their average. Returns false if the ranks voted
    /// to stop before the end.
    fn validate(&mut self) -> Result<bool, TrainError> {
        self.throughput.report("evaluating");
        if !self.training.spec.parallel.sync_batch_norm {
            // Running statistics differ between ranks. The checkpoint has the statistics of rank 0.
            self.engine.broadcast_statistics()?;
        }
        let Some(evaluation) = self.run_validation_pass("the validation's loss")? else { return Ok(false) };
        let mut averaged = None;
        if self.any_rank_has_average()? {
            let Some(evaluation) = self.run_average_pass()? else { return Ok(false) };
            averaged = Some(evaluation);
        }
        if self.training.is_first() {
            self.report_evaluation(&evaluation, averaged.as_ref());
        }
        self.follow_validation(&evaluation, averaged.as_ref());
        self.evaluation = Some(evaluation);
        self.throughput.report("training");
        Ok(true)
    }

    /// Reports metrics, log lines and the event of an evaluation, and of the evaluation of the average.
    fn report_evaluation(&self, evaluation: &Evaluation, averaged: Option<&Evaluation>) {
        let observer = self.training.observer;
        let log = |whose: &str, measured: &Evaluation| {
            observer.log(&format!(
                "epoch: {} validation accuracy {whose}is {:.2} %{}, loss is {:.4} ({} in {:.1} s)",
                measured.epoch,
                measured.accuracy * 100.0,
                standard_error(measured.accuracy, measured.samples),
                measured.loss,
                plural(measured.samples, "picture"),
                measured.secs
            ));
        };
        observer.metric("val_loss", self.step, evaluation.loss as f32);
        observer.metric("val_accuracy", self.step, evaluation.accuracy as f32);
        log("", evaluation);
        if let Some(averaged) = averaged {
            observer.metric("val_ema_loss", self.step, averaged.loss as f32);
            observer.metric("val_ema_accuracy", self.step, averaged.accuracy as f32);
            log("of the averaged weights ", averaged);
        }
        observer.event(&AttemptEvent::Evaluation(evaluation.clone()));
    }

    /// Collective: whether any rank has an average of the weights. The answer is the same on every rank.
    fn any_rank_has_average(&self) -> Result<bool, TrainError> {
        if self.training.spec.train.ema_decay <= 0.0 {
            return Ok(false);
        }
        Ok(any_rank(self.training.group.as_ref(), self.engine.has_average())?)
    }

    /// As [`Run::run_validation_pass`], for the averaged weights. Afterwards the engine has the trained weights again.
    fn run_average_pass(&mut self) -> Result<Option<Evaluation>, TrainError> {
        let average = if self.is_average_kept_here() { self.engine.averaged()? } else { None };
        let trained = average.is_some().then(|| self.engine.parameters()).transpose()?;
        self.has_last_weights = false;
        self.set_parameters_everywhere(average.as_ref())?;
        let measured = self.run_validation_pass("the loss of the averaged weights in validation");
        // Every rank has a result, or every rank has diverged. After another error, ranks join no further collective calls.
        if matches!(measured, Ok(_) | Err(TrainError::Diverged { .. })) {
            self.set_parameters_everywhere(trained.as_ref())?;
            self.has_last_weights = true;
        }
        measured
    }

    /// Sets rank 0's `parameters` on every rank. No rank may still be using the previous parameters.
    fn set_parameters_everywhere(&mut self, parameters: Option<&NamedTensors>) -> Result<(), TrainError> {
        if let Some(parameters) = parameters {
            self.engine.set_parameters(parameters)?;
        }
        Ok(self.engine.broadcast_parameters()?)
    }

    /// One pass over the validation split. Each rank evaluates its part and the sums are added up, so every picture
    /// counts once. `what` names the loss in an error. Returns `None` if the ranks voted to stop before the end.
    fn run_validation_pass(&mut self, what: &str) -> Result<Option<Evaluation>, TrainError> {
        let began = Instant::now();
        let Training { group, .. } = self.training;
        self.engine.set_image_size(self.data.shape.image_size)?;
        let mut measured = EvalResult::default();
        let parallel = &self.training.spec.parallel;
        let RunPlan { replica, replicas, .. } = self.plan;
        let batch_size = self.plan.config.batch_size;
        let threads = self.plan.data_threads(&self.data);
        let mut batches = self.data.validation(replica, replicas, batch_size, threads);
        let views = View::of(self.training.spec.evaluate.views);
        let mut votes = Votes::timed(0);
        // Loops over the batch count of the rank with the most pictures, because every rank must take part in every
        // vote.
        let most_pictures = self.data.shape.validation_samples.div_ceil(replicas.into());
        for number in 1..=most_pictures.div_ceil(batch_size as u64) {
            // Ranks among which the network is split compute each batch together, even if a rank has no pictures left.
            let empty_batch = parallel.is_hybrid().then(|| Ok(Batch::default()));
            if let Some(batch) = batches.next().or(empty_batch) {
                match views[..] {
                    [_] => self.engine.start_evaluation(&batch?)?,
                    _ => measured += evaluate_views(&mut *self.engine, &self.data.shape, &batch?, &views)?,
                }
                self.throughput.report_if_due("evaluating");
            }
            if votes.is_due(number) {
                let stop = self.training.stop.load(Ordering::Relaxed);
                let mut vote = [f64::from(u8::from(stop)), votes.step_secs(number)];
                group.all_reduce((&mut vote).into())?;
                let [stop_votes, step_secs] = vote;
                votes.record(number, step_secs / f64::from(group.size()));
                if stop_votes > 0.0 {
                    self.engine.finish_evaluation()?;
                    return Ok(None);
                }
            }
        }
        report_broken(self.training, &self.data);
        measured += self.engine.finish_evaluation()?;
        let EvalResult { loss_sum, correct, samples } = measured;
        let mut sums = [loss_sum, correct as f64, samples as f64];
        if !parallel.counts_pictures(group.rank()) {
            // Ranks that compute the same pictures together have the same results, which are counted once.
            sums = [0.0; 3];
        }
        group.all_reduce((&mut sums).into())?;
        let [loss_sum, correct, samples] = sums;
        let total = self.data.shape.validation_samples as usize;
        let missing = total.saturating_sub(samples as usize);
        if replaced::too_many(missing, total, total) {
            return Err(DataError::Invalid(replaced::too_many_text(missing, total, None)).into());
        }
        if !loss_sum.is_finite() {
            return Err(self.diverged(format!("{what} is not finite")));
        }
        Ok(Some(Evaluation {
            epoch: self.plan.epoch_of(self.step),
            step: self.step,
            samples: samples as u64,
            accuracy: correct / samples,
            loss: loss_sum / samples,
            secs: began.elapsed().as_secs_f64(),
        }))
    }
}

/// Loss and correct predictions of a batch, from the weighted average of the views' logits.
fn evaluate_views(
    engine: &mut dyn Engine,
    shape: &Shape,
    batch: &Batch,
    views: &[View],
) -> Result<EvalResult, EngineError> {
    let (samples, classes) = (batch.labels.len(), shape.classes.len());
    let mut logits = vec![0.0; samples * classes];
    for view in views {
        let view_logits = engine.predict(&view.apply(batch, shape.image_size, shape.channels))?;
        logits.iter_mut().zip(view_logits).for_each(|(sum, logit)| *sum += view.weight * logit);
    }
    let (mixed, smoothing, weights, gradient) = (None, 0.0, None, None);
    let loss = loss::cross_entropy(&logits, &batch.labels, mixed, classes, smoothing, weights, gradient);
    Ok(EvalResult { loss_sum: loss.sum, correct: loss.correct, samples: samples as u64 })
}
