//! What `lockstep train` shows: a progress bar on a terminal, rank 0's log lines otherwise.

use super::super::output;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use lockstep_protocol::{JobSpec, agent::AttemptEvent, throughput::Throughput};
use std::{collections::BTreeMap, io::IsTerminal};

/// What ranks have reported so far.
pub(super) struct Show {
    spec: JobSpec,
    bar: Option<ProgressBar>,
    steps_per_epoch: u64,
    losses: BTreeMap<u32, f32>,
    /// Throughput, computed as on the server.
    speed: Throughput,
    /// The accuracy of the newest validation, 0 to 1, and of how many pictures it is.
    pub(super) accuracy: Option<(f64, u64)>,
    /// Optimizer steps done, by the rank that is furthest.
    pub(super) step: u64,
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

impl Show {
    pub(super) fn new(spec: &JobSpec) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
            // Nothing to show before the run's length is known.
            bar.set_style(style(""));
            bar
        });
        Self {
            spec: spec.clone(),
            bar,
            steps_per_epoch: 0,
            losses: BTreeMap::new(),
            speed: Throughput::default(),
            accuracy: None,
            step: 0,
        }
    }

    /// Shows what a rank has recorded.
    pub(super) fn see(&mut self, events: Vec<AttemptEvent>) {
        for event in events {
            match event {
                AttemptEvent::Running { total_steps, steps_per_epoch, start_step, train_samples } => {
                    self.speed = Throughput::new(&self.spec, train_samples);
                    self.steps_per_epoch = steps_per_epoch;
                    self.step = self.step.max(start_step);
                    if let Some(bar) = &self.bar {
                        bar.set_style(style("{bar:30} {pos}/{len}"));
                        bar.set_length(total_steps);
                        bar.set_position(start_step);
                        bar.reset_eta();
                    }
                }
                AttemptEvent::Metrics { rank, columns } => {
                    for column in columns {
                        let (Some(step), Some(value)) = (column.steps.last(), column.values.last()) else {
                            continue;
                        };
                        self.step = self.step.max(*step);
                        match column.name.as_str() {
                            "loss" => drop(self.losses.insert(rank, *value)),
                            "step_ms" if rank == 0 => self.speed.add(&column.steps, &column.values),
                            _ => {}
                        }
                    }
                    self.draw();
                }
                AttemptEvent::Log { rank: 0, lines } => {
                    for line in lines {
                        // A reader that has gone is no reason to stop training.
                        let _ = match &self.bar {
                            // The bar shows the loss already.
                            Some(_) if line.text.contains(", loss is ") && line.text.contains(" step: ") => {
                                Ok(())
                            }
                            Some(bar) => bar.suspend(|| output::line(&line.text)),
                            None => output::line(&line.text),
                        };
                    }
                }
                AttemptEvent::Evaluation(evaluation) => {
                    self.accuracy = Some((evaluation.accuracy, evaluation.samples))
                }
                _ => {}
            }
        }
    }

    fn draw(&self) {
        let Some(bar) = &self.bar else { return };
        bar.set_position(self.step);
        // Nobody knows the time left before a step.
        if self.losses.is_empty() || self.steps_per_epoch == 0 {
            return;
        }
        let loss = self.losses.values().sum::<f32>() / self.losses.len() as f32;
        let epoch = self.step.saturating_sub(1) / self.steps_per_epoch + 1;
        let accuracy = self
            .accuracy
            .map(|(a, _)| format!(", accuracy {}", lockstep_protocol::numbers::percent(a)))
            .unwrap_or_default();
        let speed = self
            .speed
            .images_per_second()
            .map(|v| format!(", {} images/s", lockstep_protocol::numbers::rate(v)))
            .unwrap_or_default();
        bar.set_style(style("{bar:30} {pos}/{len} {msg}, {eta} left"));
        bar.set_message(format!("epoch {epoch}, loss {loss:.4}{accuracy}{speed}"));
    }

    pub(super) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
