//! Lists of jobs: filters, order and cursors.

use super::job_groups::{GroupBy, GroupValue};
use jiff::Timestamp;
use lockstep_protocol::{
    job::{Job, JobState},
    words,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// A filter for a list of jobs. An empty list or `None` matches all jobs.
#[derive(Debug, Clone, Default)]
pub struct JobFilter {
    /// Only jobs in one of these states.
    pub states: Vec<JobState>,
    /// Only jobs whose name contains this text.
    pub name: Option<String>,
    /// Only jobs whose name, notes or one of whose tags contains this text.
    pub text: Option<String>,
    /// Only jobs whose settings fulfil all of these conditions.
    pub conditions: Vec<Condition>,
    /// Only jobs of this person or token.
    pub owner: Option<String>,
    /// Only jobs that this person or token sees: all except private jobs of others. `None` matches all jobs.
    pub seen_by: Option<String>,
    /// Only jobs of this project.
    pub project: Option<String>,
    /// Only jobs with all of these tags.
    pub tags: Vec<String>,
    /// Only jobs of one group: each criterion has this value.
    pub group: Vec<(GroupBy, GroupValue)>,
    /// Only jobs submitted at this time or later.
    pub created_after: Option<Timestamp>,
    /// Only jobs submitted before this time.
    pub created_before: Option<Timestamp>,
    /// Whether the listed jobs include their notes.
    pub with_notes: bool,
    pub sort: JobSort,
    /// Maximum number of jobs (default 50 if 0).
    pub limit: u32,
    /// Only jobs after this position. The cursor must belong to a list with the same `sort`.
    pub cursor: Option<Cursor>,
}

/// A condition on a setting or a result of a job.
#[derive(Debug, Clone, PartialEq)]
pub struct Condition {
    /// The setting or result of the job that is compared.
    pub key: SortBy,
    /// The comparison of the job's value (left) with `value` (right).
    pub comparison: Comparison,
    pub value: SettingValue,
}

words! {
    /// A comparison, with its operator in SQL.
    pub enum Comparison: "comparison" {
        Equal = "=",
        /// Also true if the job has no value.
        NotEqual = "!=",
        Less = "<",
        LessOrEqual = "<=",
        Greater = ">",
        GreaterOrEqual = ">=",
    }
}

/// A value with which a condition compares.
#[derive(Debug, Clone, PartialEq)]
pub enum SettingValue {
    Number(f64),
    Text(String),
    Bool(bool),
}

/// The order of a list of jobs. Jobs with the same value are sorted by id, and jobs without a value come last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobSort {
    pub by: SortBy,
    /// Whether the largest value is first.
    pub descending: bool,
}

impl Default for JobSort {
    fn default() -> Self {
        Self { by: SortBy::Created, descending: true }
    }
}

/// A value of a job by which jobs are sorted, or compared in a [`Condition`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SortBy {
    Created,
    Started,
    Finished,
    Name,
    State,
    Project,
    Owner,
    Priority,
    Step,
    Epoch,
    Attempt,
    Ranks,
    /// Images per second.
    Speed,
    /// The best validation accuracy.
    Best,
    /// The newest value of the metric of this name.
    Metric(&'static str),
    /// Whether the job has this tag.
    Tag(String),
    /// A key of the specification. `table` is empty for a top-level key.
    Setting {
        table: &'static str,
        key: &'static str,
        is_number: bool,
    },
}

/// A position in a list of jobs. The cursor stays valid when the job before the position is deleted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cursor {
    /// Sort value of the job before the position.
    pub value: SortValue,
    /// Id of the job before the position.
    pub id: String,
}

/// A job's value of the sort key.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum SortValue {
    /// A count, or milliseconds since 1970.
    Integer(i64),
    Number(f64),
    Text(String),
    /// The job has no value.
    Missing,
}

/// A page of jobs.
#[derive(Debug, Clone)]
pub struct Page {
    /// The jobs, in the order of the filter.
    pub jobs: Vec<Job>,
    /// The end of the page, if more jobs follow.
    pub next: Option<Cursor>,
}

/// A project. A project exists while a job has its name.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct Project {
    pub name: String,
    /// Number of jobs in any state.
    pub jobs: u64,
    /// Number of jobs in each state, without states that no job is in: `{"running": 2, "failed": 1}`.
    pub states: BTreeMap<&'static str, u64>,
    /// Submission time of the newest job.
    pub newest_at: Timestamp,
}
