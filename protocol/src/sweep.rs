//! A sweep as the server shows it: trials, which are jobs, and their results.

use crate::{
    job::{ENDED_EARLY, JobId, JobState},
    numbers::{percent, uncertainty, value},
    spec::{Setting, named::words},
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

words! {
    /// Whether a sweep starts trials.
    #[derive(ToSchema)]
    pub enum SweepState: "state" {
        Running = "running",
        /// No trial starts or resumes. Running trials continue to their next rung.
        Paused = "paused",
        /// Every trial has ended.
        Finished = "finished",
        Cancelled = "cancelled",
    }
}

/// A job that is submitted with several settings. Each setting is a trial: a job that the sweep starts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Sweep {
    /// `sweep-` and 12 digits or letters from a to f. All trials have this id as a tag.
    pub id: String,
    pub name: String,
    pub project: String,
    pub state: SweepState,
    /// Why the server paused the sweep, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The person who submitted the sweep, or the name of the token that was used; absent if the server has no sign-in.
    pub owner: Option<String>,
    /// Only the owner and admins see the sweep.
    #[serde(default)]
    pub private: bool,
    /// The job file as it was submitted.
    #[schema(value_type = Object)]
    pub spec: Value,
    /// The metric by which trials are compared: `val_accuracy` or `val_loss`.
    pub metric: String,
    /// Epochs after which trials are compared; the last is the end of training.
    pub rungs: Vec<u32>,
    /// Warnings about the trials, in words. Only in the answer to a submission.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// Number of trials, including trials that have not started.
    pub trial_count: u32,
    /// Number of trials that have ended. After the sweep's end, all started trials count, even if a person retries or deletes
    /// some of them.
    pub ended: u32,
    /// Numbers of the trials that a person has paused: the sweep cannot end until these are resumed or cancelled.
    #[serde(default)]
    pub paused: Vec<u32>,
    /// The best trial so far: the trial with the best metric among the trials at the highest rung, or with a single rung among
    /// all trials. Absent before the first validation of a trial.
    pub best: Option<Trial>,
    /// Number of optimizer steps of all trials together, without deleted trials.
    pub steps: u64,
    /// Every trial, in the order in which they start. Only in `GET /sweeps/{id}` and in the answer to a submission.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub trials: Vec<Trial>,
    pub created_at: jiff::Timestamp,
    pub finished_at: Option<jiff::Timestamp>,
}

impl Sweep {
    /// A trial's metric as it is shown, such as `75.0 % ± 3.1 of 200`; `None` before its first validation.
    pub fn metric_of(&self, trial: &Trial) -> Option<String> {
        trial.metric.map(|metric| match self.metric.as_str() {
            "val_loss" => value(metric),
            _ => percent(metric) + &uncertainty(metric, trial.val_pictures),
        })
    }

    /// `trial 3 is paused: the sweep cannot end until the trial is resumed or cancelled`; `None` if no trial is paused.
    pub fn paused_in_words(&self) -> Option<String> {
        let (noun, be) = match &self.paused[..] {
            [] => return None,
            [_] => ("trial", "is"),
            _ => ("trials", "are"),
        };
        let numbers: Vec<_> = self.paused.iter().map(u32::to_string).collect();
        let numbers = numbers.join(", ");
        Some(format!(
            "{noun} {numbers} {be} paused: the sweep cannot end until the {noun} {be} resumed or cancelled"
        ))
    }
}

/// A trial of a sweep.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Trial {
    /// Number of the trial, from 1.
    pub number: u32,
    /// The values of the parameters, by key path.
    #[schema(value_type = Object)]
    pub setting: Setting,
    /// The trial's job; absent before the sweep has started the job, and after the job was deleted.
    #[schema(value_type = Option<String>)]
    pub job: Option<JobId>,
    /// Whether the job was deleted.
    #[serde(default)]
    pub deleted: bool,
    /// The job's state.
    pub state: Option<JobState>,
    /// Whether the sweep has ended the trial, because other trials are better at a rung. The trial's job is then cancelled.
    #[serde(default)]
    pub ended_early: bool,
    /// Number of rungs that the trial has reached.
    pub rung: u32,
    /// The best value of the metric among all validations up to the newest rung; before the first rung, among all validations
    /// so far. Absent before the first validation, if the validation at the newest rung was not finite, and if the trial ended before its
    /// first rung.
    pub metric: Option<f64>,
    /// Number of validation pictures on which the metric was measured, if known.
    #[serde(default)]
    pub val_pictures: Option<u64>,
    /// The epoch after which the trial was compared last: the newest rung, or the trial's last epoch if the trial has
    /// succeeded; absent before the first rung.
    pub epoch: Option<u32>,
    /// Number of optimizer steps done.
    pub step: u64,
}

impl Trial {
    /// The trial's state for a person: the job's state, `ended early`, `deleted` or `not started`.
    pub fn state_in_words(&self) -> &'static str {
        match self.state {
            Some(_) if self.ended_early => ENDED_EARLY,
            Some(state) => state.as_str(),
            None if self.deleted => "deleted",
            None => "not started",
        }
    }
}
