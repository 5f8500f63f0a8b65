//! Where a job's newest values and its sparkline come from.

use super::place_end::PlaceEnd;
use jiff::Timestamp;
use lockstep_protocol::{metric::MetricColumn, throughput::Throughput};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Points of a job's sparkline.
const SPARKLINE: usize = 40;

/// What a job's newest values and its sparkline are computed from.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Progress {
    /// Sum and number of the losses in each of [`SPARKLINE`] equal parts of the run.
    parts: Vec<(f64, u32)>,
    /// Each rank's newest loss and accuracy, none when it was not finite; their mean is shown.
    pub(super) loss: BTreeMap<u32, Option<f64>>,
    pub(super) accuracy: BTreeMap<u32, Option<f64>>,
    /// Each rank's newest value of every other metric; of a live job alone.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) others: BTreeMap<String, BTreeMap<u32, f32>>,
    /// The newest checkpoint's step.
    pub(super) checkpoint: Option<u64>,
    /// The same when the newest attempt began.
    pub(super) began_from: Option<u64>,
    /// Whether the newest attempt has trained; none of one that an earlier version began.
    pub(super) trained: Option<bool>,
    /// Of the newest attempt that has trained.
    pub(super) speed: Throughput,
    /// Of the live attempt, the agents (by id) where its ranks have ended, in that order. Empty where one agent has them all.
    pub(super) ends: Vec<(String, PlaceEnd)>,
    /// Of the live attempt, ranks whose machines do not answer, as their neighbours say.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub unreachable: BTreeSet<u32>,
    /// How many attempts in a row have ended before a rank of theirs had begun.
    #[serde(skip_serializing_if = "is_zero")]
    pub(super) not_begun: u32,
    /// Of a trial of a sweep: the epoch after which it pauses, where its sweep compares it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pause_after: Option<u32>,
    /// The rungs that it has reached, in order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rungs: Vec<Rung>,
    /// Of a run whose length nobody knows, the steps that the parts cover.
    span: u64,
    /// When the live attempt began.
    began: Option<Timestamp>,
    /// How long the attempts before it had their slots, in milliseconds; none before the first has ended.
    ran_ms: Option<u64>,
}

/// What a trial had reached when it paused for its sweep.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Rung {
    /// After this epoch.
    pub epoch: u32,
    /// Of the newest validation; none if its numbers were not finite.
    pub val_accuracy: Option<f64>,
    /// Likewise.
    pub val_loss: Option<f64>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes it")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl Progress {
    /// Whether ranks of the newest attempt have trained.
    pub(crate) fn has_trained(&self) -> bool {
        self.trained == Some(true)
    }

    /// An attempt has its slots from now on.
    pub(super) fn begin(&mut self, at: Timestamp) {
        self.began = Some(at);
    }

    /// An attempt has given its slots back; answers how long all of them had theirs.
    pub(super) fn end(&mut self, at: Timestamp) -> Option<f64> {
        // One that an earlier version began has no beginning.
        if let Some(began) = self.began.take() {
            let ms = at.as_millisecond().saturating_sub(began.as_millisecond());
            // A clock may have been put back.
            self.ran_ms = Some(self.ran_ms.unwrap_or(0) + u64::try_from(ms).unwrap_or(0));
        }
        self.ran_secs()
    }

    /// How long all attempts that have ended had their slots; none before the first has.
    pub fn ran_secs(&self) -> Option<f64> {
        self.ran_ms.map(|ms| ms as f64 / 1000.0)
    }

    pub(super) fn add_losses(&mut self, column: &MetricColumn, total_steps: u64) {
        self.parts.resize(SPARKLINE, (0.0, 0));
        let total = match total_steps {
            0 => self.widen(column.steps.iter().copied().max().unwrap_or(0)),
            total => total,
        };
        for (step, value) in column.steps.iter().zip(&column.values).filter(|(_, v)| v.is_finite()) {
            let at = u128::from(step.saturating_sub(1)) * SPARKLINE as u128 / u128::from(total);
            let part = &mut self.parts[(at as usize).min(SPARKLINE - 1)];
            part.0 += f64::from(*value);
            part.1 += 1;
        }
    }

    /// Makes the parts twice as long until `step` has its place in them; answers the steps that they cover.
    fn widen(&mut self, step: u64) -> u64 {
        self.span = self.span.max(SPARKLINE as u64);
        while self.span < step {
            let join = |pair: &[(f64, u32)]| {
                pair.iter().fold((0.0, 0), |all, part| (all.0 + part.0, all.1 + part.1))
            };
            self.parts = self.parts.chunks(2).map(join).collect();
            self.parts.resize(SPARKLINE, (0.0, 0));
            self.span = self.span.saturating_mul(2);
        }
        self.span
    }

    /// Forgets what an attempt that starts again from `step` will measure anew.
    pub(super) fn restart_at(&mut self, step: u64, total_steps: u64) {
        self.loss.clear();
        self.accuracy.clear();
        self.others.clear();
        let keep = u128::from(step) * SPARKLINE as u128 / u128::from(total_steps.max(1));
        self.parts.truncate(keep as usize);
    }

    /// Whether a metric has been taken note of, also one without a finite value.
    pub(super) fn knows(&self, metric: &str) -> bool {
        self.others.contains_key(metric)
    }

    /// How many metrics have been taken note of.
    pub(super) fn known(&self) -> usize {
        self.others.len()
    }

    /// Takes a rank's newest value of a metric, none when it is not finite; answers the mean over ranks.
    pub(super) fn newest(&mut self, metric: &str, rank: u32, value: Option<f32>) -> Option<f64> {
        let ranks = self.others.entry(metric.to_owned()).or_default();
        match value {
            Some(value) => ranks.insert(rank, value),
            None => ranks.remove(&rank),
        };
        // Through text, so that one rank's 0.1 stays 0.1.
        let exact = |value: &f32| value.to_string().parse().unwrap_or_else(|_| f64::from(*value));
        let sum: f64 = ranks.values().map(exact).sum();
        (!ranks.is_empty()).then(|| sum / ranks.len() as f64)
    }

    /// Pictures of an epoch whose last step may have fewer than the others; 0 where every step is whole.
    pub fn epoch_samples(&self) -> u64 {
        self.speed.epoch_samples()
    }

    /// Forgets what only a live job needs.
    pub(super) fn over(&mut self) {
        self.others.clear();
    }

    /// About [`SPARKLINE`] mean losses, in the order of steps.
    pub fn sparkline(&self) -> Vec<f32> {
        self.parts.iter().filter(|(_, n)| *n > 0).map(|(sum, n)| (sum / f64::from(*n)) as f32).collect()
    }
}
