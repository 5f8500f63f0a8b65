//! Groups of jobs: the criteria, and the values and statistics of each group.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// A criterion by which jobs are grouped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupBy {
    Project,
    Owner,
    /// A job is in one group for each of its tags.
    Tag,
    State,
    Name,
    /// A key of the specification. `table` is empty for a top-level key.
    Setting {
        table: &'static str,
        key: &'static str,
        kind: SettingKind,
    },
}

/// The type of a setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SettingKind {
    Number,
    Text,
    /// A missing setting is false.
    Bool,
}

/// The common value of the jobs of a group; null if the jobs have no value.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum GroupValue {
    /// A boolean setting.
    Bool(bool),
    /// A numeric setting.
    Number(f64),
    /// A name, a tag, a state or a setting that is a text.
    Text(String),
    /// The jobs have no owner, no tag or no such setting.
    Missing,
}

#[derive(Debug, Clone, PartialEq)]
pub struct GroupRow {
    /// The group's value of each criterion.
    pub values: Vec<GroupValue>,
    /// Number of jobs in each state that at least one job has.
    pub states: BTreeMap<&'static str, u64>,
    /// When the newest job was submitted.
    pub newest_at: Timestamp,
    /// The statistics of each requested metric.
    pub metrics: Vec<RunningStatistics>,
}

/// Statistics of a metric over the jobs of a group that have a value.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, ToSchema)]
pub struct MeanAndSpread {
    /// Number of jobs with a value.
    pub n: u64,
    /// Mean of the values; null if no job has a value.
    pub mean: Option<f64>,
    /// Sample standard deviation (divisor n - 1); null for fewer than two values.
    pub std: Option<f64>,
    /// The lowest value.
    pub min: Option<f64>,
    /// The highest value.
    pub max: Option<f64>,
}

/// Statistics of a metric, to which values are added one by one.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RunningStatistics {
    /// Number of jobs with a value.
    n: u64,
    mean: f64,
    /// Sum of squared differences from the mean.
    squares: f64,
    min: f64,
    max: f64,
}

impl RunningStatistics {
    /// Adds a job's value (Welford's algorithm, which avoids the difference of large sums). Ignores values that are not finite.
    pub fn add(&mut self, value: f64) {
        if !value.is_finite() {
            return;
        }
        self.n += 1;
        let distance = value - self.mean;
        self.mean += distance / self.n as f64;
        self.squares += distance * (value - self.mean);
        (self.min, self.max) = match self.n {
            1 => (value, value),
            _ => (self.min.min(value), self.max.max(value)),
        };
    }

    /// The statistics. A number that would not be finite is missing.
    pub fn statistics(&self) -> MeanAndSpread {
        let checked = |value: f64, min_n: u64| (self.n >= min_n && value.is_finite()).then_some(value);
        MeanAndSpread {
            n: self.n,
            mean: checked(self.mean, 1),
            std: checked((self.squares / (self.n.max(2) - 1) as f64).sqrt(), 2),
            min: checked(self.min, 1),
            max: checked(self.max, 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn statistics(values: &[f64]) -> MeanAndSpread {
        let mut running = RunningStatistics::default();
        values.iter().for_each(|value| running.add(*value));
        running.statistics()
    }

    #[test]
    fn std_is_the_sample_standard_deviation() {
        let three = statistics(&[2.0, 4.0, f64::NAN, 9.0]);
        assert_eq!((three.n, three.mean, three.min, three.max), (3, Some(5.0), Some(2.0), Some(9.0)));
        // ((2-5)^2 + (4-5)^2 + (9-5)^2) / 2 = 13.
        assert!((three.std.unwrap() - 13.0_f64.sqrt()).abs() < 1e-12);
        let value = Some(-3.0);
        let one = MeanAndSpread { n: 1, mean: value, std: None, min: value, max: value };
        assert_eq!(statistics(&[-3.0]), one);
        let none = MeanAndSpread { n: 0, mean: None, std: None, min: None, max: None };
        assert_eq!(statistics(&[f64::INFINITY]), none);
    }

    #[test]
    fn std_of_large_close_values_is_exact() {
        let close = statistics(&[1e9 + 1.0, 1e9 + 2.0, 1e9 + 3.0]);
        assert!((close.std.unwrap() - 1.0).abs() < 1e-6, "{close:?}");
        // The sum of squares overflows.
        assert_eq!(statistics(&[f64::MAX, -f64::MAX]).std, None);
    }
}
