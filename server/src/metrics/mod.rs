//! Metrics at scale: append-only chunks of columns, and rollups (minimum, maximum and mean of 16, 256, ... steps) above them.
//!
//! A report is stored as one row of events (`store/points.rs`). A background task ([`compaction`]) turns many such rows at a time
//! into chunks, up to a watermark in the job's event numbers. A query reads chunks up to the watermark and the rows after
//! it, so its answer does not depend on how far compaction has come.

pub(crate) mod chunk;
pub(crate) mod compaction;
pub(crate) mod query;
pub(crate) mod retire;
