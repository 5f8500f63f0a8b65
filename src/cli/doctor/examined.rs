//! Results of `lockstep doctor --hosts`: machines and pairs of machines.

use lockstep_worker::doctor::{AllGatherResult, Facts, Finding, Grade, LinkMeasurement};
use serde::{Serialize, Serializer};

/// A machine and the findings about it.
#[derive(Debug, Serialize)]
pub(super) struct ExaminedMachine {
    pub(super) name: String,
    /// The version of Lockstep on the machine. `None` if the machine did not print it.
    pub(super) lockstep: Option<String>,
    #[serde(flatten)]
    pub(super) facts: Option<Facts>,
    pub(super) findings: Vec<Finding>,
}

/// Two machines, and the measurements of the link between them.
#[derive(Debug, Serialize)]
pub(super) struct Pair {
    pub(super) a: String,
    pub(super) b: String,
    pub(super) grade: Grade,
    /// The link when `a` connects to `b`. `b` sends the data.
    #[serde(serialize_with = "value_or_error")]
    pub(super) to_b: Result<LinkMeasurement, String>,
    #[serde(serialize_with = "value_or_error")]
    pub(super) to_a: Result<LinkMeasurement, String>,
    /// How far the clock of `b` is ahead of the clock of `a`, in milliseconds.
    pub(super) clock_ahead_ms: Option<f64>,
    /// The uncertainty of `clock_ahead_ms`, in milliseconds.
    pub(super) clock_within_ms: Option<f64>,
    /// All-reduces over NCCL between the first GPUs of the two machines, if both have GPUs.
    #[serde(serialize_with = "optional_value_or_error")]
    pub(super) nccl: Option<Result<AllGatherResult, String>>,
    pub(super) findings: Vec<Finding>,
}

fn value_or_error<T: Serialize, S: Serializer>(
    result: &Result<T, String>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match result {
        Ok(value) => value.serialize(serializer),
        Err(error) => serde_json::json!({ "error": error }).serialize(serializer),
    }
}

fn optional_value_or_error<T: Serialize, S: Serializer>(
    result: &Option<Result<T, String>>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match result {
        Some(result) => value_or_error(result, serializer),
        None => serializer.serialize_none(),
    }
}
