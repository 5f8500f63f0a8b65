//! Rows of events, and which log events to read.

use crate::store::{points, quarantine};
use jiff::Timestamp;
use lockstep_protocol::{
    job::JobState,
    metric::MetricColumn,
    stream::{Event, EventBody},
};

/// As many bytes are read in the time that a row takes.
pub(in crate::store) const ROW_COST: u64 = 256;

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
        /// The attempt.
        attempt: u32,
        /// The rank.
        rank: u32,
        /// See `crate::store::points`.
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

    /// The size of its content.
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
                let columns = columns
                    .inspect_err(|error| quarantine::log_once(&format!("event {}: {error}", self.seq)));
                Some((*attempt, *rank, columns.ok()?))
            }
            Stored::Body(_) => None,
        }
    }

    /// The id of the checkpoint whose writing or removal it tells of.
    pub(crate) fn checkpoint(&self) -> Option<String> {
        let Stored::Body(body) = &self.stored else { return None };
        if !body.starts_with("{\"type\":\"checkpoint") {
            return None;
        }
        match serde_json::from_str(body).ok()? {
            EventBody::Checkpoint { id, .. } | EventBody::CheckpointRemoved { id, .. } => Some(id),
            _ => None,
        }
    }

    /// The job's state since then, if it tells of one.
    pub(crate) fn state(&self) -> Option<JobState> {
        let Stored::Body(body) = &self.stored else { return None };
        if !body.starts_with("{\"type\":\"state\"") {
            return None;
        }
        match serde_json::from_str(body).ok()? {
            EventBody::State { state, .. } => Some(state),
            _ => None,
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

/// Log events as they were stored.
#[derive(Debug, Clone, Default)]
pub struct LogPage {
    /// Those that can be read.
    pub events: Vec<Event>,
    /// Numbers of the first and the last that were examined, whether they can be read or not.
    pub ends: Option<(u64, u64)>,
    /// There were as many events as the filter allows.
    pub full: bool,
}

/// Which log events.
#[derive(Debug, Clone, Default)]
pub struct LogFilter {
    /// Lines of this rank only.
    pub rank: Option<u32>,
    /// Lines of this attempt only.
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
