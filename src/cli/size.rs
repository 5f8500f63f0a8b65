//! Parses sizes of files and disks.

/// Parses a size in bytes, or in units of 1000 (kB, MB, GB, TB) or of 1024 (KiB, MiB, GiB, TiB): `500GB`, `1.5 TiB`, `4096`.
///
/// # Errors
/// The text is not a size.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kb" => 1000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        "kib" => 1 << 10,
        "mib" => 1 << 20,
        "gib" => 1 << 30,
        "tib" => 1 << 40,
        _ => return Err(EXPECTED.into()),
    };
    let integer = number.parse::<u64>().ok().and_then(|number| number.checked_mul(factor));
    let bytes = integer.or_else(|| {
        let bytes = number.parse::<f64>().ok().filter(|_| number.contains('.'))? * factor as f64;
        // Beyond 2^53, a float cannot represent every integer.
        (bytes < 2_f64.powi(53)).then_some(bytes as u64)
    });
    bytes.ok_or_else(|| EXPECTED.into())
}

const EXPECTED: &str =
    "a size is a number and a unit, such as 500GB, 1.5TB or 200GiB; a number without a unit is bytes";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units_of_1000_or_of_1024() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("12b", 12),
            ("1kB", 1000),
            ("500GB", 500_000_000_000),
            ("1.5 TB", 1_500_000_000_000),
            ("2TiB", 2 << 40),
            ("0.5KiB", 512),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in [
            "",
            "GB",
            "-1",
            "1XB",
            "1..5GB",
            "1GB2",
            "18446744073709551616",
            "20000000TB",
            "20000.5TB",
            "1e3",
        ] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }
}
