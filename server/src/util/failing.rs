//! What is tried until it works, such as writing to a full disk: the log has its first error and how often it came, and no line for each try.

use std::fmt::Display;

/// The error that the last try ended with, and how often it came.
#[derive(Debug, Default)]
pub(crate) struct Failing {
    error: String,
    times: u64,
}

impl Failing {
    /// Counts an error. Whether it is to be logged: it is not the one of the try before.
    pub(crate) fn is_new(&mut self, error: &impl Display) -> bool {
        let error = error.to_string();
        self.times += 1;
        let is_new = self.error != error;
        self.error = error;
        is_new
    }

    /// How many tries have failed, once after they did.
    pub(crate) fn ended(&mut self) -> Option<u64> {
        let Self { times, .. } = std::mem::take(self);
        (times > 0).then_some(times)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_logged_once_and_counted() {
        let mut failing = Failing::default();
        assert_eq!(failing.ended(), None);
        let logged: Vec<_> =
            ["full", "full", "full", "away", "full"].map(|error| failing.is_new(&error)).into();
        assert_eq!(logged, [true, false, false, true, true]);
        assert_eq!((failing.ended(), failing.ended()), (Some(5), None));
        assert!(failing.is_new(&"full"), "it is back");
    }
}
