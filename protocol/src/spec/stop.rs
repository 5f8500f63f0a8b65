//! `[stop]`: early stopping.

use super::{JobSpec, mistake::Mistakes};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The metrics of a validation.
pub(super) const METRICS: [&str; 4] = ["val_accuracy", "val_loss", "val_ema_accuracy", "val_ema_loss"];

/// The values of `goal`, here and in a sweep's metric.
pub(super) const GOALS: [&str; 2] = ["maximize", "minimize"];

/// Whether larger values of a metric are better.
pub(super) fn maximizes(metric: &str, goal: Option<&str>) -> bool {
    goal.map_or(!metric.ends_with("loss"), |goal| goal == GOALS[0])
}

/// Early stopping: the run ends, as succeeded, after `patience` validations in a row without an improvement. Without this section, the
/// run does all its steps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct StopSpec {
    /// Number of validations in a row without an improvement after which the run ends. Required if another key of this section
    /// is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub patience: Option<u32>,
    /// The metric that has to improve, `val_accuracy` when absent. `val_ema_accuracy` and `val_ema_loss` are measured with the averaged
    /// weights and need `train.ema_decay`.
    pub metric: String,
    /// A value is an improvement if it is better than the last improvement by more than `min_delta`; 0 when absent. Accuracies are from
    /// 0 to 1.
    pub min_delta: f64,
    /// Which values are better: larger (`maximize`) or smaller (`minimize`). When absent: `maximize` for accuracies, `minimize` for
    /// losses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub goal: Option<String>,
}

impl Default for StopSpec {
    fn default() -> Self {
        Self { patience: None, metric: "val_accuracy".into(), min_delta: 0.0, goal: None }
    }
}

impl StopSpec {
    pub(super) fn is_off(&self) -> bool {
        self.patience.is_none()
    }

    /// Whether `value` is an improvement on `before`, as Keras and Lightning define it.
    pub fn improves(&self, value: f64, before: f64) -> bool {
        let sign = if maximizes(&self.metric, self.goal.as_deref()) { 1.0 } else { -1.0 };
        sign * value - self.min_delta > sign * before
    }
}

/// Reports combinations of `[stop]` with other keys that cannot work.
pub(super) fn check_combinations(spec: &JobSpec, errors: &mut Mistakes<'_>) {
    let stop = &spec.stop;
    if stop.is_off() {
        if *stop != StopSpec::default() {
            errors.add("/stop/patience", "is missing: give the number of validations without an improvement");
        }
        return;
    }
    if !spec.data.is_validated() {
        errors.add("/stop/patience", "counts validations, and data.validation = \"none\" disables them");
    }
    if spec.evaluate.every_epochs == 0 {
        errors.add(
            "/stop/patience",
            "counts validations, and with evaluate.every_epochs = 0 the only validation is at the end: give 1 or more",
        );
    }
    if stop.metric.starts_with("val_ema_") && spec.train.ema_decay <= 0.0 {
        errors.add("/stop/metric", format!("{} needs averaged weights: set train.ema_decay", stop.metric));
    }
}
