//! Formats sizes. A needed size is rounded up and an available size down, so that the two differ in a message.

pub(super) fn megabytes_up(bytes: u64) -> String {
    format!("{:.1} MB", bytes.div_ceil(100_000) as f64 / 10.0)
}

pub(super) fn megabytes_down(bytes: u64) -> String {
    format!("{:.1} MB", (bytes / 100_000) as f64 / 10.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needed_space_is_rounded_up_and_free_space_down() {
        assert_eq!(
            (megabytes_up(100_000), megabytes_up(100_001), megabytes_down(199_999)),
            ("0.1 MB".into(), "0.2 MB".into(), "0.1 MB".into())
        );
    }
}
