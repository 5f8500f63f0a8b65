//! Measurements of machines.

/// The means of a machine's measurements over a minute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MinuteRow {
    pub agent_id: String,
    /// Minutes since 1970.
    pub minute: i64,
    /// The means, encoded by `server/src/agents/machines/point.rs`.
    pub data: Vec<u8>,
}
