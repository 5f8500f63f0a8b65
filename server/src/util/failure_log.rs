//! Log lines of operations that are retried until they succeed, such as writing to a full disk. A repeated error is logged once, and the
//! number of failures is logged at the end.

use std::fmt::Display;

/// Remembers the error of the last try, and the number of failed tries.
#[derive(Debug, Default)]
pub(crate) struct FailureLog {
    error: String,
    failures: u64,
}

impl FailureLog {
    /// Counts the result of a try. Logs an error that differs from the error of the previous try (`failed`), and the first success after
    /// errors (`succeeded`).
    pub(crate) fn log<T, E: Display>(&mut self, result: &Result<T, E>, failed: &str, succeeded: &str) {
        match result {
            Ok(_) => {
                if let Some(failures) = self.note_success() {
                    tracing::info!(failures, "{succeeded}");
                }
            }
            Err(error) => {
                if self.note_failure(error) {
                    tracing::warn!(%error, "{failed}; trying again");
                }
            }
        }
    }

    /// Counts a failed try. Returns whether the error differs from the error of the previous try, and so must be logged.
    pub(crate) fn note_failure(&mut self, error: &impl Display) -> bool {
        let error = error.to_string();
        self.failures += 1;
        let is_new = self.error != error;
        self.error = error;
        is_new
    }

    /// Notes a success. Returns the number of failed tries before the success, or `None` if no try has failed.
    pub(crate) fn note_success(&mut self) -> Option<u64> {
        let Self { failures, .. } = std::mem::take(self);
        (failures > 0).then_some(failures)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_logged_once_and_counted() {
        let mut failure_log = FailureLog::default();
        assert_eq!(failure_log.note_success(), None);
        let logged: Vec<_> =
            ["full", "full", "full", "away", "full"].map(|error| failure_log.note_failure(&error)).into();
        assert_eq!(logged, [true, false, false, true, true]);
        assert_eq!((failure_log.note_success(), failure_log.note_success()), (Some(5), None));
        assert!(failure_log.note_failure(&"full"), "a new failure is logged again");
    }
}
