//! Groups of jobs: the criteria, and the values and statistics of each group.

use jiff::Timestamp;
use lockstep_protocol::job::JobState;
use serde::{Deserialize, Serialize};
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
        holds: SettingKind,
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
    pub states: Vec<(JobState, u64)>,
    /// When the newest job was submitted.
    pub newest_at: Timestamp,
    /// Statistics of each requested metric.
    pub metrics: Vec<Spread>,
}

/// Statistics of a metric over the jobs of a group that have a value.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Spread {
    /// Number of jobs with a value.
    pub n: u64,
    mean: f64,
    /// Sum of squared differences from the mean.
    squares: f64,
    min: f64,
    max: f64,
}

impl Spread {
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

    /// Returns a finite `value` if at least `min_n` jobs have a value.
    fn checked(&self, value: f64, min_n: u64) -> Option<f64> {
        (self.n >= min_n && value.is_finite()).then_some(value)
    }

    /// The mean; `None` without values.
    pub fn mean(&self) -> Option<f64> {
        self.checked(self.mean, 1)
    }

    /// The sample standard deviation (divided by n - 1); `None` for fewer than two values.
    pub fn std(&self) -> Option<f64> {
        self.checked((self.squares / (self.n.max(2) - 1) as f64).sqrt(), 2)
    }

    /// The smallest value; `None` without values.
    pub fn min(&self) -> Option<f64> {
        self.checked(self.min, 1)
    }

    /// The largest value; `None` without values.
    pub fn max(&self) -> Option<f64> {
        self.checked(self.max, 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spread(values: &[f64]) -> Spread {
        let mut spread = Spread::default();
        values.iter().for_each(|value| spread.add(*value));
        spread
    }

    #[test]
    fn std_is_the_sample_standard_deviation() {
        let of = spread(&[2.0, 4.0, f64::NAN, 9.0]);
        assert_eq!((of.n, of.mean(), of.min(), of.max()), (3, Some(5.0), Some(2.0), Some(9.0)));
        // ((2-5)^2 + (4-5)^2 + (9-5)^2) / 2 = 13.
        assert!((of.std().unwrap() - 13.0_f64.sqrt()).abs() < 1e-12);
        let one = spread(&[-3.0]);
        assert_eq!(
            (one.n, one.mean(), one.std(), one.min(), one.max()),
            (1, Some(-3.0), None, Some(-3.0), Some(-3.0))
        );
        let none = spread(&[f64::INFINITY]);
        assert_eq!((none.n, none.mean(), none.std(), none.min(), none.max()), (0, None, None, None, None));
    }

    #[test]
    fn std_of_large_close_values_is_exact() {
        let of = spread(&[1e9 + 1.0, 1e9 + 2.0, 1e9 + 3.0]);
        assert!((of.std().unwrap() - 1.0).abs() < 1e-6, "{of:?}");
        // The sum of squares overflows.
        assert_eq!(spread(&[f64::MAX, -f64::MAX]).std(), None);
    }

    #[test]
    fn group_values_keep_their_json_type() {
        let values = [
            GroupValue::Bool(true),
            GroupValue::Number(0.1),
            GroupValue::Text("0.1".into()),
            GroupValue::Missing,
        ];
        let text = serde_json::to_string(&values).unwrap();
        assert_eq!(text, r#"[true,0.1,"0.1",null]"#);
        assert_eq!(serde_json::from_str::<[GroupValue; 4]>(&text).unwrap(), values);
    }
}
