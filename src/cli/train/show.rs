//! The display of `lockstep train`: a progress bar on a terminal, otherwise rank 0's log lines, with the mean loss of all ranks.

use super::super::training_bar::TrainingBar;
use lockstep_protocol::{
    JobSpec,
    agent::{AttemptEvent, CheckpointInfo},
    best::best_checkpoint,
    numbers::percent,
    throughput::Throughput,
};
use std::collections::{BTreeMap, VecDeque};

/// The state of the display, from the ranks' reports so far.
pub(super) struct TrainingDisplay {
    pub(super) spec: JobSpec,
    /// The bar, with the step of the rank that is furthest ahead, and the mean loss of the ranks whose records this process reads.
    pub(super) bar: TrainingBar,
    /// Names the ranks whose records this process reads: ` (rank 1 of 4)`. Empty if they are all ranks of the job.
    rank_note: String,
    /// Rank 0's lines that have not been printed: the line of a step waits for the losses of the other ranks.
    pending_lines: VecDeque<String>,
    /// Whether this process reads rank 0's log lines.
    reads_rank_0: bool,
    /// Losses of steps whose lines have not been printed.
    losses: BTreeMap<u64, f32>,
    /// The checkpoints of this run that exist.
    checkpoints: Vec<CheckpointInfo>,
    /// Throughput, computed as on the server.
    speed: Throughput,
    /// Accuracy of the newest validation, 0 to 1, and its number of pictures.
    pub(super) accuracy: Option<(f64, u64)>,
}

impl TrainingDisplay {
    /// Creates a display for a run in which this process reads the records of `ranks`. `checkpoints` are the run's existing checkpoints.
    pub(super) fn new(spec: &JobSpec, ranks: &[u32], checkpoints: Vec<CheckpointInfo>) -> Self {
        let rank_note = match (ranks, spec.parallel.ranks) {
            (ranks, total) if ranks.len() == total as usize => String::new(),
            ([rank], total) => format!(" (rank {rank} of {total})"),
            (ranks, total) => format!(" ({} of {total} ranks)", ranks.len()),
        };
        Self {
            spec: spec.clone(),
            bar: TrainingBar::new(format!("training{rank_note}"), ranks.len()),
            rank_note,
            pending_lines: VecDeque::new(),
            reads_rank_0: ranks.contains(&0),
            losses: BTreeMap::new(),
            checkpoints,
            speed: Throughput::default(),
            accuracy: None,
        }
    }

    /// Shows new records of a rank.
    pub(super) fn update(&mut self, events: Vec<AttemptEvent>) {
        for event in events {
            match event {
                AttemptEvent::Running { total_steps, steps_per_epoch, start_step, train_samples } => {
                    self.speed = Throughput::new(&self.spec, train_samples);
                    self.bar.set_plan(total_steps, steps_per_epoch, self.bar.step.max(start_step));
                }
                AttemptEvent::Metrics { rank, columns } => {
                    for column in columns {
                        let Some(step) = column.steps.last() else { continue };
                        self.bar.step = self.bar.step.max(*step);
                        match column.name.as_str() {
                            "loss" => {
                                let losses = column.steps.iter().copied().zip(column.values.iter().copied());
                                let means = self.bar.loss.add(losses);
                                if self.reads_rank_0 {
                                    self.losses.extend(means);
                                }
                            }
                            "step_ms" if rank == 0 => self.speed.add(&column.steps, &column.values),
                            _ => {}
                        }
                    }
                    self.bar.images_per_second = self.speed.images_per_second();
                    self.bar.eta_secs = self.speed.secs_left(self.bar.step, self.bar.total_steps);
                    self.bar.draw();
                }
                AttemptEvent::Log { rank: 0, lines } => {
                    // The command itself reports a stop and a failure.
                    let is_reported = |text: &String| {
                        ["asked to stop: ", "failed after step "].iter().any(|start| text.starts_with(start))
                    };
                    let lines = lines.into_iter().map(|line| line.text);
                    self.pending_lines.extend(lines.filter(|text| !is_reported(text)));
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
        let has_all_losses = false;
        self.print_lines(has_all_losses);
    }

    /// Prints rank 0's lines in order, up to the first step whose loss may still arrive. With `has_all_losses`, prints all lines.
    fn print_lines(&mut self, has_all_losses: bool) {
        while let Some(line) = self.pending_lines.front() {
            let text = match parse_step_line(line) {
                None => Some(line.clone()),
                Some((start, step)) => {
                    let loss = self.losses.get(&step).copied();
                    if loss.is_none() && !has_all_losses {
                        break;
                    }
                    // Losses of earlier steps have been printed.
                    self.losses = self.losses.split_off(&(step + 1));
                    let with_mean = |loss| format!("{start}, loss is {loss}{}", self.rank_note);
                    // The bar already shows the loss.
                    (!self.bar.is_drawn()).then(|| loss.map_or_else(|| line.clone(), with_mean))
                }
            };
            self.pending_lines.pop_front();
            // Training continues even if the reader of the output has exited.
            let _ = text.map(|text| self.bar.print_line(text));
        }
    }

    /// Describes the best of the run's checkpoints: `; the best is 2-24 with 88.6 %`.
    pub(super) fn describe_best(&self) -> Option<String> {
        let (best, accuracy) = best_checkpoint(&self.checkpoints)?;
        Some(format!("; the best is {}-{} with {}", best.epoch, best.step, percent(accuracy)))
    }

    pub(super) fn finish(&mut self) {
        let has_all_losses = true;
        self.print_lines(has_all_losses);
        self.bar.finish();
    }
}

/// Returns the part of a log line before the loss of a step, and the step: `epoch: 1 step: 7, loss is 2.3`.
fn parse_step_line(line: &str) -> Option<(&str, u64)> {
    let (start, _) = line.split_once(", loss is ")?;
    Some((start, start.split_once(" step: ")?.1.parse().ok()?))
}
