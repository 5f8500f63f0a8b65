//! The state from which a job's newest values and its sparkline are computed.

use super::end_on_agent::EndOnAgent;
use jiff::Timestamp;
use lockstep_protocol::{metric::MetricColumn, numbers::exact, throughput::Throughput};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Number of points in a job's sparkline.
const SPARKLINE_POINTS: usize = 40;

/// The state from which a job's newest values and its sparkline are computed, with other facts about attempts.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Progress {
    /// Sum and count of the losses in each of [`SPARKLINE_POINTS`] equal parts of the run.
    parts: Vec<(f64, u32)>,
    /// Each rank's newest loss and accuracy, or `None` if the value was not finite. The job shows the mean over ranks.
    pub(super) loss: BTreeMap<u32, Option<f64>>,
    pub(super) accuracy: BTreeMap<u32, Option<f64>>,
    /// Each rank's newest value of every other metric. Empty if the job has ended.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) others: BTreeMap<String, BTreeMap<u32, f32>>,
    /// The step of the newest checkpoint.
    pub(super) checkpoint: Option<u64>,
    /// The step of the newest checkpoint at the beginning of the newest attempt.
    pub(super) began_from: Option<u64>,
    /// Whether ranks of the newest attempt have trained.
    pub(crate) trained: bool,
    /// The speed of the newest attempt that has trained.
    pub(crate) speed: Throughput,
    /// The ids of agents on which the ranks of the live attempt have ended, with these ends, in order. Empty if a single agent has all
    /// ranks.
    pub(super) ends: Vec<(String, EndOnAgent)>,
    /// Ranks of the live attempt whose machines do not respond, as reported by neighbouring ranks.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub unreachable: BTreeSet<u32>,
    /// Number of consecutive attempts that have ended before any rank began.
    #[serde(skip_serializing_if = "is_zero")]
    pub(super) not_begun: u32,
    /// For a trial of a sweep: the epoch after which the trial pauses, so that the sweep compares it with other trials.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pause_after: Option<u32>,
    /// For a trial of a sweep: the rungs at which the trial has paused, in order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rungs: Vec<Rung>,
    /// Lowest loss of all validations. (`job.best` has the highest accuracy.)
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) lowest_val_loss: Option<f64>,
    /// Number of steps that `parts` cover, for a run of unknown length.
    span: u64,
    /// When the live attempt began.
    pub(super) began: Option<Timestamp>,
    /// Total time for which earlier attempts had their slots, in milliseconds. `None` before the end of the first attempt.
    ran_ms: Option<u64>,
}

/// The results of a trial by which its sweep compares it with other trials.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Rung {
    /// The epoch after which the trials are compared.
    pub epoch: u32,
    /// Highest accuracy of all validations so far; `None` if the newest validation was not finite.
    pub val_accuracy: Option<f64>,
    /// Lowest loss of all validations so far; `None` if the newest validation was not finite.
    pub val_loss: Option<f64>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes it")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl Progress {
    /// Notes that an attempt has freed its slots. Returns the total time for which all attempts had slots, in seconds.
    pub(super) fn end_attempt(&mut self, at: Timestamp) -> Option<f64> {
        if let Some(began) = self.began.take() {
            let ms = at.as_millisecond().saturating_sub(began.as_millisecond());
            // The clock may have been set back.
            self.ran_ms = Some(self.ran_ms.unwrap_or(0) + u64::try_from(ms).unwrap_or(0));
        }
        self.ran_secs()
    }

    /// Total time for which all ended attempts had their slots, in seconds. `None` before the end of the first attempt.
    pub fn ran_secs(&self) -> Option<f64> {
        self.ran_ms.map(|ms| ms as f64 / 1000.0)
    }

    /// Adds losses to the sparkline. `total_steps`: the length of the run, or 0 if it is unknown.
    pub(super) fn add_losses(&mut self, column: &MetricColumn, total_steps: u64) {
        self.parts.resize(SPARKLINE_POINTS, (0.0, 0));
        let total = match total_steps {
            0 => self.widen(column.steps.iter().copied().max().unwrap_or(0)),
            total => total,
        };
        for (step, value) in column.steps.iter().zip(&column.values).filter(|(_, v)| v.is_finite()) {
            let index = u128::from(step.saturating_sub(1)) * SPARKLINE_POINTS as u128 / u128::from(total);
            let part = &mut self.parts[(index as usize).min(SPARKLINE_POINTS - 1)];
            part.0 += f64::from(*value);
            part.1 += 1;
        }
    }

    /// Joins pairs of parts, so that each part covers twice the steps, until the parts include `step`. Returns the number of covered steps.
    fn widen(&mut self, step: u64) -> u64 {
        self.span = self.span.max(SPARKLINE_POINTS as u64);
        while self.span < step {
            let join = |pair: &[(f64, u32)]| {
                pair.iter().fold((0.0, 0), |sums, part| (sums.0 + part.0, sums.1 + part.1))
            };
            self.parts = self.parts.chunks(2).map(join).collect();
            self.parts.resize(SPARKLINE_POINTS, (0.0, 0));
            self.span = self.span.saturating_mul(2);
        }
        self.span
    }

    /// Removes the values that an attempt will measure again when it starts from `step`.
    pub(super) fn restart_at(&mut self, step: u64, total_steps: u64) {
        self.loss.clear();
        self.accuracy.clear();
        self.others.clear();
        let complete_parts = u128::from(step) * SPARKLINE_POINTS as u128 / u128::from(total_steps.max(1));
        self.parts.truncate(complete_parts as usize);
    }

    /// Sets a rank's newest value of a metric, or `None` if it is not finite. Returns the mean over ranks.
    pub(super) fn set_newest(&mut self, metric: &str, rank: u32, value: Option<f32>) -> Option<f64> {
        let ranks = self.others.entry(metric.to_owned()).or_default();
        match value {
            Some(value) => ranks.insert(rank, value),
            None => ranks.remove(&rank),
        };
        let sum: f64 = ranks.values().map(|value| exact(*value)).sum();
        (!ranks.is_empty()).then(|| sum / ranks.len() as f64)
    }

    /// About [`SPARKLINE_POINTS`] mean losses, in the order of steps.
    pub fn sparkline(&self) -> Vec<f32> {
        self.parts.iter().filter(|(_, n)| *n > 0).map(|(sum, n)| (sum / f64::from(*n)) as f32).collect()
    }
}
