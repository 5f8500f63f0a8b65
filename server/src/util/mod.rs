//! Utilities for all parts of the server: log lines of repeated failures, free space on the disk, histograms of durations, numbers in
//! binary rows, opening regular files, permissions of files, and the server's background tasks.

pub(crate) mod disk_space;
pub(crate) mod failing;
pub(crate) mod histogram;
pub(crate) mod numbers;
pub(crate) mod private;
pub(crate) mod regular;
pub(crate) mod tasks;
