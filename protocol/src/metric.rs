//! Metrics in messages: columns of steps and values, never a message for each point.

use crate::limits::METRIC_NAME_CHARS;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Every metric name that a rank may report. Runs from elsewhere have names of their own; see [`name_mistake`]. Stores refer to names by
/// index, so new names are added at the end.
pub const NAMES: [&str; 25] = [
    "loss",
    "accuracy",
    "lr",
    "grad_norm",
    "loss_scale",
    "skipped_steps",
    "images_per_second",
    "step_ms",
    "data_ms",
    "all_reduce_ms",
    "val_loss",
    "val_accuracy",
    "val_ema_loss",
    "val_ema_accuracy",
    "gpu_utilization",
    "gpu_memory_bytes",
    "gpu_power_watts",
    "gpu_temperature_celsius",
    "cpu_utilization",
    "memory_used_bytes",
    "disk_used_bytes",
    "disk_read_bytes_per_second",
    "disk_written_bytes_per_second",
    "network_received_bytes_per_second",
    "network_sent_bytes_per_second",
];

/// Why a run from elsewhere cannot have a metric of this name; `None` if it can.
pub fn name_mistake(name: &str) -> Option<String> {
    let fits = (1..=METRIC_NAME_CHARS).contains(&name.chars().count()) && !name.chars().any(char::is_control);
    (!fits).then(|| {
        format!("a metric's name must have 1 to {METRIC_NAME_CHARS} characters, and no control characters")
    })
}

/// The quantity that a metric measures. Metrics of the same quantity can share an axis. All metrics not in [`NAMES`] have one quantity.
pub fn quantity(name: &str) -> &'static str {
    match name {
        "loss" | "val_loss" | "val_ema_loss" => "loss",
        "accuracy" | "val_accuracy" | "val_ema_accuracy" => "accuracy",
        "lr" => "learning rate",
        "grad_norm" => "gradient norm",
        "loss_scale" => "loss scale",
        "skipped_steps" => "steps",
        "images_per_second" => "images/s",
        "step_ms" | "data_ms" | "all_reduce_ms" => "time",
        "gpu_utilization" | "cpu_utilization" => "utilisation",
        "gpu_power_watts" => "power",
        "gpu_temperature_celsius" => "temperature",
        _ if !NAMES.contains(&name) => "value",
        _ if name.ends_with("_bytes_per_second") => "bytes/s",
        _ => "bytes",
    }
}

/// Successive points of one metric of one rank. Steps of a rank ascend; steps of a run from elsewhere may repeat and go back.
///
/// Every rank reports `loss`, `accuracy` (0 to 1), `step_ms`, `data_ms` and `all_reduce_ms`. Rank 0 reports `lr`,
/// `grad_norm`, `images_per_second` (of all ranks), `val_loss` and `val_accuracy`; with float16 also `loss_scale` and
/// `skipped_steps` (so far); with `train.ema_decay` also `val_ema_loss` and `val_ema_accuracy`, which are measured with
/// the averaged weights. Every rank on a GPU reports `gpu_...`, and one rank of each machine reports the machine's
/// metrics (`cpu_utilization` to `network_sent_bytes_per_second`).
///
/// `images_per_second` is the number of pictures of one step divided by the step's time. For the speed over many steps, do not
/// average these values: use the mean of `step_ms`, as the pages do, or the job's own `images_per_second`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MetricColumn {
    pub name: String,
    /// The optimizer step of each value, from 1.
    pub steps: Vec<u64>,
    /// One value for each of `steps`. In JSON a value that is not finite is `null`.
    #[serde(with = "finite_or_null")]
    pub values: Vec<f32>,
}

impl MetricColumn {
    /// The lowest and the highest step; `None` without points.
    pub fn step_range(&self) -> Option<(u64, u64)> {
        Some((*self.steps.iter().min()?, *self.steps.iter().max()?))
    }
}

/// JSON has no NaN: a diverged loss is sent as `null` and read as NaN.
mod finite_or_null {
    use serde::{Deserialize, Deserializer, Serializer, ser::SerializeSeq};

    pub(super) fn serialize<S: Serializer>(values: &[f32], to: S) -> Result<S::Ok, S::Error> {
        let mut out = to.serialize_seq(Some(values.len()))?;
        for value in values {
            out.serialize_element(&value.is_finite().then_some(*value))?;
        }
        out.end()
    }

    pub(super) fn deserialize<'a, D: Deserializer<'a>>(from: D) -> Result<Vec<f32>, D::Error> {
        let values = Vec::<Option<f32>>::deserialize(from)?;
        Ok(values.into_iter().map(|v| v.unwrap_or(f32::NAN)).collect())
    }
}
