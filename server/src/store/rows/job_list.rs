//! Which jobs to list, in which order, and from which place on.

use super::job_groups::{GroupBy, GroupValue};
use jiff::Timestamp;
use lockstep_protocol::job::{Job, JobState};
use serde::{Deserialize, Serialize};

/// Which jobs to list. An empty list or `None` stands for all.
#[derive(Debug, Clone, Default)]
pub struct JobFilter {
    /// In one of these states.
    pub states: Vec<JobState>,
    /// Part of the name.
    pub name: Option<String>,
    /// A part of the name, of a tag or of the notes.
    pub text: Option<String>,
    /// Whose settings fulfil all of these.
    pub conditions: Vec<Condition>,
    /// Of this person or token.
    pub owner: Option<String>,
    /// As this person or token sees them: without what is private to others. `None` sees all.
    pub seen_by: Option<String>,
    /// Of this project.
    pub project: Option<String>,
    /// With all of these tags.
    pub tags: Vec<String>,
    /// Of one group: what each is grouped by has this value.
    pub group: Vec<(GroupBy, GroupValue)>,
    /// Submitted at this time or later.
    pub created_after: Option<Timestamp>,
    /// Submitted before this time.
    pub created_before: Option<Timestamp>,
    /// With what people wrote on them.
    pub with_notes: bool,
    /// In which order.
    pub sort: JobSort,
    /// At most so many; 0 counts as 50.
    pub limit: u32,
    /// Behind this place of the same order.
    pub cursor: Option<Cursor>,
}

/// What a setting of a job must be.
#[derive(Debug, Clone, PartialEq)]
pub struct Condition {
    /// The table of the key; empty for a key at the top of the specification.
    pub table: &'static str,
    /// The key.
    pub key: &'static str,
    /// How the setting is compared with the value.
    pub comparison: Comparison,
    /// What it is compared with.
    pub value: SettingValue,
}

/// How two values are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Comparison {
    Equal,
    /// Also true of a setting that is not there.
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
}

/// A value of a setting.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum SettingValue {
    Number(f64),
    Text(String),
    Bool(bool),
}

/// The order of a list of jobs. Jobs of the same value follow by their ids, and those without one come last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobSort {
    /// By what.
    pub by: SortBy,
    /// The largest first.
    pub descending: bool,
}

impl Default for JobSort {
    fn default() -> Self {
        Self { by: SortBy::Created, descending: true }
    }
}

/// What jobs are sorted by.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
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
    /// The newest loss.
    Loss,
    /// The newest accuracy in training.
    Accuracy,
    /// The newest validation loss.
    ValLoss,
    /// The newest validation accuracy.
    ValAccuracy,
    /// The newest learning rate.
    LearningRate,
    /// The best validation accuracy.
    Best,
    /// The newest value of another metric, by its name among those that there are.
    Metric(&'static str),
    /// Whether people tagged it so.
    Tag(String),
    /// A key of the specification; its table is empty for one at the top.
    Setting {
        table: &'static str,
        key: &'static str,
        is_number: bool,
    },
}

/// A place in the list of jobs, which stays one when the job that it was taken from is deleted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cursor {
    /// What the job before it is sorted by.
    pub value: SortValue,
    /// The job before it.
    pub id: String,
}

/// What a job is sorted by.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum SortValue {
    /// A count, or milliseconds since 1970.
    Integer(i64),
    /// A number with a fraction.
    Number(f64),
    /// A text.
    Text(String),
    /// It has none.
    Missing,
}

/// A page of jobs.
#[derive(Debug, Clone)]
pub struct Page {
    /// In the order of the filter.
    pub jobs: Vec<Job>,
    /// There are more, behind this.
    pub next: Option<Cursor>,
}

/// A project, which is a name that jobs have.
#[derive(Debug, Clone, PartialEq)]
pub struct ProjectRow {
    /// Its name.
    pub name: String,
    /// How many of its jobs are in each state that any is in.
    pub states: Vec<(JobState, u64)>,
    /// When its newest job was submitted.
    pub newest_at: Timestamp,
}
