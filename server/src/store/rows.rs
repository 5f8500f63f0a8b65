//! Rows and filters of the store: what handlers, dispatch and ingest exchange with it.

use super::points;
use super::quarantine;
use crate::lifecycle::Fork;
use jiff::Timestamp;
use lockstep_protocol::{
    agent::{Acknowledged, AttemptEvent, AttemptRef, CheckpointInfo, Machine, Slot, Source},
    job::{Job, JobId, JobState},
    metric::MetricColumn,
    reason::Reason,
    spec::JobSpec,
    stream::{Event, EventBody},
};
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};
use utoipa::ToSchema;

/// A job about to be stored.
#[derive(Debug, Clone)]
pub struct NewJob {
    /// Its id.
    pub id: JobId,
    /// Checked.
    pub spec: JobSpec,
    /// Now.
    pub at: Timestamp,
    /// The client's key and the hash of its request.
    pub idempotency: Option<(String, String)>,
    /// From which checkpoint of another job it goes on.
    pub fork: Option<Fork>,
}

/// The job after a change, and the events that the change stored.
#[derive(Debug, Clone)]
pub struct Changed {
    /// After the change.
    pub job: Job,
    /// In order; may be empty.
    pub events: Vec<EventRow>,
}

/// What [`super::Store::create_job`] did.
#[derive(Debug, Clone)]
pub enum Created {
    /// A new job.
    New(Box<Changed>),
    /// The job that the same request made before.
    Before(Box<Job>),
}

/// Which jobs to list.
#[derive(Debug, Clone, Default)]
pub struct JobFilter {
    /// In this state.
    pub state: Option<JobState>,
    /// Whose name contains this.
    pub name: Option<String>,
    /// At most so many; 0 counts as 50.
    pub limit: u32,
    /// Older than this.
    pub cursor: Option<Cursor>,
}

/// A place in the list of jobs, which stays one when the job that it was taken from is deleted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cursor {
    /// Milliseconds since 1970.
    pub created_at: i64,
    /// Of several of the same millisecond.
    pub id: String,
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.created_at, self.id)
    }
}

impl FromStr for Cursor {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let parts = text.rsplit_once('-').and_then(|(at, id)| {
            id.parse::<JobId>().ok()?;
            Some(Cursor { created_at: at.parse().ok()?, id: id.to_owned() })
        });
        parts.ok_or_else(|| "the cursor is none of this server's".to_owned())
    }
}

/// A page of jobs.
#[derive(Debug, Clone)]
pub struct Page {
    /// Newest first.
    pub jobs: Vec<Job>,
    /// There are older ones, after this.
    pub next: Option<Cursor>,
}

/// The ranks of an attempt on one agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Its id.
    pub agent_id: String,
    /// Its name then.
    pub agent: String,
    /// Global rank and slot index.
    pub ranks: Vec<(u32, u32)>,
}

/// The wish to start a job's next attempt.
#[derive(Debug, Clone)]
pub struct Claim {
    /// The job.
    pub job: JobId,
    /// Its attempt so far, so that two claims of the same moment make one attempt.
    pub after_attempt: u32,
    /// Where.
    pub places: Vec<Place>,
    /// Now.
    pub at: Timestamp,
}

/// An attempt that was made.
#[derive(Debug, Clone)]
pub struct Claimed {
    /// With its fencing token.
    pub attempt: AttemptRef,
    /// The newest complete checkpoint, to continue from: `<epoch>-<step>`.
    pub resume: Option<String>,
    /// The job, now `starting`.
    pub changed: Changed,
}

/// An attempt that may write.
#[derive(Debug, Clone)]
pub struct AttemptRow {
    /// With its fencing token.
    pub attempt: AttemptRef,
    /// Where its ranks are.
    pub places: Vec<Place>,
    /// Why it is being stopped, if it is.
    pub stop: Option<Reason>,
    /// It is to keep a checkpoint and end.
    pub pausing: bool,
}

/// Records of one source of an attempt, as they came.
#[derive(Debug, Clone)]
pub struct Report {
    /// Of which attempt.
    pub attempt: AttemptRef,
    /// Who wrote them.
    pub source: Source,
    /// The number of the first.
    pub first: u64,
    /// In order.
    pub events: Vec<AttemptEvent>,
    /// When they came.
    pub at: Timestamp,
    /// The agent is stopping in order, for this reason.
    pub leaving: Option<Reason>,
}

/// What became of a report.
#[derive(Debug, Clone)]
pub enum Ingested {
    /// Its records are on disk.
    Stored {
        /// To be told to the agent.
        acknowledged: Acknowledged,
        /// None when every record was there already.
        changed: Option<Box<Changed>>,
    },
    /// The attempt may not write (any more): fenced, ended or deleted.
    Stale,
    /// Records before it are missing: the connection lost some, or it is no honest agent.
    Gap {
        /// So many are stored.
        stored: u64,
    },
}

/// As many bytes are read in the time that a row takes.
pub(super) const ROW_COST: u64 = 256;

/// A row of events: one event, or the points that a rank reported at once, which are an event for each metric.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventRow {
    /// The number of its last event, from 1.
    pub seq: u64,
    /// To the millisecond.
    pub at: Timestamp,
    /// What it holds.
    pub stored: Stored,
}

/// What a row of events holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stored {
    /// One event: the JSON object of its [`EventBody`].
    Body(String),
    /// Metrics of a rank.
    Points {
        /// Of which attempt.
        attempt: u32,
        /// Of which rank.
        rank: u32,
        /// See `super::points`.
        data: Vec<u8>,
    },
}

impl EventRow {
    /// How many events it is.
    pub fn count(&self) -> u64 {
        match &self.stored {
            Stored::Body(_) => 1,
            Stored::Points { data, .. } => points::count(data),
        }
    }

    /// The number of its first event.
    pub fn first(&self) -> u64 {
        (self.seq + 1).saturating_sub(self.count())
    }

    /// Of what it holds.
    pub fn bytes(&self) -> usize {
        match &self.stored {
            Stored::Body(body) => body.len(),
            Stored::Points { data, .. } => data.len(),
        }
    }

    /// What it takes to read it, as bytes: of a small row finding it is most of the work.
    pub fn cost(&self) -> u64 {
        ROW_COST + self.bytes() as u64
    }

    /// Its metrics (those called `name`, or all), if it holds any that can be read: attempt, rank and a column an event.
    pub fn metrics(&self, name: Option<&str>) -> Option<(u32, u32, Vec<MetricColumn>)> {
        match &self.stored {
            Stored::Points { attempt, rank, data } => {
                let columns = points::decode(data, name);
                let columns =
                    columns.inspect_err(|error| quarantine::tell(&format!("event {}: {error}", self.seq)));
                Some((*attempt, *rank, columns.ok()?))
            }
            Stored::Body(_) => None,
        }
    }

    /// Its events after number `after` as frames of the stream, each with its number; the same text whether they are new
    /// or replayed.
    pub fn frames(&self, after: u64) -> Vec<(u64, String)> {
        let frame = |seq: u64, body: &str| {
            let rest = body.strip_prefix('{').unwrap_or("}");
            (seq, format!("{{\"seq\":{seq},\"at\":\"{}\",{rest}", self.at))
        };
        if let Stored::Body(body) = &self.stored {
            return if self.seq > after { vec![frame(self.seq, body)] } else { Vec::new() };
        }
        let Some((attempt, rank, columns)) = self.metrics(None) else { return Vec::new() };
        let bodies = (self.first()..).zip(columns).filter(|(seq, _)| *seq > after).map(|(seq, column)| {
            let MetricColumn { name, steps, values } = column;
            let values = values.into_iter().map(|v| v.is_finite().then_some(v)).collect();
            let body = EventBody::Metrics { attempt, rank, name, steps, values };
            frame(seq, &serde_json::to_string(&body).unwrap_or_default())
        });
        bodies.collect()
    }
}

/// Which metrics.
#[derive(Debug, Clone, Default)]
pub struct MetricFilter {
    /// One name, or all.
    pub name: Option<String>,
    /// These ranks; empty for all.
    pub ranks: Vec<u32>,
    /// Steps not below.
    pub from: Option<u64>,
    /// Steps not above.
    pub to: Option<u64>,
    /// Events with `seq > after` ...
    pub after: u64,
    /// ... up to the row with which they cost so much ([`EventRow::cost`]); `None` for all.
    pub limit_cost: Option<u64>,
}

impl MetricFilter {
    /// Whether some of a column may match.
    pub fn wants(&self, column: &MetricColumn) -> bool {
        let (first, last) = (column.steps.first().copied(), column.steps.last().copied());
        self.name.as_ref().is_none_or(|name| *name == column.name)
            && self.from.is_none_or(|from| last.is_none_or(|last| last >= from))
            && self.to.is_none_or(|to| first.is_none_or(|first| first <= to))
    }
}

/// Metrics as they were stored.
#[derive(Debug, Clone, Default)]
pub struct MetricPage {
    /// Events up to this number are in it, or do not match.
    pub as_of: u64,
    /// Rank, attempt and points of each event that can be read.
    pub columns: Vec<(u32, u32, MetricColumn)>,
    /// There was as much as the filter allows.
    pub full: bool,
    /// Of the rows that were read ([`EventRow::cost`]).
    pub cost: u64,
    /// The number of the last of them; 0 without any.
    pub last: u64,
}

/// Log events as they were stored.
#[derive(Debug, Clone, Default)]
pub struct LogPage {
    /// Those that can be read.
    pub events: Vec<Event>,
    /// Numbers of the first and the last that were looked at, whether they can be read or not.
    pub ends: Option<(u64, u64)>,
    /// There were as many events as the filter allows.
    pub full: bool,
}

/// A run of points of one series, or of buckets above them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetricChunk {
    /// Of the metric.
    pub name: String,
    /// Whose.
    pub rank: u32,
    /// In which attempt.
    pub attempt: u32,
    /// 0: every point; `k`: buckets of `16^k` steps.
    pub level: u32,
    /// Of its first point.
    pub first_step: u64,
    /// No point of it is later.
    pub last_step: u64,
    /// See `crate::metrics::chunk`.
    pub data: Vec<u8>,
    /// One of the same series, level and first step is stored, which this one takes the place of.
    pub grown: bool,
}

/// Which log events.
#[derive(Debug, Clone, Default)]
pub struct LogFilter {
    /// Of this rank.
    pub rank: Option<u32>,
    /// Of this attempt.
    pub attempt: Option<u32>,
    /// With `seq > after`.
    pub after: u64,
    /// With `seq < before`.
    pub before: Option<u64>,
    /// At most so many events.
    pub limit: u32,
    /// The newest ones instead of the first ones (still in order).
    pub newest: bool,
    /// Only events that may have this text in a line, in capitals or not. A hint that saves reading: others may come, too.
    pub containing: Option<String>,
}

/// A complete checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct CheckpointRow {
    /// Opaque.
    pub id: String,
    /// Of this job.
    pub job: JobId,
    /// Written by this attempt.
    pub attempt: u32,
    /// What is known of it.
    pub info: CheckpointInfo,
    /// When it was reported.
    pub created_at: Timestamp,
}

/// What people wrote on a job.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Annotation {
    /// Free text; may be empty.
    pub note: String,
    /// Sorted, each once.
    pub tags: Vec<String>,
}

/// A machine that has introduced itself.
#[derive(Debug, Clone, PartialEq)]
pub struct AgentRow {
    /// Kept by the agent over restarts.
    pub id: String,
    /// As shown.
    pub name: String,
    /// As it introduced itself.
    pub machine: Machine,
    /// In index order.
    pub slots: Vec<Slot>,
    /// When it last said anything.
    pub last_seen_at: Timestamp,
}

/// Numbers for monitoring.
#[derive(Debug, Clone, Default)]
pub struct Counts {
    /// Jobs in each state that any job is in.
    pub jobs: Vec<(JobState, u64)>,
}
