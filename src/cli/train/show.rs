//! The display of `lockstep train`: a progress bar on a terminal, otherwise rank 0's log lines, with the mean loss of all ranks.

use super::super::{job_loss::JobLoss, output};
use indicatif::{ProgressBar, ProgressDrawTarget};
use lockstep_protocol::{
    JobSpec,
    agent::{AttemptEvent, CheckpointInfo},
    best::best_checkpoint,
    numbers::{percent, rate},
    throughput::Throughput,
};
use std::{
    collections::{BTreeMap, VecDeque},
    io::IsTerminal,
};

/// The state of the display, from the ranks' reports so far.
pub(super) struct Show {
    spec: JobSpec,
    bar: Option<ProgressBar>,
    steps_per_epoch: u64,
    /// The mean loss of the ranks whose records this process reads.
    loss: JobLoss,
    /// Names the ranks of [`Show::loss`]: ` (rank 1 of 4)`. Empty if [`Show::loss`] has all ranks of the job.
    rank_note: String,
    /// Rank 0's lines that have not been printed: the line of a step waits for the losses of the other ranks.
    lines: VecDeque<String>,
    /// Whether this process reads rank 0's log lines.
    has_lines: bool,
    /// Losses of steps whose lines have not been printed.
    losses: BTreeMap<u64, f32>,
    /// Whether no more losses will arrive.
    has_all_losses: bool,
    /// The checkpoints of this run that exist.
    checkpoints: Vec<CheckpointInfo>,
    /// Throughput, computed as on the server.
    speed: Throughput,
    /// Accuracy of the newest validation, 0 to 1, and its number of pictures.
    pub(super) accuracy: Option<(f64, u64)>,
    /// Number of optimizer steps of the rank that is furthest ahead.
    pub(super) step: u64,
}

impl Show {
    /// Creates a display for a run in which this process reads the records of `ranks`. `checkpoints` are the run's existing checkpoints.
    pub(super) fn new(spec: &JobSpec, ranks: &[u32], checkpoints: Vec<CheckpointInfo>) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
            // Nothing is shown until the run's length is known.
            bar.set_style(output::bar_style(""));
            bar
        });
        Self {
            spec: spec.clone(),
            bar,
            steps_per_epoch: 0,
            loss: JobLoss::new(ranks.len()),
            rank_note: match (ranks, spec.parallel.ranks) {
                (ranks, total) if ranks.len() == total as usize => String::new(),
                ([rank], total) => format!(" (rank {rank} of {total})"),
                (ranks, total) => format!(" ({} of {total} ranks)", ranks.len()),
            },
            lines: VecDeque::new(),
            has_lines: ranks.contains(&0),
            losses: BTreeMap::new(),
            has_all_losses: false,
            checkpoints,
            speed: Throughput::default(),
            accuracy: None,
            step: 0,
        }
    }

    /// Shows new records of a rank.
    pub(super) fn update(&mut self, events: Vec<AttemptEvent>) {
        for event in events {
            match event {
                AttemptEvent::Running { total_steps, steps_per_epoch, start_step, train_samples } => {
                    self.speed = Throughput::new(&self.spec, train_samples);
                    self.steps_per_epoch = steps_per_epoch;
                    self.step = self.step.max(start_step);
                    if let Some(bar) = &self.bar {
                        bar.set_style(output::bar_style("{bar:30} {pos}/{len}"));
                        bar.set_length(total_steps);
                        bar.set_position(start_step);
                        bar.reset_eta();
                    }
                }
                AttemptEvent::Metrics { rank, columns } => {
                    for column in columns {
                        let Some(step) = column.steps.last() else { continue };
                        self.step = self.step.max(*step);
                        match column.name.as_str() {
                            "loss" => {
                                let losses = column.steps.iter().copied().zip(column.values.iter().copied());
                                let means = self.loss.add(losses);
                                if self.has_lines {
                                    self.losses.extend(means);
                                }
                            }
                            "step_ms" if rank == 0 => self.speed.add(&column.steps, &column.values),
                            _ => {}
                        }
                    }
                    self.draw();
                }
                AttemptEvent::Log { rank: 0, lines } => {
                    // The command itself reports a stop and a failure.
                    let is_reported = |text: &String| {
                        ["asked to stop: ", "failed after step "].iter().any(|start| text.starts_with(start))
                    };
                    let lines = lines.into_iter().map(|line| line.text);
                    self.lines.extend(lines.filter(|text| !is_reported(text)));
                }
                AttemptEvent::Evaluation(evaluation) => {
                    self.accuracy = Some((evaluation.accuracy, evaluation.samples))
                }
                AttemptEvent::Checkpoint(written) => self.checkpoints.push(written),
                AttemptEvent::CheckpointRemoved { epoch, step } => {
                    self.checkpoints
                        .retain(|checkpoint| (checkpoint.epoch, checkpoint.step) != (epoch, step));
                }
                _ => {}
            }
        }
        self.print_lines();
    }

    /// Prints rank 0's lines in order, up to the first step whose loss may still arrive.
    fn print_lines(&mut self) {
        while let Some(line) = self.lines.front() {
            let text = match parse_step_line(line) {
                None => Some(line.clone()),
                Some((start, step)) => {
                    let loss = self.losses.get(&step).copied();
                    if loss.is_none() && !self.has_all_losses {
                        break;
                    }
                    // Losses of earlier steps have been printed.
                    self.losses = self.losses.split_off(&(step + 1));
                    let with_mean = |loss| format!("{start}, loss is {loss}{}", self.rank_note);
                    // The bar already shows the loss.
                    self.bar.is_none().then(|| loss.map_or_else(|| line.clone(), with_mean))
                }
            };
            self.lines.pop_front();
            let Some(text) = text else { continue };
            // Training continues even if the reader of the output has exited.
            let _ = match &self.bar {
                Some(bar) => bar.suspend(|| output::line(&text)),
                None => output::line(&text),
            };
        }
    }

    /// Describes the best of the run's checkpoints: `; the best is 2-24 with 88.6 %`.
    pub(super) fn describe_best(&self) -> Option<String> {
        let (best, accuracy) = best_checkpoint(&self.checkpoints)?;
        Some(format!("; the best is {}-{} with {}", best.epoch, best.step, percent(accuracy)))
    }

    fn draw(&self) {
        let Some(bar) = &self.bar else { return };
        bar.set_position(self.step);
        // The time left is unknown before the first step.
        let Some(loss) = self.loss.newest.filter(|_| self.steps_per_epoch > 0) else { return };
        let epoch = self.step.saturating_sub(1) / self.steps_per_epoch + 1;
        let accuracy = self.accuracy.map(|(a, _)| format!(", accuracy {}", percent(a))).unwrap_or_default();
        let speed = self.speed.images_per_second();
        let speed = speed.map(|v| format!(", {} images/s", rate(v))).unwrap_or_default();
        bar.set_style(output::bar_style("{bar:30} {pos}/{len} {msg}, {eta} left"));
        bar.set_message(format!("epoch {epoch}, loss {loss:.4}{}{accuracy}{speed}", self.rank_note));
    }

    pub(super) fn finish(&mut self) {
        self.has_all_losses = true;
        self.print_lines();
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Returns the part of a log line before the loss of a step, and the step: `epoch: 1 step: 7, loss is 2.3`.
fn parse_step_line(line: &str) -> Option<(&str, u64)> {
    let (start, _) = line.split_once(", loss is ")?;
    Some((start, start.split_once(" step: ")?.1.parse().ok()?))
}
