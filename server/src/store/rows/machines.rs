//! What machines measured.

/// A machine's means of a minute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MinuteRow {
    /// Whose machine.
    pub agent_id: String,
    /// Minutes since 1970.
    pub minute: i64,
    /// See `server/src/agents/machines/point.rs`.
    pub data: Vec<u8>,
}
