//! Everything that runs on a training machine: the agent (one a machine) and ranks (one a slot), which train with the crates
//! beside this one and keep checkpoints.

// What a call can fail with is part of what its caller has to know.
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
mod test_script;
#[cfg(test)]
mod toy;
