//! Packed pictures (IDX, CIFAR), which are kept in memory: a check of the available memory.

use lockstep_host::usage::memory_available;

/// Fails if `bytes` do not fit in the memory that is available on this machine or in its control group.
///
/// # Errors
/// Why the pictures do not fit, as a phrase to follow the name of their file.
pub(super) fn check_fits(bytes: u64) -> Result<(), String> {
    check_fits_in(bytes, memory_available())
}

/// Fails if `bytes` are more than the `free` memory. Everything fits if the system does not report the free memory.
fn check_fits_in(bytes: u64, free: Option<u64>) -> Result<(), String> {
    match free.filter(|free| bytes > *free) {
        Some(free) => Err(format!(
            "would take {:.1} GB of memory, and {:.1} GB are free on this machine: use a machine with more memory, or store the pictures \
             as files, which are not all kept in memory",
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
    fn pictures_may_fill_the_free_memory_but_not_exceed_it() {
        assert_eq!(check_fits_in(1 << 30, Some(1 << 30)), Ok(()));
        assert_eq!(check_fits_in(u64::MAX, None), Ok(()));
        let why = check_fits_in(3_000_000_001, Some(3_000_000_000)).unwrap_err();
        assert!(why.starts_with("would take 3.0 GB of memory, and 3.0 GB are free"), "{why}");
        assert!(check_fits(1).is_ok() && check_fits(u64::MAX).is_err(), "the system reports free memory");
    }
}
