//! What every part of the server may use and no crate has: repeated failures in the log, histograms of durations, numbers in binary rows,
//! modes of files, the server's own tasks.

pub(crate) mod failing;
pub(crate) mod histogram;
pub(crate) mod numbers;
pub(crate) mod private;
pub(crate) mod regular;
pub(crate) mod tasks;
