//! Profiling of a step on request: each call is timed with two events.

use super::{
    command::Part,
    device::{Event, Stream},
    error::CudaError,
};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A timed call.
#[derive(Debug, Clone)]
pub(super) struct TimedCall {
    /// The part of the step to which the call belongs.
    pub(super) part: Part,
    pub(super) name: String,
    pub(super) millis: f64,
}

/// A call whose time is not yet read.
struct Call {
    part: Part,
    name: String,
    begin: Event,
    end: Event,
}

/// The calls since profiling began.
struct Calls {
    /// The part of the step to which the next call belongs.
    current_part: Part,
    /// All calls so far, in order.
    calls: Vec<Call>,
}

/// The timed calls; `None` while profiling is off.
#[derive(Default)]
pub(super) struct Profile(Mutex<Option<Calls>>);

impl Profile {
    fn lock(&self) -> MutexGuard<'_, Option<Calls>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `call`, which launches work on `stream`, and times that work if profiling is on.
    pub(super) fn time<T, E: From<CudaError>>(
        &self,
        stream: Stream,
        name: impl FnOnce() -> String,
        call: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let mut profile = self.lock();
        let Some(Calls { current_part, calls }) = profile.as_mut() else {
            drop(profile);
            return call();
        };
        let (begin, end) = (Event::timed()?, Event::timed()?);
        begin.record(stream)?;
        let result = call()?;
        end.record(stream)?;
        calls.push(Call { part: *current_part, name: name(), begin, end });
        Ok(result)
    }

    /// Assigns the following calls to `part`.
    pub(super) fn begin_part(&self, part: Part) {
        if let Some(calls) = self.lock().as_mut() {
            calls.current_part = part;
        }
    }

    /// Starts profiling.
    pub(super) fn begin(&self) {
        *self.lock() = Some(Calls { current_part: Part::Begin, calls: Vec::new() });
    }

    /// Stops profiling and returns the calls since [`Profile::begin`].
    pub(super) fn end(&self) -> Result<Vec<TimedCall>, CudaError> {
        let calls = self.lock().take().map(|calls| calls.calls).unwrap_or_default();
        let read_time = |Call { part, name, begin, end }: Call| {
            Ok(TimedCall { part, name, millis: f64::from(begin.millis_to(&end)?) })
        };
        calls.into_iter().map(read_time).collect()
    }
}
