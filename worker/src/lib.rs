//! Everything that runs on a training machine: the agent (one a machine), ranks (one a slot), and
//! what they are made of - networks, engines, data, communication, checkpoints.

// What a call can fail with is part of what its caller has to know.
#![warn(clippy::missing_errors_doc)]

pub mod agent;
mod cache;
pub mod checkpoint;
pub mod comm;
pub mod data;
pub mod doctor;
pub mod engine;
mod fence;
pub mod files;
pub mod gpu;
pub mod host;
pub mod inspect;
pub mod local_group;
pub mod net;
pub mod precision;
pub mod rank;
pub mod report;
pub mod supervisor;
pub mod tensors;
pub mod tls;
pub mod train;

pub use lockstep_kernels::synthetic;
