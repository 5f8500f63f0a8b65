//! Exponential back-off: the pauses between tries.

use std::time::Duration;

/// Each pause is twice as long as the previous pause, up to the longest. To begin again with the first pause, copy the initial value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    pub first: Duration,
    pub longest: Duration,
    next: Duration,
}

impl Backoff {
    pub const fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest, next: first }
    }

    /// The pause after this many failures in a row, from 1.
    pub fn pause_after(&self, failures: u32) -> Duration {
        let doubled = 2_u32.saturating_pow(failures.saturating_sub(1));
        self.first.saturating_mul(doubled).min(self.longest)
    }

    /// The pause before the next try.
    pub fn next_pause(&mut self) -> Duration {
        let pause = self.next;
        self.next = (pause * 2).min(self.longest);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest() {
        let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(5));
        assert_eq!([(); 5].map(|()| backoff.next_pause().as_secs()), [1, 2, 4, 5, 5]);
        assert_eq!([1, 2, 3, 4, 5, u32::MAX].map(|n| backoff.pause_after(n).as_secs()), [1, 2, 4, 5, 5, 5]);
    }
}
