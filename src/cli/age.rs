//! Ages, rounded for people who read them in a terminal.

pub(crate) use lockstep_protocol::numbers::format_duration;

use jiff::Timestamp;

/// Formats the time since `then`, as [`format_duration`] does.
pub(crate) fn age(then: Timestamp) -> String {
    // Clocks of two machines may differ, so `then` may be in the future.
    format_duration(Timestamp::now().as_second().saturating_sub(then.as_second()).max(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_in_the_future_has_no_age() {
        assert_eq!(age(Timestamp::now() + jiff::SignedDuration::from_hours(1)), "0 s");
    }
}
