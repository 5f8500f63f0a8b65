//! Ages and durations, rounded for people who read them in a terminal.

use jiff::Timestamp;

const MINUTE: i64 = 60;
const HOUR: i64 = 60 * MINUTE;
const DAY: i64 = 24 * HOUR;
const TWO_DAYS: i64 = 2 * DAY;

/// Formats the time since `then`, rounded down: `40 s`, `12 min`, `3 h`, `5 d`. Days begin at 48 hours.
pub(crate) fn age(then: Timestamp) -> String {
    // Clocks of two machines may differ, so `then` may be in the future.
    format_duration(Timestamp::now().as_second().saturating_sub(then.as_second()).max(0))
}

/// Formats a duration like [`age`].
pub(crate) fn format_duration(secs: i64) -> String {
    match secs {
        ..MINUTE => format!("{secs} s"),
        MINUTE..HOUR => format!("{} min", secs / MINUTE),
        HOUR..TWO_DAYS => format!("{} h", secs / HOUR),
        _ => format!("{} d", secs / DAY),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_grow_coarser() {
        for (secs, shown) in
            [(0, "0 s"), (59, "59 s"), (60, "1 min"), (7199, "1 h"), (2 * DAY - 1, "47 h"), (2 * DAY, "2 d")]
        {
            assert_eq!(format_duration(secs), shown);
        }
        assert_eq!(age(Timestamp::now() + jiff::SignedDuration::from_hours(1)), "0 s");
    }
}
