//! Groups of jobs: by what, and what is known of each.

use jiff::Timestamp;
use lockstep_protocol::job::JobState;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What jobs are grouped by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum GroupBy {
    Project,
    Owner,
    /// A job is in the group of each of its tags.
    Tag,
    State,
    Name,
    /// A key of the specification; its table is empty for one at the top.
    Setting {
        table: &'static str,
        key: &'static str,
        holds: SettingKind,
    },
}

/// What a setting holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum SettingKind {
    Number,
    Text,
    /// One that is left out is false.
    Bool,
}

/// What the jobs of a group have in common; null for those that have none.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum GroupValue {
    /// Of a setting that is on or off.
    Bool(bool),
    /// Of a setting that is a number.
    Number(f64),
    /// A name, a tag, a state or a setting that is a text.
    Text(String),
    /// They have no owner, no tag or no such setting.
    Missing,
}

/// The jobs of one group, together.
#[derive(Debug, Clone, PartialEq)]
pub struct GroupRow {
    /// One for each thing that jobs are grouped by.
    pub values: Vec<GroupValue>,
    /// How many of its jobs are in each state that any is in.
    pub states: Vec<(JobState, u64)>,
    /// When its newest job was submitted.
    pub newest_at: Timestamp,
    /// One for each metric that was asked for.
    pub metrics: Vec<Spread>,
}

/// Mean and spread of a metric over the jobs of a group that have a value of it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Spread {
    /// Jobs with a value.
    pub n: u64,
    mean: f64,
    /// Sum of squared distances to the mean.
    squares: f64,
    min: f64,
    max: f64,
}

impl Spread {
    /// Takes in another job's value (Welford's method: no difference of large sums).
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

    fn of(&self, value: f64, least: u64) -> Option<f64> {
        (self.n >= least && value.is_finite()).then_some(value)
    }

    /// None without a value.
    pub fn mean(&self) -> Option<f64> {
        self.of(self.mean, 1)
    }

    /// The standard deviation of a sample, divided by n - 1: none for fewer than two values.
    pub fn std(&self) -> Option<f64> {
        self.of((self.squares / (self.n.max(2) - 1) as f64).sqrt(), 2)
    }

    /// The lowest value.
    pub fn min(&self) -> Option<f64> {
        self.of(self.min, 1)
    }

    /// The highest value.
    pub fn max(&self) -> Option<f64> {
        self.of(self.max, 1)
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
    fn a_spread_is_that_of_a_sample() {
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
    fn values_far_from_zero_and_near_each_other_keep_their_spread() {
        let of = spread(&[1e9 + 1.0, 1e9 + 2.0, 1e9 + 3.0]);
        assert!((of.std().unwrap() - 1.0).abs() < 1e-6, "{of:?}");
        // Sums of values that are large beyond measure are none.
        assert_eq!(spread(&[f64::MAX, -f64::MAX]).std(), None);
    }

    #[test]
    fn a_value_is_written_as_what_it_is() {
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
