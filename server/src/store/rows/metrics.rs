//! Metrics: the filter, and the chunks into which points are compacted.

use lockstep_protocol::metric::MetricColumn;

/// A filter for metrics.
#[derive(Debug, Clone, Default)]
pub struct MetricFilter {
    /// Only the metric of this name (`None`: all).
    pub name: Option<String>,
    /// Only these ranks (empty: all).
    pub ranks: Vec<u32>,
    /// Only points from this step on (`None`: all).
    pub from: Option<u64>,
    /// Only points up to this step, inclusive (`None`: all).
    pub to: Option<u64>,
    /// Only events with `seq > after`.
    pub after: u64,
    /// Maximum total cost ([`super::EventRow::cost`]) of a page. The page ends after the row that reaches this cost (`None`: no limit).
    pub max_cost: Option<u64>,
}

impl MetricFilter {
    /// Whether the column has the name and may have points in the range of steps.
    pub fn may_match(&self, column: &MetricColumn) -> bool {
        let steps = column.step_range();
        self.name.as_ref().is_none_or(|name| *name == column.name)
            && self.from.is_none_or(|from| steps.is_none_or(|(_, last)| last >= from))
            && self.to.is_none_or(|to| steps.is_none_or(|(first, _)| first <= to))
    }
}

#[derive(Debug, Clone, Default)]
pub struct MetricPage {
    /// No matching event up to this sequence number is missing. This is the job's last event, or `last_seq` if the page is full.
    pub as_of: u64,
    /// The points of the events. Unreadable events are left out.
    pub columns: Vec<RankColumn>,
    /// Whether the page reached the limit of the filter.
    pub is_full: bool,
    /// Total cost of the rows that were read ([`super::EventRow::cost`]).
    pub cost: u64,
    /// Sequence number of the last row that was read; 0 if there was none.
    pub last_seq: u64,
}

/// The points of an event, and the rank that reported them.
#[derive(Debug, Clone)]
pub struct RankColumn {
    pub rank: u32,
    pub attempt: u32,
    pub column: MetricColumn,
}

/// Successive points of one series, or successive buckets that summarize its points.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetricChunk {
    pub name: String,
    pub rank: u32,
    pub attempt: u32,
    /// 0: points; `k`: buckets of `16^k` steps.
    pub level: u32,
    /// The smallest step.
    pub first_step: u64,
    /// The largest step.
    pub last_step: u64,
    /// Encoded by `crate::metrics::chunk`.
    pub data: Vec<u8>,
    /// Whether this chunk replaces the stored chunk with the same series, level and first step.
    pub replaces_chunk: bool,
    /// Whether this chunk and the other new chunks of the series replace all stored chunks of the series.
    pub replaces_series: bool,
}
