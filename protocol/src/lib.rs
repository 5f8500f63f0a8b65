//! The types that cross a wire: job specifications and states, metrics, and messages between server, agents, ranks and
//! browsers. The crate does no input or output, except [`fault`], which injects faults for tests.

// All machines must compute the same learning rates and the same settings of a sweep.
#![warn(clippy::disallowed_methods)]

pub mod access;
pub mod agent;
pub mod allowed;
pub mod attempt;
pub mod backoff;
pub mod best;
pub mod checkpoint;
pub mod checkpoint_files;
pub mod cut;
pub mod dataset;
pub mod fault;
pub mod histograms;
pub mod history;
pub mod inspect;
pub mod invisible;
pub mod job;
pub mod labels;
pub mod limits;
pub mod metric;
pub mod models;
pub mod network;
pub mod numbers;
pub mod panels;
pub mod pattern;
pub mod people;
pub mod pickle;
pub mod queue;
pub mod random;
pub mod reason;
pub mod schedule;
pub mod spec;
pub mod stream;
pub mod suggestion;
pub mod sweep;
pub mod throughput;
pub mod wire;

pub use job::{Job, JobId, JobState};
pub use reason::{Reason, ReasonKind};
pub use spec::JobSpec;
