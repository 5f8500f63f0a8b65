//! The display of `lockstep watch` while a job waits and trains.

use super::Display;
use crate::cli::{job_loss::JobLoss, output, training_bar::TrainingBar};
use lockstep_protocol::{
    Job, JobState,
    job::{Alert, AlertLevel},
    queue::reason_for_waiting,
    reason::{Reason, ReasonKind},
    stream::{EventBody, Frame},
};
use std::time::{Duration, Instant};

/// Interval between two progress lines without a terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(2);

/// The display of a job: a bar on a terminal, lines without a terminal, or every frame as JSON.
pub(super) struct Progress {
    as_json: bool,
    /// The bar, with the server's estimate of the time left. The bar's own estimate would start again with each connection, and count
    /// validations as slow steps.
    bar: TrainingBar,
    state: JobState,
    /// The last printed text about the job's state or its place in the queue.
    last_text: String,
    /// The text of the job's last state. A job that trains has this text again, so that the same failure to store is printed again.
    state_text: String,
    ranks: u32,
    /// The attempt to which the loss belongs.
    attempt: u32,
    last_line_at: Option<Instant>,
}

impl Progress {
    pub(super) fn new(job: &Job, as_json: bool) -> Self {
        let mut this = Self {
            as_json,
            bar: TrainingBar::new(job.state.to_string(), job.rank_count_now() as usize),
            state: job.state,
            last_text: String::new(),
            // The reason of a running job may be a failure to store.
            state_text: state_text(job.state, None),
            ranks: job.ranks,
            attempt: job.attempt,
            last_line_at: None,
        };
        this.set_pace(job.images_per_second, job.eta_secs);
        if !as_json {
            this.bar.set_plan(job.total_steps, job.steps_per_epoch, job.step);
        }
        this
    }

    /// Sets the speed and the time left. Only a running job has a time left.
    fn set_pace(&mut self, images_per_second: Option<f64>, eta_secs: Option<f64>) {
        self.bar.images_per_second = images_per_second;
        self.bar.eta_secs = eta_secs.filter(|_| self.state == JobState::Running);
    }

    /// Prints a text unless it is the last printed text.
    fn print_change(&mut self, text: String) -> anyhow::Result<()> {
        if self.last_text != text {
            self.bar.print_line(&text)?;
            self.last_text = text;
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
                    self.bar.loss = JobLoss::new(fewer_ranks.unwrap_or(self.ranks) as usize);
                }
                // `show_job` prints the place and the current reason for waiting.
                let still_waits = self.state == *state && state.is_waiting();
                if self.state != *state {
                    // The server sends a new estimate when the job trains.
                    self.bar.eta_secs = None;
                }
                self.state = *state;
                self.bar.label = state.to_string();
                self.bar.draw();
                if !state.is_final() && !still_waits {
                    self.state_text = state_text(*state, reason.as_deref());
                    self.print_change(self.state_text.clone())?;
                }
            }
            EventBody::Plan { total_steps, steps_per_epoch, start_step, .. } => {
                self.bar.set_plan(*total_steps, *steps_per_epoch, *start_step);
                if *start_step > 0 {
                    self.bar
                        .print_line(format_args!("continues from the checkpoint of step {start_step}"))?;
                }
            }
            EventBody::Metrics { name, steps, values, .. } if name == "loss" => {
                let losses = steps.iter().zip(values).map(|(step, loss)| (*step, loss.unwrap_or(f32::NAN)));
                self.last_text.clone_from(&self.state_text);
                if let Some((step, _)) = self.bar.loss.add(losses).last() {
                    self.bar.step = self.bar.step.max(*step);
                    self.show_step()?;
                }
            }
            EventBody::Evaluation { evaluation, .. } => {
                self.bar.print_line(format!(
                    "epoch {}: validation accuracy {}, loss {}",
                    evaluation.epoch,
                    lockstep_protocol::numbers::accuracy_of(evaluation.accuracy, Some(evaluation.samples)),
                    lockstep_protocol::numbers::loss(evaluation.loss)
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
                self.bar.print_line(format!("{level}: {}{text}", output::one_line(title)))?;
            }
            _ => {}
        }
        Ok(())
    }

    fn show_step(&mut self) -> anyhow::Result<()> {
        self.bar.draw();
        if self.bar.is_drawn() || self.last_line_at.is_some_and(|at| at.elapsed() < LINE_INTERVAL) {
            return Ok(());
        }
        self.last_line_at = Some(Instant::now());
        let TrainingBar { step, total_steps, .. } = self.bar;
        let (epoch, words) = (self.bar.epoch(), self.bar.describe());
        output::line(format_args!("epoch {epoch}, step {step} of {total_steps}: {words}"))
    }

    pub(super) fn finish(&self) {
        self.bar.finish();
    }
}

/// Formats a state and its reason: `running: trains on 1 of 2 ranks`.
fn state_text(state: JobState, reason: Option<&str>) -> String {
    format!("{state}{}", reason.map(|reason| format!(": {reason}")).unwrap_or_default())
}

impl Display for Progress {
    fn show(&mut self, frame: &Frame) -> anyhow::Result<()> {
        if self.as_json {
            return output::line(serde_json::to_string(frame)?);
        }
        let (images_per_second, eta_secs) = match frame {
            Frame::Event(event) => return self.show_event(&event.body),
            Frame::Progress(pace) => (pace.images_per_second, pace.eta_secs),
            Frame::Hello { job, .. } => (job.images_per_second, job.eta_secs),
            _ => return Ok(()),
        };
        self.set_pace(images_per_second, eta_secs);
        self.bar.draw();
        Ok(())
    }

    fn warn(&self, text: &str) {
        self.bar.warn(text);
    }

    fn needs_polling(&self) -> bool {
        (self.state.is_waiting() || self.state == JobState::Running) && !self.as_json
    }

    /// Prints the state of a job that does not train, or has a reason, with its place in the queue and the reason. Prints again only after
    /// a change.
    fn show_job(&mut self, job: &Job) -> anyhow::Result<()> {
        // The stream may be behind the job that was read. It reports all other changes in order.
        let was_shown = job.state == self.state && !job.state.is_final();
        let can_lack_reason = !job.state.is_waiting() && job.state != JobState::Running;
        let is_known = job.reason.is_some() || job.queue.is_some() || can_lack_reason;
        if self.as_json || !was_shown || !is_known {
            return Ok(());
        }
        let place = job.queue.as_ref().map(|queue| format!(", place {} in the queue", queue.place));
        let why = reason_for_waiting(job).map(|why| format!(": {why}"));
        self.print_change(format!("{}{}{}", job.state, place.unwrap_or_default(), why.unwrap_or_default()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_protocol::stream::{Event, Pace};

    #[test]
    fn the_loss_is_the_ranks_mean_and_the_time_left_is_the_servers() {
        let mut progress = Progress {
            as_json: false,
            bar: TrainingBar::new("running".into(), 2),
            state: JobState::Running,
            last_text: String::new(),
            state_text: "running".into(),
            ranks: 2,
            attempt: 1,
            last_line_at: None,
        };
        let event = |seq, body| Frame::Event(Event { seq, at: jiff::Timestamp::UNIX_EPOCH, body });
        let loss = |rank: u32, value| {
            let (name, values) = ("loss".into(), vec![Some(value)]);
            let body = EventBody::Metrics { attempt: 1, rank, name, steps: vec![1], values };
            event(1 + u64::from(rank), body)
        };
        progress.print_change("running: the server cannot store".into()).unwrap();
        progress.show(&loss(0, 2.0)).unwrap();
        assert_eq!(progress.last_text, "running", "the next failure to store is printed again");
        assert_eq!(progress.bar.describe(), "", "the loss of one rank is not the job's loss");
        progress.show(&loss(1, 3.0)).unwrap();
        assert_eq!(progress.bar.describe(), "loss 2.5000");
        let pace = Pace { step: 2, images_per_second: Some(9.56), eta_secs: Some(1020.0) };
        progress.show(&Frame::Progress(pace)).unwrap();
        assert_eq!(progress.bar.describe(), "loss 2.5000, 9.6 images/s, 17 min left");
        let paused = EventBody::State { state: JobState::Paused, reason: None, cause: None, attempt: 1 };
        progress.show(&event(3, paused)).unwrap();
        assert_eq!(progress.bar.describe(), "loss 2.5000, 9.6 images/s");
    }
}
