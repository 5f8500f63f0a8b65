//! Metrics: which to read, and the chunks that they are compacted into.

use lockstep_protocol::metric::MetricColumn;

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
    /// ... up to the row with which they cost so much ([`super::EventRow::cost`]); `None` for all.
    pub limit_cost: Option<u64>,
}

impl MetricFilter {
    /// Whether some of a column may match.
    pub fn wants(&self, column: &MetricColumn) -> bool {
        let ends = column.ends();
        self.name.as_ref().is_none_or(|name| *name == column.name)
            && self.from.is_none_or(|from| ends.is_none_or(|(_, last)| last >= from))
            && self.to.is_none_or(|to| ends.is_none_or(|(first, _)| first <= to))
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
    /// The cost of the rows that were read ([`super::EventRow::cost`]).
    pub cost: u64,
    /// The number of the last of them; 0 without any.
    pub last: u64,
}

/// A run of points of one series, or of buckets above them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetricChunk {
    /// The metric's name.
    pub name: String,
    /// Whose.
    pub rank: u32,
    /// In which attempt.
    pub attempt: u32,
    /// 0: every point; `k`: buckets of `16^k` steps.
    pub level: u32,
    /// The step of its first point.
    pub first_step: u64,
    /// No point of it is later.
    pub last_step: u64,
    /// See `crate::metrics::chunk`.
    pub data: Vec<u8>,
    /// One of the same series, level and first step is stored, which this one takes the place of.
    pub grown: bool,
    /// It is one of all chunks of its series, which take the place of those that are stored.
    pub anew: bool,
}
