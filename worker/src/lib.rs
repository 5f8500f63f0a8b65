//! Everything that runs on a training machine: the agent (one per machine), and ranks (one per slot), which train and
//! write checkpoints.

// Callers need to know how a call can fail.
#![warn(clippy::missing_errors_doc)]

pub mod agent;
pub mod checkpoint;
pub mod doctor;
mod fence;
pub mod inspect;
pub mod links;
pub mod local_group;
pub mod planning;
pub mod precision;
pub mod rank;
pub mod report;
pub mod supervisor;
pub mod tls;
pub mod train;

#[cfg(test)]
mod testkit;
#[cfg(test)]
mod toy;
