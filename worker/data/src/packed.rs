//! Packed pictures (IDX, CIFAR), which are kept in memory: a check of the available memory.

use lockstep_host::usage::memory_available;

/// Fails if `bytes` do not fit in the memory that is available on this machine or in its control group. Everything fits if the system does
/// not report the available memory.
/// The error is a phrase to follow the name of the pictures' file.
pub(super) fn check_fits(bytes: u64) -> Result<(), String> {
    match memory_available().filter(|free| bytes > *free) {
        Some(free) => Err(format!(
            "would take {:.1} GB of memory, and {:.1} GB are free on this machine: use a machine with more memory, or store the pictures \
             as files, which are not all kept in memory",
            bytes as f64 / 1e9,
            free as f64 / 1e9
        )),
        None => Ok(()),
    }
}
