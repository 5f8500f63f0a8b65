//! Metrics at scale: append-only chunks of columns with a pyramid of minimum, maximum and mean above them.
//!
//! Events stay the truth. A task of its own ([`pyramid`]) turns them, a few thousand at a time, into chunks; what
//! is newer is read from the events themselves. So an answer never depends on how far that task has come.

pub(crate) mod chunk;
pub(crate) mod pyramid;
pub(crate) mod query;
