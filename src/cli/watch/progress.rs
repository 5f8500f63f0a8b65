//! The display of `lockstep watch` while a job waits and trains.

use super::Display;
use crate::cli::{age::span, job_loss::JobLoss, output};
use indicatif::{ProgressBar, ProgressDrawTarget};
use lockstep_protocol::numbers::rate;
use lockstep_protocol::{
    Job, JobState,
    job::{Alert, AlertLevel},
    queue::waits_for,
    reason::{Reason, ReasonKind},
    stream::{EventBody, Frame},
};
use std::{
    io::IsTerminal,
    time::{Duration, Instant},
};

/// Interval between two progress lines without a terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(2);

/// The display of a job: a bar on a terminal, lines without a terminal, or every frame as JSON.
pub(super) struct Progress {
    json: bool,
    /// The bar, on a terminal, once the run's length is known.
    bar: Option<ProgressBar>,
    state: JobState,
    /// The last printed text about the job's place in the queue.
    last_place: String,
    steps_per_epoch: u64,
    total_steps: u64,
    step: u64,
    ranks: u32,
    /// The attempt to which [`Progress::loss`] belongs.
    attempt: u32,
    loss: JobLoss,
    images_per_second: Option<f64>,
    /// The server's estimate of the time left, in seconds. The bar's own estimate would start again with each connection, and count
    /// validations as slow steps.
    eta_secs: Option<f64>,
    last_line: Option<Instant>,
}

impl Progress {
    pub(super) fn new(job: &Job, json: bool) -> Self {
        let mut this = Self {
            json,
            bar: None,
            state: job.state,
            last_place: String::new(),
            steps_per_epoch: 0,
            total_steps: 0,
            step: job.step,
            ranks: job.ranks,
            attempt: job.attempt,
            loss: JobLoss::new(job.ranks_now() as usize),
            images_per_second: job.images_per_second,
            eta_secs: job.eta_secs,
            last_line: None,
        };
        this.set_plan(job.total_steps, job.steps_per_epoch, job.step);
        this
    }

    fn set_plan(&mut self, total_steps: u64, steps_per_epoch: u64, step: u64) {
        (self.total_steps, self.steps_per_epoch, self.step) = (total_steps, steps_per_epoch, step);
        let is_terminal = || std::io::stderr().is_terminal() && std::io::stdout().is_terminal();
        if self.bar.is_none() && total_steps > 0 && !self.json && is_terminal() {
            self.bar = Some(ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr_with_hz(10)));
        }
        if let Some(bar) = &self.bar {
            bar.set_length(total_steps);
            bar.set_position(step);
        }
        self.update_bar();
    }

    /// Sets the prefix and the message of the bar.
    fn update_bar(&self) {
        let Some(bar) = &self.bar else { return };
        bar.set_style(output::bar_style("{prefix:.bold} {wide_bar} {pos}/{len} {msg}"));
        bar.set_prefix(self.state.as_str());
        bar.set_message(self.words());
    }

    /// Formats the loss, the speed and the time left, if they are known. Only a running job has a time left.
    fn words(&self) -> String {
        let loss = self.loss.newest.map(|loss| format!("loss {loss:.4}"));
        let speed = self.images_per_second.map(|v| format!("{} images/s", rate(v)));
        let left = self.eta_secs.filter(|_| self.state == JobState::Running);
        let left = left.map(|secs| format!("{} left", span(secs.round() as i64)));
        [loss, speed, left].into_iter().flatten().collect::<Vec<_>>().join(", ")
    }

    fn print_once(&mut self, text: String) -> anyhow::Result<()> {
        if self.last_place != text {
            self.print_line(text.clone())?;
            self.last_place = text;
        }
        Ok(())
    }

    fn show_event(&mut self, body: &EventBody) -> anyhow::Result<()> {
        match body {
            EventBody::State { state, reason, cause, attempt } => {
                let fewer_ranks = match cause.as_ref().map(Reason::kind) {
                    Some(ReasonKind::FewerRanks { ranks, .. }) => Some(*ranks),
                    _ => None,
                };
                if fewer_ranks.is_some() || self.attempt != *attempt {
                    self.attempt = *attempt;
                    self.loss = JobLoss::new(fewer_ranks.unwrap_or(self.ranks) as usize);
                }
                // `show_place` prints the place and the current reason for waiting.
                let still_waits = self.state == *state && state.is_waiting();
                if self.state != *state {
                    // The server sends a new estimate when the job trains.
                    self.eta_secs = None;
                }
                self.state = *state;
                self.update_bar();
                if !state.is_final() && !still_waits {
                    let reason = reason.as_ref().map(|r| format!(": {r}")).unwrap_or_default();
                    self.print_once(format!("{state}{reason}"))?;
                }
            }
            EventBody::Plan { total_steps, steps_per_epoch, start_step, .. } => {
                self.set_plan(*total_steps, *steps_per_epoch, *start_step);
            }
            EventBody::Metrics { name, steps, values, .. } if name == "loss" => {
                let losses = steps.iter().zip(values).map(|(step, loss)| (*step, loss.unwrap_or(f32::NAN)));
                if let Some((step, _)) = self.loss.add(losses).last() {
                    self.step = self.step.max(*step);
                    self.update_steps()?;
                }
            }
            EventBody::Evaluation { evaluation, .. } => {
                self.print_line(format!(
                    "epoch {}: validation accuracy {}, loss {:.4}",
                    evaluation.epoch,
                    lockstep_protocol::numbers::accuracy_of(evaluation.accuracy, Some(evaluation.samples)),
                    evaluation.loss
                ))?;
            }
            EventBody::Alert { alert: Alert { title, text, level }, .. } => {
                let level = match level {
                    AlertLevel::Info => "alert",
                    AlertLevel::Warn => "warning",
                    AlertLevel::Error => "error",
                };
                let text =
                    if text.is_empty() { String::new() } else { format!(": {}", output::one_line(text)) };
                self.print_line(format!("{level}: {}{text}", output::one_line(title)))?;
            }
            _ => {}
        }
        Ok(())
    }

    /// Prints a line that stays above the bar.
    fn print_line(&mut self, text: String) -> anyhow::Result<()> {
        match &self.bar {
            Some(bar) => bar.suspend(|| output::line(text)),
            None => output::line(text),
        }
    }

    fn update_steps(&mut self) -> anyhow::Result<()> {
        if let Some(bar) = &self.bar {
            bar.set_position(self.step);
            bar.set_message(self.words());
        } else if self.last_line.is_none_or(|at| at.elapsed() >= LINE_INTERVAL) {
            self.last_line = Some(Instant::now());
            let epoch = self.step.saturating_sub(1).checked_div(self.steps_per_epoch).map_or(1, |e| e + 1);
            output::line(format_args!(
                "epoch {epoch}, step {} of {}: {}",
                self.step,
                self.total_steps,
                self.words()
            ))?;
        }
        Ok(())
    }

    pub(super) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

impl Display for Progress {
    fn show(&mut self, frame: &Frame) -> anyhow::Result<()> {
        if self.json {
            return output::line(serde_json::to_string(frame)?);
        }
        let (images_per_second, eta_secs) = match frame {
            Frame::Event(event) => return self.show_event(&event.body),
            Frame::Progress(pace) => (pace.images_per_second, pace.eta_secs),
            Frame::Hello { job, .. } => (job.images_per_second, job.eta_secs),
            _ => return Ok(()),
        };
        (self.images_per_second, self.eta_secs) = (images_per_second, eta_secs);
        self.update_bar();
        Ok(())
    }

    fn warn(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| output::warn(text)),
            None => output::warn(text),
        }
    }

    fn asks_for_place(&self) -> bool {
        self.state.is_waiting() && !self.json
    }

    /// Prints the state of a job that does not train, its place in the queue and the reason. Prints again only after a change.
    fn show_place(&mut self, job: &Job) -> anyhow::Result<()> {
        // The stream may be behind the job that was read. It reports all other changes in order.
        let was_shown = job.state == self.state && job.state != JobState::Running && !job.state.is_final();
        let is_known = job.reason.is_some() || job.queue.is_some() || !job.state.is_waiting();
        if self.json || !was_shown || !is_known {
            return Ok(());
        }
        let place = job.queue.as_ref().map(|queue| format!(", place {} in the queue", queue.place));
        let why = waits_for(job).map(|why| format!(": {why}"));
        self.print_once(format!("{}{}{}", job.state, place.unwrap_or_default(), why.unwrap_or_default()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_protocol::stream::{Event, Pace};

    #[test]
    fn the_loss_is_the_ranks_mean_and_the_time_left_is_the_servers() {
        let mut progress = Progress {
            json: false,
            bar: None,
            state: JobState::Running,
            last_place: String::new(),
            steps_per_epoch: 10,
            total_steps: 100,
            step: 1,
            ranks: 2,
            attempt: 1,
            loss: JobLoss::new(2),
            images_per_second: None,
            eta_secs: None,
            last_line: None,
        };
        let loss = |rank: u32, value| {
            let (name, values) = ("loss".into(), vec![Some(value)]);
            let body = EventBody::Metrics { attempt: 1, rank, name, steps: vec![1], values };
            Frame::Event(Event { seq: 1 + u64::from(rank), at: jiff::Timestamp::UNIX_EPOCH, body })
        };
        progress.show(&loss(0, 2.0)).unwrap();
        assert_eq!(progress.words(), "", "the loss of one rank is not the job's loss");
        progress.show(&loss(1, 3.0)).unwrap();
        assert_eq!(progress.words(), "loss 2.5000");
        let pace = Pace { step: 2, images_per_second: Some(9.56), eta_secs: Some(1020.0) };
        progress.show(&Frame::Progress(pace)).unwrap();
        assert_eq!(progress.words(), "loss 2.5000, 9.6 images/s, 17 min left");
        progress.state = JobState::Paused;
        assert_eq!(progress.words(), "loss 2.5000, 9.6 images/s");
    }
}
