//! Metrics at scale: append-only chunks of columns with a pyramid of minimum, maximum and mean above them.
//!
//! What a report holds is a row of events (`store/points.rs`). A task of its own ([`pyramid`]) turns such rows, many at a time, into
//! chunks; what is newer is read from the rows themselves. So an answer never depends on how far that task has come.

pub(crate) mod chunk;
pub(crate) mod pyramid;
pub(crate) mod query;
pub(crate) mod retire;
