//! Rows of events, and the filter for log events.

use crate::store::{points, unreadable};
use jiff::Timestamp;
use lockstep_protocol::{
    job::JobState,
    metric::MetricColumn,
    stream::{Event, EventBody},
};

/// The cost of finding a row, in bytes: the number of bytes that could be read in the same time.
pub(in crate::store) const ROW_COST: u64 = 256;

/// A row of events: either one event, or the points that a rank reported together, which are one event per metric.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventRow {
    /// Sequence number of the row's last event, from 1.
    pub seq: u64,
    /// The time of the events, to the millisecond.
    pub at: Timestamp,
    pub content: RowContent,
}

/// The content of a row of events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RowContent {
    /// One event: the JSON object of its [`EventBody`].
    Body(String),
    /// Points of a rank's metrics.
    Points {
        attempt: u32,
        rank: u32,
        /// Encoded by `crate::store::points`.
        data: Vec<u8>,
    },
}

impl EventRow {
    /// Number of events in the row.
    pub fn count(&self) -> u64 {
        match &self.content {
            RowContent::Body(_) => 1,
            RowContent::Points { data, .. } => points::column_count(data),
        }
    }

    /// Sequence number of the row's first event.
    pub fn first_seq(&self) -> u64 {
        (self.seq + 1).saturating_sub(self.count())
    }

    /// Size of the row's content in bytes.
    pub fn bytes(&self) -> usize {
        match &self.content {
            RowContent::Body(body) => body.len(),
            RowContent::Points { data, .. } => data.len(),
        }
    }

    /// Cost of reading the row, in bytes. Finding a small row takes longer than reading its content.
    pub fn cost(&self) -> u64 {
        ROW_COST + self.bytes() as u64
    }

    /// Attempt, rank and one column per event of a row of points. With `name`, only the column of this metric. `None` if the row has no
    /// points, or the points cannot be read.
    pub fn metrics(&self, name: Option<&str>) -> Option<(u32, u32, Vec<MetricColumn>)> {
        match &self.content {
            RowContent::Points { attempt, rank, data } => {
                let columns = points::decode(data, name);
                let columns = columns
                    .inspect_err(|error| unreadable::log_once(&format!("event {}: {error}", self.seq)));
                Some((*attempt, *rank, columns.ok()?))
            }
            RowContent::Body(_) => None,
        }
    }

    /// The row's event, if its type begins with `kind`. Other bodies are not parsed.
    fn body(&self, kind: &str) -> Option<EventBody> {
        let RowContent::Body(body) = &self.content else { return None };
        body.strip_prefix("{\"type\":\"")?.starts_with(kind).then(|| serde_json::from_str(body).ok())?
    }

    /// Id of the checkpoint whose writing or removal the row reports.
    pub(crate) fn checkpoint(&self) -> Option<String> {
        match self.body("checkpoint")? {
            EventBody::Checkpoint { id, .. } | EventBody::CheckpointRemoved { id, .. } => Some(id),
            _ => None,
        }
    }

    /// The job's new state, if the row reports a change of state.
    pub(crate) fn state(&self) -> Option<JobState> {
        match self.body("state")? {
            EventBody::State { state, .. } => Some(state),
            _ => None,
        }
    }

    /// Whether the row reports an alert.
    pub(crate) fn is_alert(&self) -> bool {
        matches!(&self.content, RowContent::Body(body) if body.starts_with("{\"type\":\"alert\""))
    }

    /// The row's events after number `after` as frames of the stream, with their numbers. Events that are sent live and
    /// events that are read from the store later get the same text, from this method.
    pub fn frames(&self, after: u64) -> Vec<(u64, String)> {
        let frame = |seq: u64, body: &str| {
            let rest = body.strip_prefix('{').unwrap_or("}");
            (seq, format!("{{\"seq\":{seq},\"at\":\"{}\",{rest}", self.at))
        };
        if let RowContent::Body(body) = &self.content {
            return if self.seq > after { vec![frame(self.seq, body)] } else { Vec::new() };
        }
        let Some((attempt, rank, columns)) = self.metrics(None) else { return Vec::new() };
        let bodies =
            (self.first_seq()..).zip(columns).filter(|(seq, _)| *seq > after).map(|(seq, column)| {
                let MetricColumn { name, steps, values } = column;
                let values = values.into_iter().map(|v| v.is_finite().then_some(v)).collect();
                let body = EventBody::Metrics { attempt, rank, name, steps, values };
                frame(seq, &serde_json::to_string(&body).unwrap_or_default())
            });
        bodies.collect()
    }
}

#[derive(Debug, Clone, Default)]
pub struct LogPage {
    /// The events that can be read.
    pub events: Vec<Event>,
    /// Sequence numbers of the first and last examined event, including unreadable events.
    pub range: Option<(u64, u64)>,
    /// Whether the page reached a limit, so that more events may follow.
    pub is_full: bool,
}

/// A filter for log events.
#[derive(Debug, Clone, Default)]
pub struct LogFilter {
    /// Only lines of this rank.
    pub rank: Option<u32>,
    /// Only lines of this attempt.
    pub attempt: Option<u32>,
    /// Only events with `seq > after`.
    pub after: u64,
    /// Only events with `seq < before`.
    pub before: Option<u64>,
    /// Maximum number of events.
    pub limit: u32,
    /// Whether the page has the newest matching events instead of the first. The order of events is the same.
    pub selects_newest: bool,
    /// Only events that may contain this text, regardless of case. The filter is approximate, so other events may be included.
    pub containing: Option<String>,
}
