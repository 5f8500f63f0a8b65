//! The bar of `lockstep train` and `lockstep watch` on a terminal, with the newest loss, the speed and the time left.

use super::{age::format_duration, job_loss::JobLoss, output};
use indicatif::{ProgressBar, ProgressDrawTarget};
use lockstep_protocol::numbers::{loss, rate};
use std::{fmt::Display, io::IsTerminal};

#[derive(Default)]
pub(crate) struct TrainingBar {
    /// The bar, on a terminal, once the run's length is known.
    bar: Option<ProgressBar>,
    /// The text before the bar, followed by the epoch.
    pub(crate) label: String,
    pub(crate) total_steps: u64,
    steps_per_epoch: u64,
    pub(crate) step: u64,
    pub(crate) loss: JobLoss,
    pub(crate) images_per_second: Option<f64>,
    pub(crate) eta_secs: Option<f64>,
}

impl TrainingBar {
    /// Creates a bar for an attempt with this many ranks.
    pub(crate) fn new(label: String, ranks: usize) -> Self {
        Self { label, loss: JobLoss::new(ranks), ..Self::default() }
    }

    pub(crate) fn set_plan(&mut self, total_steps: u64, steps_per_epoch: u64, step: u64) {
        (self.total_steps, self.steps_per_epoch, self.step) = (total_steps, steps_per_epoch, step);
        let is_terminal = || std::io::stderr().is_terminal() && std::io::stdout().is_terminal();
        if self.bar.is_none() && total_steps > 0 && is_terminal() {
            let bar =
                ProgressBar::with_draw_target(Some(total_steps), ProgressDrawTarget::stderr_with_hz(10));
            bar.set_style(output::bar_style("{prefix:.bold} {wide_bar} {pos}/{len} {msg}"));
            self.bar = Some(bar);
        }
        self.draw();
    }

    pub(crate) fn is_drawn(&self) -> bool {
        self.bar.is_some()
    }

    /// Draws the current values, on a terminal.
    pub(crate) fn draw(&self) {
        let Some(bar) = &self.bar else { return };
        bar.set_length(self.total_steps);
        bar.set_position(self.step);
        bar.set_prefix(if self.step == 0 {
            self.label.clone()
        } else {
            format!("{}, epoch {}", self.label, self.epoch())
        });
        bar.set_message(self.describe());
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.step.saturating_sub(1).checked_div(self.steps_per_epoch).map_or(1, |epoch| epoch + 1)
    }

    /// Formats the loss, the speed and the time left, if they are known.
    pub(crate) fn describe(&self) -> String {
        let loss = self.loss.newest.map(|newest| format!("loss {}", loss(newest.into())));
        let speed = self.images_per_second.map(|v| format!("{} images/s", rate(v)));
        let time_left = self.eta_secs.map(|secs| format!("{} left", format_duration(secs.round() as i64)));
        [loss, speed, time_left].into_iter().flatten().collect::<Vec<_>>().join(", ")
    }

    /// Prints a line that stays above the bar.
    pub(crate) fn print_line(&self, text: impl Display) -> anyhow::Result<()> {
        match &self.bar {
            Some(bar) => bar.suspend(|| output::line(text)),
            None => output::line(text),
        }
    }

    /// Prints a line to standard error that stays above the bar.
    pub(crate) fn warn(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| output::warn(text)),
            None => output::warn(text),
        }
    }

    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
