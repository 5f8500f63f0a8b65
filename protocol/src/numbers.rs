//! Numbers as people read them, the same on every page and in every command.

/// `0.886` as `88.6 %`. A tie is rounded up, as browsers do it: 84.25 is 84.3 everywhere.
pub fn percent(share: f64) -> String {
    format!("{:.1} %", (share * 100.0).next_up())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_are_rounded_as_in_a_browser() {
        for (share, expected) in
            [(0.8425, "84.3 %"), (0.8424, "84.2 %"), (0.886, "88.6 %"), (0.0, "0.0 %"), (1.0, "100.0 %")]
        {
            assert_eq!(percent(share), expected);
        }
    }
}
