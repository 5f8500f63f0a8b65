//! Packed pictures (IDX, CIFAR), which jobs hold in memory: how much of it a dataset may take, and what an inspection needs of them.

use lockstep_host::usage::memory_available;

/// What becomes of packed pictures that are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reading {
    /// All of them are held.
    Whole,
    /// They are counted and measured, one after another.
    Measure,
}

/// Whether so many bytes fit into the memory that is free on this machine, or in its control group.
///
/// # Errors
/// They do not, to stand after the name of the file that they come from.
pub(super) fn check_fits(bytes: u64) -> Result<(), String> {
    fits(bytes, memory_available())
}

/// Where the system does not say what is `free`, everything fits.
fn fits(bytes: u64, free: Option<u64>) -> Result<(), String> {
    match free.filter(|free| bytes > *free) {
        Some(free) => Err(format!(
            "would take {:.1} GB of memory, and {:.1} GB are free on this machine: take a machine with more, or store the pictures as \
             files, which are not held at once",
            bytes as f64 / 1e9,
            free as f64 / 1e9
        )),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_free_may_be_taken_and_not_a_byte_more() {
        assert_eq!(fits(1 << 30, Some(1 << 30)), Ok(()));
        assert_eq!(fits(u64::MAX, None), Ok(()));
        let why = fits(3_000_000_001, Some(3_000_000_000)).unwrap_err();
        assert!(why.starts_with("would take 3.0 GB of memory, and 3.0 GB are free"), "{why}");
        assert!(check_fits(1).is_ok() && check_fits(u64::MAX).is_err(), "this machine says what it has");
    }
}
