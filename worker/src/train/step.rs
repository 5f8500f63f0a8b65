//! One optimizer step: its batches, its start, and its result, which may arrive several steps later.

use super::{Run, TrainError, dataset::report_broken, measure::StepTimes};
use lockstep_data::{DataError, loader::Batch};
use lockstep_engine::StepResult;
use lockstep_protocol::fault;
use std::{sync::atomic::Ordering, time::Instant};

/// A step that was started and whose result has not been reported.
pub(super) struct InFlight {
    pub(super) step: u64,
    pub(super) lr: f32,
    began: Instant,
    /// How long the step waited for its batches, in seconds.
    data_secs: f64,
}

impl Run<'_> {
    /// Runs one optimizer step. Returns false, on every rank, if training stops after it because some rank was asked to
    /// stop.
    pub(super) fn run_step(
        &mut self,
        batches: &mut dyn Iterator<Item = Result<Batch, DataError>>,
    ) -> Result<bool, TrainError> {
        fault::point(fault::STEP_POINT)?;
        let began = Instant::now();
        let micro_batches: Vec<Batch> =
            batches.take(self.plan.config.accumulate).collect::<Result<_, _>>()?;
        if micro_batches.len() < self.plan.config.accumulate {
            return Err(TrainError::Impossible(format!("the data ended before step {}", self.step + 1)));
        }
        let data_secs = began.elapsed().as_secs_f64();
        report_broken(self.training, &self.data);
        let lr = self.schedule.lr(self.step);
        self.request_layer_reports()?;

        self.step += 1;
        self.in_flight.push_back(InFlight { step: self.step, lr, began, data_secs });

        let result = self.engine.start_step(&micro_batches, lr)?;

        if let Err(error) = self.update_average() {
            // The engine has returned the result of an earlier step. It is reported before the error, so that `in_flight`
            // contains only steps whose results the engine still has.
            if let Some(result) = result {
                let waited_secs = 0.0;
                self.report_step(&result, waited_secs);
            }
            return Err(error);
        }
        let wait_began = Instant::now();
        self.record_not_finite(result.as_ref());
        let vote = self.vote_if_due();
        if let Some(result) = result {
            self.report_step(&result, wait_began.elapsed().as_secs_f64());
        }
        self.announce_checkpoints();
        self.report_layer_times();
        let continues = vote?;
        if continues {
            self.report_histograms()?;
        }
        Ok(continues)
    }

    /// Updates the moving average of the weights when an update is due. Rank 0 keeps the average, and the other ranks
    /// receive it when it is evaluated. If the network is split among ranks, each rank keeps the average of its part.
    pub(super) fn update_average(&mut self) -> Result<(), TrainError> {
        let decay = self.schedule.average_decay(self.step);
        if let Some(decay) = decay.filter(|_| self.is_average_kept_here()) {
            self.engine.update_average(decay)?;
        }
        self.last_average_step = self.step;
        Ok(())
    }

    /// Waits for all steps in flight. Afterwards the engine's state is that after step `self.step`, the newest started
    /// step.
    pub(super) fn drain(&mut self) -> Result<(), TrainError> {
        let (mut vote, waited_secs) = (Ok(true), 0.0);
        for result in self.engine.finish_steps()? {
            self.record_not_finite(Some(&result));
            // Every rank votes once per result, so no rank returns before all ranks have finished their steps. A vote to
            // stop has no effect here, because the next vote of `run_step` repeats it. After a failed vote there are no
            // further votes, but the remaining results are still reported.
            if vote.is_ok() {
                vote = self.vote_now();
            }
            self.report_step(&result, waited_secs);
        }
        vote.map(|_| ())
    }

    /// Reports the oldest step in flight. `waited_secs` is the time of waiting for other ranks after the step.
    pub(super) fn report_step(&mut self, result: &StepResult, waited_secs: f64) {
        let Some(InFlight { step, lr, began, data_secs }) = self.in_flight.pop_front() else { return };
        // An asynchronous engine times the step itself, because the time measured here would include other steps.
        let is_timed_by_engine = result.step_secs > 0.0;
        let (secs, all_reduce_secs) = if is_timed_by_engine {
            (result.step_secs, result.all_reduce_secs)
        } else {
            (began.elapsed().as_secs_f64(), result.all_reduce_secs + waited_secs)
        };
        self.training.progress.store(step, Ordering::Relaxed);
        let observer = self.training.observer;
        let plan = &self.plan;
        let epoch = plan.epoch_of(step);
        self.skipped.record(step, result.is_skipped());
        if result.samples > 0 {
            observer.metric("loss", step, result.loss);
            observer.metric("accuracy", step, result.correct as f32 / result.samples as f32);
            if let Some(line) = self.loss_lines.line_if_due(epoch, step, plan.steps_per_epoch, result.loss) {
                observer.log(&line);
            }
        }
        observer.metric("step_ms", step, (secs * 1e3) as f32);
        observer.metric("data_ms", step, (data_secs * 1e3) as f32);
        observer.metric("all_reduce_ms", step, (all_reduce_secs * 1e3) as f32);
        if self.training.is_first() {
            observer.metric("lr", step, lr);
            observer.metric("grad_norm", step, result.grad_norm);
            if let Some(scale) = result.loss_scale {
                observer.metric("loss_scale", step, scale);
                observer.metric("skipped_steps", step, self.skipped.total as f32);
            }
            observer.metric("images_per_second", step, (plan.pictures_of(step) as f64 / secs) as f32);
        }
        let times = StepTimes { secs, data_secs, all_reduce_secs, axis_secs: result.axis_secs };
        self.throughput.record_step(step, epoch, times, result.samples);
        // The engine's own time does not contain the wait for batches.
        self.compare_step_time(step, if is_timed_by_engine { secs } else { secs - data_secs });
    }

    /// Logs on rank 0 how many pictures CPU cores have decoded although the GPU decodes, and why, each time another
    /// reason appears.
    pub(super) fn report_decoder(&mut self) {
        let Some(decoded) = self.data.decoded().filter(|_| self.training.is_first()) else { return };
        let reasons = decoded.by_cores.len() + usize::from(decoded.given_up);
        if reasons > self.logged_decoder_reasons {
            self.logged_decoder_reasons = reasons;
            self.training.observer.log(&format!("so far, {decoded}"));
        }
    }
}
