//! Receives what happens in a run.

use super::Reporter;
use lockstep_protocol::agent::AttemptEvent;

/// Receives what a rank reports while it trains.
pub trait Observer: Send + Sync {
    /// A point of a metric (a name of [`lockstep_protocol::metric::NAMES`]).
    fn metric(&self, name: &str, step: u64, value: f32);
    /// A line for people.
    fn log(&self, line: &str);
    /// Anything else.
    fn event(&self, event: &AttemptEvent);
}

impl Observer for Reporter {
    fn metric(&self, name: &str, step: u64, value: f32) {
        Reporter::metric(self, name, step, value);
    }
    fn log(&self, line: &str) {
        Reporter::log(self, line);
    }
    fn event(&self, event: &AttemptEvent) {
        Reporter::event(self, event);
    }
}
