//! An outage of the server, which a command waits out: reported once when it begins, and once when it ends.

use super::SERVER_TIMEOUT;
use crate::cli::WrongRequest;
use std::time::Instant;

/// The time since which the server has not responded, if there is an outage.
#[derive(Debug, Default)]
pub(crate) struct Outage(Option<Instant>);

impl Outage {
    /// Returns `Ok` if the caller should repeat the request that failed with `error`. Prints a message at the first error of an outage.
    ///
    /// # Errors
    /// Returns `error` if the server refuses the request, or the outage lasts too long.
    pub(crate) fn tolerate(&mut self, error: anyhow::Error, print: impl FnOnce(&str)) -> anyhow::Result<()> {
        match self.0 {
            _ if error.is::<WrongRequest>() => return Err(error),
            Some(since) if since.elapsed() > SERVER_TIMEOUT => return Err(error),
            Some(_) => {}
            None => {
                self.0 = Some(Instant::now());
                print("the server does not answer; trying again ...");
            }
        }
        Ok(())
    }

    pub(crate) fn report_restored(&mut self, print: impl FnOnce(&str)) {
        if self.0.take().is_some() {
            print("the server answers again");
        }
    }
}
