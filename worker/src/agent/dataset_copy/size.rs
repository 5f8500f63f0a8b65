//! Formats sizes.

pub(super) fn megabytes(bytes: u64) -> String {
    format!("{:.1} MB", bytes as f64 / 1e6)
}

/// The size in megabytes, rounded up.
pub(super) fn megabytes_up(bytes: u64) -> String {
    format!("{:.1} MB", bytes.div_ceil(100_000) as f64 / 10.0)
}

/// The size in megabytes, rounded down.
pub(super) fn megabytes_down(bytes: u64) -> String {
    format!("{:.1} MB", (bytes / 100_000) as f64 / 10.0)
}

/// Formats two sizes in megabytes, or in bytes if both are equal in megabytes.
pub(super) fn sizes(one: u64, other: u64) -> (String, String) {
    match (megabytes(one), megabytes(other)) {
        (a, b) if a == b => (format!("{one} bytes"), format!("{other} bytes")),
        differ => differ,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_equal_in_megabytes_are_shown_in_bytes() {
        assert_eq!(sizes(2_000_000, 1_000_000), ("2.0 MB".into(), "1.0 MB".into()));
        assert_eq!(sizes(1_000_001, 1_000_000), ("1000001 bytes".into(), "1000000 bytes".into()));
    }

    #[test]
    fn needed_space_is_rounded_up_and_free_space_down() {
        assert_eq!(
            (megabytes_up(100_000), megabytes_up(100_001), megabytes_down(199_999)),
            ("0.1 MB".into(), "0.2 MB".into(), "0.1 MB".into())
        );
    }
}
