//! Profiling of a step on request: each call is timed with two events.

use super::{
    command::Part,
    device::{Event, Stream},
    error::CudaError,
};
use std::sync::{Mutex, PoisonError};

/// A timed call.
#[derive(Debug, Clone)]
pub(super) struct TimedCall {
    /// The part of the step to which the call belongs.
    pub(super) part: Part,
    pub(super) name: String,
    pub(super) millis: f64,
}

struct TimedCalls {
    /// The part of the step to which the next call belongs.
    part: Part,
    /// By call, in order: the part, the name, and the events before and after the call.
    calls: Vec<(Part, String, Event, Event)>,
}

/// The timed calls; `None` while profiling is off.
#[derive(Default)]
pub(super) struct Profile(Mutex<Option<TimedCalls>>);

impl Profile {
    /// Runs `call`, which launches work on `stream`, and times that work if profiling is on.
    pub(super) fn time<T, E: From<CudaError>>(
        &self,
        stream: Stream,
        name: impl FnOnce() -> String,
        call: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let mut timed_calls = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(TimedCalls { part, calls }) = timed_calls.as_mut() else {
            drop(timed_calls);
            return call();
        };
        let (begin, end) = (Event::timed()?, Event::timed()?);
        begin.record(stream)?;
        let result = call()?;
        end.record(stream)?;
        calls.push((*part, name(), begin, end));
        Ok(result)
    }

    /// Assigns the following calls to `part`.
    pub(super) fn begin_part(&self, part: Part) {
        if let Some(timed_calls) = self.0.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            timed_calls.part = part;
        }
    }

    /// Starts profiling.
    pub(super) fn begin(&self) {
        let timed_calls = TimedCalls { part: Part::Begin, calls: Vec::new() };
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(timed_calls);
    }

    /// Stops profiling and returns the calls since [`Profile::begin`].
    pub(super) fn end(&self) -> Result<Vec<TimedCall>, CudaError> {
        let timed_calls = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let calls = timed_calls.map(|timed_calls| timed_calls.calls).unwrap_or_default();
        let timed = |(part, name, begin, end): (Part, String, Event, Event)| {
            Ok(TimedCall { part, name, millis: f64::from(begin.millis_to(&end)?) })
        };
        calls.into_iter().map(timed).collect()
    }
}
